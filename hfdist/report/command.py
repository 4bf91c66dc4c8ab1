"""The command line of `recipes/report.py`: which runs, and whether their page is written or served."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hfdist.config.cli.process_end import stop_everywhere, told_in_one_message
from hfdist.config.composition.overrides import COMMAND_LINE
from hfdist.errors import ConfigError, ResourceError, nearest
from hfdist.report.live import serve
from hfdist.report.page import page, parts
from hfdist.report.reading.run_files import MARKS, RunFiles

_HELP = """\
Write one HTML file about a run, or about several laid over each other; or serve it while they train.

hfdist report runs/NAME                         writes report.html here
hfdist report runs/A runs/B out=compared.html   several runs, with what differs in their configs
hfdist report runs/NAME --live                  serves the page on 127.0.0.1, with what happens as it happens

out=FILE          where the page is written; default: report.html in the working directory
--live            serve the page until Ctrl-C, and write nothing
port=N            of --live; default: any port that is free

A run's folder is only read. Exit codes: 0; 2: a mistake in the command line; 7: the file cannot be written.
"""
_KEYS = ("out", "port")
_LIVE = "--live"
_MOST_RUNS = 24
"""More make a page that no phone opens quickly: see the limit of its size."""


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """What is to be shown."""

    folders: tuple[Path, ...]
    out: Path = Path("report.html")
    is_live: bool = False
    port: int = 0
    """0: any that is free."""


def main() -> None:
    """Do what the command line says; end with a documented exit code."""
    with told_in_one_message(stop_everywhere):
        arguments = sys.argv[1:]
        if {"-h", "--help"} & {*arguments}:
            sys.stdout.write(_HELP)
            return
        request = parse_request(arguments)
        runs = [RunFiles(folder) for folder in request.folders]
        if request.is_live:
            serve(runs, request.port)
        else:
            sys.stdout.write(f"{write(runs, request.out)}\n")


def write(runs: Sequence[RunFiles], out: Path) -> Path:
    """Write the page and give its path; a file of that name is replaced whole.

    Raises:
        ResourceError: it cannot be written.
    """
    for run in runs:
        run.read()
    content = page(runs, parts(runs))
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(content, encoding="utf-8")
        unfinished.replace(out)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        what, hint = "the page cannot be written", "out=FILE in a folder that exists"
        raise ResourceError(what, where=str(out), found=error.strerror, hint=hint) from error
    return out


def parse_request(arguments: Sequence[str]) -> ReportRequest:
    """Read the command line; ConfigError: an unknown key, a wrong value, or no such run."""
    names = [argument for argument in arguments if "=" not in argument and not argument.startswith("-")]
    # A folder's name may hold anything.
    names += [argument for argument in arguments if "=" in argument and Path(argument).is_dir()]
    rest = [argument for argument in arguments if argument not in names]
    values = dict(_parse(argument) for argument in rest if argument != _LIVE)
    if not 1 <= len(names) <= _MOST_RUNS:
        allowed = f"1 to {_MOST_RUNS} folders"
        raise ConfigError("which runs?", where=COMMAND_LINE, found=len(names), allowed=allowed, hint="runs/NAME")
    port = values.get("port", "0")
    if not (port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError("this is no port", where=f"port ({COMMAND_LINE})", found=port, allowed="0 to 65535")
    out = Path(values.get("out", "report.html")).expanduser()
    if out.is_dir():
        raise ConfigError(
            "this is a folder", where=f"out ({COMMAND_LINE})", found=str(out), hint=f"out={out}/report.html"
        )
    folders = tuple(_find_run(name) for name in dict.fromkeys(names))
    return ReportRequest(folders=folders, out=out, is_live=_LIVE in rest, port=int(port))


def _parse(argument: str) -> tuple[str, str]:
    name, equals, value = argument.partition("=")
    if name in _KEYS and value:
        return name, value
    what = "this is not an override" if not equals or name in _KEYS else f"there is no key `{name}`"
    allowed = "folders of runs, out=FILE, port=N, --live, --help"
    known = [*(f"{key}=..." for key in _KEYS), _LIVE]
    raise ConfigError(
        what, where=COMMAND_LINE, found=argument, allowed=allowed, hint=nearest(argument, known) or "--help"
    )


def _find_run(name: str) -> Path:
    folder = Path(name).expanduser()
    if any((folder / mark).is_file() for mark in MARKS):
        return folder
    others = sorted({path.parent.name for mark in MARKS for path in folder.parent.glob(f"*/{mark}")})
    allowed = f"a folder with {' or '.join(MARKS)}" + (
        f": {', '.join(others[:20])} in {folder.parent}" if others else ""
    )
    hint = nearest(folder.name, others, str(folder.parent / "{}"))
    raise ConfigError("there is no such run", where=COMMAND_LINE, found=name, allowed=allowed, hint=hint)
