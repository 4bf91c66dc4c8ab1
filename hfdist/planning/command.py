"""The command line of `hfdist plan`: which run, for which machines, and what is asked. Nothing is started."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from hfdist.config.checks.offline import go_offline
from hfdist.config.checks.paths import check_model_paths
from hfdist.config.checks.preflight import plan_run
from hfdist.config.cli.about_run import MEANINGS, read_line
from hfdist.config.cli.arguments import as_command
from hfdist.config.hardware import CPU, Hardware, read_hardware
from hfdist.config.paths import expand_user
from hfdist.config.plan import GROUP, SECTION, compose_plan
from hfdist.config.run import AUTO, RunConfig
from hfdist.errors import ConfigError, ResourceError
from hfdist.garbage_collector import quick_imports
from hfdist.planning.request import PlanRequest
from hfdist.topology import read_launcher

JSON_FLAG = "--json"
DOES_NOT_FIT = ResourceError.exit_code
_HELP = """\
Say what a run will need before it starts: memory, time, traffic and cost, on any hardware. It starts nothing.

hfdist plan strategy=fsdp2 model=llama3_8b plan.hardware=h100_80gb plan.processes=64     the layout that is asked
hfdist plan model=llama3_8b plan.hardware=h100_80gb plan.processes=64 plan.search=true   the ten best layouts
hfdist plan model=llama3_8b plan.hardware=h100_80gb plan.find=processes                  the fewest that fit
hfdist plan run=runs/demo                                                                a run that there is

{keys}

{meanings}
{json}              for tools
--offline, --config-dir DIR and --config-name NAME mean what they mean for the recipe. All other arguments are overrides
of the run's config, as `hfdist pretrain` takes them. Data are not read, and no folder is made.

Exit codes: 0 it fits, {code} it does not, 2 a mistake in the config.
"""


def parse_request(arguments: Sequence[str]) -> PlanRequest:
    """Read the command line, compose the run's config and the plan's keys, and check all; ConfigError: a mistake."""
    line = read_line(arguments, GROUP, SECTION.keys, flags=(JSON_FLAG,))
    plan, config = compose_plan(line.of_group), line.compose()
    of_user = None if line.config_dir is None else expand_user(line.config_dir)
    is_named = plan.hardware not in (None, CPU)
    hardware = read_hardware(str(plan.hardware), of_user) if is_named else None
    check_model_paths(config)
    if (launched := read_launcher().world_size) > 1:
        hint = f"hfdist plan {shlex.join(arguments)}, without a launcher"
        raise ConfigError("a plan takes one process", where="the launcher", found=f"{launched} processes", hint=hint)
    processes = None if plan.find is not None else plan.processes or _asked_processes(config, hardware)
    if processes is not None and not plan.search:
        _check_layout(config, processes)
    as_json = JSON_FLAG in line.flags
    return PlanRequest(line=line, config=config, plan=plan, hardware=hardware, processes=processes, as_json=as_json)


def _asked_processes(config: RunConfig, hardware: Hardware | None) -> int:
    if config.launch.processes != AUTO:
        return int(config.launch.processes)
    if hardware is not None:
        return hardware.devices_per_machine
    # Imported here, so that a mistake needs no torch.
    from hfdist.launch.launch import count_gpus

    return max(1, count_gpus())


def _check_layout(config: RunConfig, processes: int) -> None:
    try:
        plan_run(config, world_size=processes)
    except ConfigError as error:
        if error.where in ("strategy", "strategy.data"):
            # Its own hint says how processes are started.
            fewest = config.strategy.mesh.world_size
            error.hint = f"plan.processes={fewest}, or plan.search=true for other layouts"
        raise


def _plan(arguments: list[str]) -> None:
    """Print it; exit code 7 where the run does not fit."""
    request = parse_request(arguments)
    if request.line.is_offline:
        go_offline()
    # Imported here, so that --help and a mistake need no torch.
    with quick_imports():
        import torch

        from hfdist.planning.answer import answer

    # What is computed is tiny, and threads would wait for each other.
    torch.set_num_threads(1)
    # DeepSpeed looks for a GPU, and logs to stdout. A plan computes nothing, and stdout is for its result.
    os.environ["DS_ACCELERATOR"] = "cpu"
    with redirect_stdout(sys.stderr):
        found = answer(request)
    sys.stdout.write(f"{json.dumps(found.content, indent=1) if request.as_json else found.text}\n")
    if not found.fits:
        sys.exit(DOES_NOT_FIT)


main = as_command(_HELP.format(keys=SECTION.describe(), meanings=MEANINGS, json=JSON_FLAG, code=DOES_NOT_FIT), _plan)
