"""The command line of `recipes/report.py`: which runs, and whether their page is written or served."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
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
"""Most runs of a sweep: the page shows all its trials in one part."""


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """What `hfdist report` is asked."""

    folders: tuple[Path, ...]
    sweeps: tuple[Path, ...] = ()
    """Folders of sweeps; the runs of their best trials are in `folders`."""
    out: Path
    is_live: bool = False
    port: int = 0
    """0: any that is free."""


def _report(arguments: list[str]) -> None:
    """Write or serve the page."""
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
        ResourceError: it cannot be written.
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
    """Read the command line; ConfigError: an unknown key, a wrong value, or no such run."""
    # `run=NAME` means NAME, as for audit, plan and job. But a folder's name may hold anything, also `=`.
    arguments = [one if os.path.isdir(one) else one.removeprefix("run=") for one in arguments]
    names = [one for one in arguments if not one.startswith("-") and ("=" not in one or os.path.isdir(one))]
    values = read_arguments([one for one in arguments if one not in names], _KEYS)
    if not 1 <= len(names) <= _MOST_RUNS:
        allowed = f"1 to {_MOST_RUNS} folders"
        raise ConfigError("which runs?", where=COMMAND_LINE, found=len(names), allowed=allowed, hint="runs/NAME")
    port = values.get("port", "0")
    if not (port.isdecimal() and len(port) < 6 and int(port) < 1 << 16):
        raise ConfigError("this is no port", where=f"port ({COMMAND_LINE})", found=port, allowed="0 to 65535")
    if "port" in values and not read_flag(values, "live"):
        where = f"port ({COMMAND_LINE})"
        raise ConfigError("only a page that is served has a port", where=where, found=port, hint=f"--live port={port}")
    given = [find_run(name, (*IN_RUN.marks, TRIALS)) for name in dict.fromkeys(names)]
    # The folder of another user may be read-only.
    beside = given[0] if len(given) == 1 and os.access(given[0], os.W_OK) else Path()
    out = expand_user(values["out"]) if "out" in values else beside / "report.html"
    if os.path.isdir(out):
        raise ConfigError(
            "this is a folder", where=f"out ({COMMAND_LINE})", found=str(out), hint=f"out={out}/report.html"
        )
    if out.suffix not in (".html", ".htm"):
        what, hint = "the page is HTML, which a browser prints", f"out={out.with_suffix('.html')}"
        raise ConfigError(what, where=f"out ({COMMAND_LINE})", found=str(out), hint=hint)
    sweeps = tuple(folder for folder in given if (folder / TRIALS).is_file())
    folders = tuple(run for folder in given for run in (_best_trials(folder) if folder in sweeps else [folder]))
    if not folders:
        raise ConfigError("no trial of this sweep has begun", where=COMMAND_LINE, found=str(given[0]))
    return ReportRequest(
        folders=folders[:_MOST_RUNS], sweeps=sweeps, out=out, is_live=read_flag(values, "live"), port=int(port)
    )


def _best_trials(folder: Path) -> list[Path]:
    """Give the run folders of a sweep's trials, the best first."""
    found = [folder / f"trial-{trial.number:04d}" for trial in read_trials(folder)]
    return [run for run in found if any(mark.exists() for mark in RunFolder(run).marks)][:_MOST_BEST]


main = as_command(_HELP, _report)
