"""Say why a run hangs, or why the watch has ended it: which rank left which collective out, at which line.

python recipes/explain_hang.py runs/demo
python recipes/explain_hang.py runs/demo --json
"""

import json
import sys

from hfdist.config.cli.arguments import FLAG, as_command, find_run, read_arguments, read_flag
from hfdist.config.override_text import COMMAND_LINE
from hfdist.errors import ConfigError, printable
from hfdist.records.run_folder import IN_RUN
from hfdist.tools.explain_hang import explain

_HELP = """\
Say why a run hangs, or why the watch has ended it: who is silent, which rank left which collective out, and at which
line. A run that goes on is asked for its stacks, and goes on. Any machine that sees the run's folder can do this.

hfdist explain-hang runs/NAME            a table of the ranks, who waits for whom, a verdict, and the next move
hfdist explain-hang runs/NAME --json     the same for tools

Exit codes: 0 explained, 2 no such run.
"""


def _explain(arguments: list[str]) -> None:
    """Print it."""
    values = read_arguments(arguments, {"run": "FOLDER", "json": FLAG}, first="run")
    as_json = read_flag(values, "json")
    if "run" not in values:
        raise ConfigError(
            "which run?", where=COMMAND_LINE, allowed="a run's folder", hint="hfdist explain-hang runs/NAME"
        )
    found = explain(find_run(values["run"], (IN_RUN.record, IN_RUN.watch)))
    lines = [json.dumps(found.to_json(), indent=1)] if as_json else [printable(line) for line in found.lines()]
    sys.stdout.write("\n".join(lines) + "\n")


main = as_command(_HELP, _explain)

if __name__ == "__main__":
    main()
