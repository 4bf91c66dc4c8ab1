"""The command line of `recipes/audit.py`: which run, and which of its steps. A run's config is not to be overridden."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hfdist.config.checks.preflight import OFFLINE_FLAG
from hfdist.config.cli.command import go_offline
from hfdist.config.cli.process_end import stop_everywhere, told_in_one_message
from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.overrides import COMMAND_LINE
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError, nearest
from hfdist.topology import read_launcher

_HELP = """\
Prove from a run's ledger that it read every document as often as planned, or show what a step was made of.

python recipes/audit.py run=runs/NAME                    the proof; exit code 3 where it fails
python recipes/audit.py run=runs/NAME step=120           the documents behind optimizer step 120 (the first is 1)
python recipes/audit.py run=runs/NAME step=120 text=full ... with all the text that the step read

run=FOLDER        a run's folder, with config.yaml, ledger and checkpoints
step=N            a whole number >= 1
text=short|full   how much text to show of each piece of a document; default: short
--offline         open no connection to the Hub
"""
_KEYS = ("run", "step", "text")
_TEXTS = ("short", "full")
_CONFIG = "config"


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """What is to be audited."""

    run: Path
    """A run's folder."""
    step: int | None = None
    """As the Trainer counts them: the first is 1; None: the whole run."""
    shows_all_text: bool = False


def audit_recipe(main: Callable[[AuditRequest, RunConfig], None]) -> Callable[[], None]:
    """Make `main(request, config of the run)` a command that ends with a documented exit code."""

    @functools.wraps(main)
    def command() -> None:
        with told_in_one_message(stop_everywhere):
            arguments = sys.argv[1:]
            if {"-h", "--help"} & {*arguments}:
                sys.stdout.write(_HELP)
                return
            if OFFLINE_FLAG in arguments:
                go_offline()
            request = parse_request([argument for argument in arguments if argument != OFFLINE_FLAG])
            main(request, compose_config(name=_CONFIG, extra_dir=request.run))

    return command


def parse_request(arguments: Sequence[str]) -> AuditRequest:
    """Read the command line; ConfigError: an unknown key, a wrong value, no such run, or several processes."""
    values = dict(map(_parse, arguments))
    if "run" not in values:
        raise ConfigError("which run?", where=COMMAND_LINE, allowed="run=FOLDER", hint="run=runs/NAME")
    if "text" in values and "step" not in values:
        raise ConfigError("text is shown of a step only", where=f"text ({COMMAND_LINE})", hint="step=1 text=full")
    num_processes = read_launcher().world_size
    if num_processes > 1:
        found, hint = f"{num_processes} processes", f"python recipes/audit.py {' '.join(arguments)}"
        raise ConfigError("an audit takes one process", where="accelerate launch", found=found, hint=hint)
    run, step, text = _find_run(values["run"]), values.get("step"), values.get("text", "short")
    if step is not None and not (step.isdecimal() and int(step) >= 1):
        allowed = "a whole number >= 1, as in step=120"
        raise ConfigError("this is no step", where=f"step ({COMMAND_LINE})", found=step, allowed=allowed)
    if text not in _TEXTS:
        where, near = f"text ({COMMAND_LINE})", nearest(text, _TEXTS, "text={}", cutoff=0.0)
        raise ConfigError("no such value", where=where, found=text, allowed=", ".join(_TEXTS), hint=near)
    return AuditRequest(run=run, step=None if step is None else int(step), shows_all_text=text == "full")


def _parse(argument: str) -> tuple[str, str]:
    name, equals, value = argument.partition("=")
    if name in _KEYS and value:
        return name, value
    what = "this is not an override" if not equals or name in _KEYS else f"there is no key `{name}`"
    allowed = "run=FOLDER, step=N, text=short|full, --help, --offline; other keys are those of the run, and stay"
    hint = nearest(name.lstrip("-"), _KEYS, f"{{}}={value or '...'}") or "--help"
    raise ConfigError(what, where=COMMAND_LINE, found=argument, allowed=allowed, hint=hint)


def _find_run(value: str) -> Path:
    run = Path(value).expanduser()
    if (run / f"{_CONFIG}.yaml").is_file():
        return run
    others = sorted(path.parent.name for path in run.parent.glob(f"*/{_CONFIG}.yaml"))
    allowed = f"a folder with {_CONFIG}.yaml" + (f": {', '.join(others[:20])} in {run.parent}" if others else "")
    hint = nearest(run.name, others, f"run={run.parent / '{}'}")
    raise ConfigError("there is no such run", where=f"run ({COMMAND_LINE})", found=value, allowed=allowed, hint=hint)
