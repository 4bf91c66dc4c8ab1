"""The command line of `hfdist report`: which runs, and whether their page is written or served."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hfdist.atomic_write import write_atomically
from hfdist.config.cli.arguments import FLAG, as_command, find_run, read_arguments, read_flag
from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.paths import expand_user
from hfdist.errors import ConfigError, ResourceError
from hfdist.records.run_folder import IN_RUN, RunFolder
from hfdist.records.trials import TRIALS
from hfdist.tools.report.live import serve
from hfdist.tools.report.page import page, parts
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.sweep import read_trials

_HELP = """\
Write one HTML file about a run, or about several laid over each other; or serve it while they train.

hfdist report runs/NAME                         writes runs/NAME/report.html
hfdist report runs/A runs/B out=compared.html   several runs, with what differs in their configs
hfdist report runs/SWEEP                        a sweep: its best trials, and all as lines over their values
hfdist report runs/NAME --live                  serves the page on 127.0.0.1, with what happens as it happens

out=FILE          where the page is written; default: report.html in the folder; here, if there are several, or if
                  nothing can be written there
--live            serve the page until Ctrl-C, and write nothing
port=N            of --live; default: any port that is free

Nothing else in a run's folder changes. Exit codes: 0; 2: a mistake in the command line; 7: the file cannot be written.
"""
_KEYS = {"out": "FILE", "port": "N", "live": FLAG}
_MOST_RUNS = 24
"""Most runs of a page: a page of more would be too large."""
_MOST_BEST = 12
"""Most trials of a sweep that are shown as runs; one part of the page shows all trials."""


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """The command line of `hfdist report`, checked."""

    folders: tuple[Path, ...]
    """Folders of the runs of the page."""
    sweeps: tuple[Path, ...] = ()
    """Folders of the sweeps whose best trials are in `folders`."""
    out: Path
    """File that the page is written to."""
    is_live: bool = False
    """Whether the page is served, and not written."""
    port: int = 0
    """Port at which the page is served; 0: any free port."""


def _report(arguments: list[str]) -> None:
    """Write or serve the page of the runs that a command line names."""
    request = parse_request(arguments)
    runs = [RunFiles(folder) for folder in request.folders]
    if request.is_live:
        serve(runs, request.port, request.sweeps)
    else:
        sys.stdout.write(f"{write(runs, request.out, request.sweeps)}\n")


def write(runs: Sequence[RunFiles], out: Path, sweeps: Sequence[Path] = ()) -> Path:
    """Write the page and give its path; a file of that name is replaced whole.

    Args:
        runs: the runs that the page is about.
        out: path of the file.
        sweeps: folders of the sweeps whose trials these runs are.

    Raises:
        ResourceError: the file cannot be written.
    """
    for run in runs:
        run.read()
    content = page(runs, parts(runs, sweeps))
    try:
        write_atomically(out, content.encode(), is_durable=False)
    except OSError as error:
        what, hint = "the page cannot be written", "out=FILE in a folder that exists"
        raise ResourceError(what, where=str(out), found=error.strerror, hint=hint) from error
    return out


def parse_request(arguments: Sequence[str]) -> ReportRequest:
    """Read the command line of `hfdist report`.

    Raises:
        ConfigError: an unknown key, a wrong value, or no such run.
    """
    # `run=NAME` means NAME, as for audit, plan and job. But a folder's name may hold anything, also `=`.
    arguments = [argument if os.path.isdir(argument) else argument.removeprefix("run=") for argument in arguments]
    names = [name for name in arguments if not name.startswith("-") and ("=" not in name or os.path.isdir(name))]
    values = read_arguments([argument for argument in arguments if argument not in names], _KEYS)
    if not 1 <= len(names) <= _MOST_RUNS:
        allowed = f"1 to {_MOST_RUNS} folders"
        raise ConfigError("which runs?", where=COMMAND_LINE, found=len(names), allowed=allowed, hint="runs/NAME")
    is_live = read_flag(values, "live")
    port = _read_port(values, is_live=is_live)
    given = [find_run(name, (*IN_RUN.marks, TRIALS)) for name in dict.fromkeys(names)]
    out = _find_out(values, given)
    sweeps = tuple(folder for folder in given if (folder / TRIALS).is_file())
    folders: list[Path] = []
    for folder in given:
        folders += _best_trials(folder) if folder in sweeps else [folder]
    if not folders:
        raise ConfigError("no trial of this sweep has begun", where=COMMAND_LINE, found=str(given[0]))
    return ReportRequest(folders=tuple(folders[:_MOST_RUNS]), sweeps=sweeps, out=out, is_live=is_live, port=port)


def _read_port(values: Mapping[str, str], *, is_live: bool) -> int:
    """Read `port=N`; 0 without it. ConfigError: it is no port, or the page is not served."""
    port, where = values.get("port", "0"), f"port ({COMMAND_LINE})"
    # The length first: Python does not read a number of thousands of digits.
    if not (port.isdecimal() and len(port) <= 5 and int(port) <= 65_535):
        raise ConfigError("this is no port", where=where, found=port, allowed="0 to 65535")
    if "port" in values and not is_live:
        raise ConfigError("only a page that is served has a port", where=where, found=port, hint=f"--live port={port}")
    return int(port)


def _find_out(values: Mapping[str, str], given: Sequence[Path]) -> Path:
    """Find the file that the page is written to. ConfigError: `out=FILE` is a folder, or no HTML."""
    where = f"out ({COMMAND_LINE})"
    if "out" in values:
        out = expand_user(values["out"])
    elif len(given) == 1 and os.access(given[0], os.W_OK):  # The folder of another user may be read-only.
        out = given[0] / "report.html"
    else:
        out = Path("report.html")
    if os.path.isdir(out):
        raise ConfigError("this is a folder", where=where, found=str(out), hint=f"out={out}/report.html")
    if out.suffix not in (".html", ".htm"):
        what, hint = "the page is HTML, which a browser prints", f"out={out.with_suffix('.html')}"
        raise ConfigError(what, where=where, found=str(out), hint=hint)
    return out


def _best_trials(folder: Path) -> list[Path]:
    """Give the run folders of the best trials of a sweep that have begun, the best first."""
    runs = [folder / f"trial-{trial.number:04d}" for trial in read_trials(folder)]
    return [run for run in runs if any(mark.exists() for mark in RunFolder(run).marks)][:_MOST_BEST]


main = as_command(_HELP, _report)
