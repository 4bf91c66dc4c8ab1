"""Prove that a run read every document exactly as often as planned, or show what a step was made of. No launcher.

python recipes/audit.py run=runs/demo
python recipes/audit.py run=runs/demo step=120 text=full
"""

import sys
from pathlib import Path

from hfdist.config.cli.audit import AuditRequest, audit_recipe
from hfdist.config.run import RunConfig


@audit_recipe
def main(request: AuditRequest, configs: dict[Path, RunConfig]) -> None:
    """Open the runs' data, ledgers and checkpoints, and print what was asked for."""
    # Imported here, so that --help and a misspelt key need no torch.
    from hfdist.processes.startup import reporting
    from hfdist.verify.audit.past_run import open_past_run
    from hfdist.verify.audit.run import prove_once
    from hfdist.verify.audit.step_contents import describe_step

    first, *others = configs.items()
    with reporting("opening the data as the run did"):
        run = open_past_run(*first, dict(others))
    if request.step is None:
        lines = prove_once(run, processes=request.processes)
    else:
        lines = describe_step(run, request.step, shows_all_text=request.shows_all_text)
    for line in lines:
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
