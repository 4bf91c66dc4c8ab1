"""The command line of hfdist audit: which run, which of its steps, and how. A config stays."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hfdist.config.checks.offline import go_offline
from hfdist.config.cli.arguments import FLAG, as_command, find_run, read_arguments, read_flag, read_number
from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.files import refuse_references
from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError, nearest
from hfdist.processes.startup import switch_reports
from hfdist.records.run_folder import IN_RUN, is_run_folder
from hfdist.topology import read_launcher

_HELP = """\
Prove from a run's ledger that it read every document as often as planned, or show what a step was made of.

hfdist audit runs/NAME                    the proof; exit code 3 where it fails
hfdist audit runs/NAME step=120           the documents of optimizer step 120 (the first is 1)
hfdist audit runs/NAME step=120 text=full ... with all the text that the step read
hfdist audit runs/A,runs/B                the proof of islands, which have read one stream

run=FOLDER        a run's folder, with config.yaml, ledger and checkpoints; several of islands, with commas; the folder
                  alone means the same
step=N            a whole number >= 1
text=short|full   how much text to show of each piece of a document; default: short
processes=N       among which the proof deals the lanes; default: the cores of this machine, 1 for a small ledger
--offline         open no connection to the Hub

All other keys are those of the run, and stay.
"""
_KEYS = {"run": "FOLDER", "step": "N", "text": "short|full", "processes": "N", "offline": FLAG}
_TEXTS = ("short", "full")


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """What is to be audited."""

    runs: tuple[Path, ...]
    """The folder of a run; of islands one of each."""
    step: int | None = None
    """Number of a step as the Trainer counts them, the first is 1; None: the whole run."""
    shows_all_text: bool = False
    """Whether all text of the step is shown, not its beginnings."""
    processes: int | None = None
    """Number of processes among which the lanes are dealt; None: as many as cores, 1 for a small ledger."""
    is_offline: bool = False
    """Whether no connection to the Hub is opened."""


def audit_recipe(main: Callable[[AuditRequest, dict[Path, RunConfig]], None]) -> Callable[[], None]:
    """Make `main(request, configs of the runs)` a command that ends with a documented exit code."""

    def audit(arguments: list[str]) -> None:
        request = parse_request(arguments)
        if request.is_offline:
            go_offline()
        switch_reports(True)
        for run in request.runs:
            refuse_references(run / IN_RUN.config)
        main(request, {run: compose_config(name=IN_RUN.config.stem, extra_dir=run) for run in request.runs})

    return as_command(_HELP, audit)


def parse_request(arguments: Sequence[str]) -> AuditRequest:
    """Read the command line; ConfigError: an unknown key, a wrong value, no such run, or several processes."""
    values = read_arguments(arguments, _KEYS, first="run")
    if "run" not in values:
        raise ConfigError("which run?", where=COMMAND_LINE, allowed="run=FOLDER", hint="run=runs/NAME")
    _check_together(values)
    num_processes = read_launcher().world_size
    if num_processes > 1:
        found, hint = f"{num_processes} processes", f"hfdist audit {shlex.join(arguments)}, without a launcher"
        raise ConfigError("an audit takes one process", where="accelerate launch", found=found, hint=hint)
    # A folder's name may hold commas.
    given = [values["run"]] if is_run_folder(values["run"]) else values["run"].split(",")
    if len(given) > len(set(given) - {""}):
        where, allowed = f"run ({COMMAND_LINE})", "one folder, or the different ones of islands: run=runs/A,runs/B"
        raise ConfigError("these are no different runs", where=where, found=values["run"], allowed=allowed)
    runs = tuple(find_run(run, (IN_RUN.config,), "run") for run in given)
    text = values.get("text", "short")
    if text not in _TEXTS:
        where, near = f"text ({COMMAND_LINE})", nearest(text, _TEXTS, "text={}", cutoff=0.0)
        raise ConfigError("no such value", where=where, found=text, allowed=", ".join(_TEXTS), hint=near)
    return AuditRequest(
        runs=runs,
        step=read_number(values, "step", "1") if "step" in values else None,
        shows_all_text=text == "full",
        processes=read_number(values, "processes", "2") if "processes" in values else None,
        is_offline=read_flag(values, "offline"),
    )


def _check_together(values: Mapping[str, str]) -> None:
    """Refuse what the proof, or a step, has no use for."""
    if "text" in values and "step" not in values:
        raise ConfigError("text is shown of a step only", where=f"text ({COMMAND_LINE})", hint="step=1 text=full")
    if "processes" in values and "step" in values:
        what, where = "the documents of a step are read in one process", f"processes ({COMMAND_LINE})"
        raise ConfigError(what, where=where, found=values["processes"], hint="the same command without it")
