"""The command line of `hfdist generate`: a generator that joins a run on another machine."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from hfdist.config.cli.arguments import as_command, read_arguments, read_number
from hfdist.config.cli.process_end import print_at_once
from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.paths import expand_user
from hfdist.errors import ConfigError
from hfdist.messages.door import SECRET
from hfdist.processes.stop_signals import heard_signals
from hfdist.tune.generators.remote_files import reporting_disk_errors
from hfdist.tune.generators.scratch import scratch_folder

_HELP = f"""\
Answer the prompts of a run on another machine (task=grpo, task=rloo, task=ppo), while that trains. The run sends its
settings, its model and the weights of each step that it publishes. This process may be ended at any moment: others get
its prompts.

hfdist grpo task.generators_port=29700 ...       the run; with task.generators=N, processes of its own help
hfdist generate join=HOST:29700                  once for each GPU, with CUDA_VISIBLE_DEVICES

join=HOST:PORT      the machine of the run's rank 0, and task.generators_port
model=FOLDER        the same model and tokenizer on this machine, so that they are not fetched
folder=FOLDER       for what is fetched; the model stays there for the next time; default: a temporary one
wait_seconds=N      for which a run is tried that does not answer, as before its start; default: 600

The same {SECRET} belongs in the environment of the run and of its generators. It never travels. Without
one, a run lets in generators of its own machine alone.

Exit codes: 0 the training has ended, or it was told to end, 2 a wrong argument, or the run refuses it, 6 the run does
not answer, 7 this machine's disk cannot hold or read the files.
"""
_LABEL = r"[^:.]{1,63}"
"""A part of a host's name, between dots: sockets raise no OSError for others."""
_KEYS = {"join": "HOST:PORT", "model": "FOLDER", "folder": "FOLDER", "wait_seconds": "N"}


def _generate(arguments: list[str]) -> None:
    """Serve the run until it has ended, or a signal ends the process; raises what `RemoteGenerator.run` does."""
    values = read_arguments(arguments, _KEYS, first="join")
    address, own = _read_address(values.get("join")), _read_own(values)
    wait_seconds = read_number(values, "wait_seconds", "600")
    for number in heard_signals():
        # An exit of Python's removes the temporary folder.
        signal.signal(number, lambda *_: sys.exit(0))
    # Imported here: with torch, which takes seconds.
    made = importlib.import_module("hfdist.tune.generators.remote").RemoteGenerator
    kept = _make_folder(values)
    parent = kept or Path(tempfile.gettempdir())
    with ExitStack() as stack:
        with reporting_disk_errors(parent):
            scratch = stack.enter_context(scratch_folder(parent))
        more = {"own": own, "wait_seconds": wait_seconds, "say": _say}
        made(address, os.environ.get(SECRET, ""), kept or scratch, scratch, **more).run()


def _read_address(text: str | None) -> tuple[str, int]:
    found = re.fullmatch(rf"({_LABEL}(?:\.{_LABEL})*\.?|\[.+\]):(\d{{1,5}})", text or "")
    if found is None or not 1 <= int(found[2]) <= 65535:
        what = "which run?" if text is None else "this is no address of a run"
        raise ConfigError(
            what, where=f"join ({COMMAND_LINE})", found=text, allowed="HOST:PORT", hint="join=HOST:29700, of the run"
        )
    return found[1].strip("[]"), int(found[2])


def _read_own(values: Mapping[str, str]) -> Path | None:
    if "model" not in values:
        return None
    folder = expand_user(values["model"])
    if not folder.is_dir():
        what, hint = "there is no such folder", "without model=, which fetches that of the run"
        raise ConfigError(what, where=f"model ({COMMAND_LINE})", found=folder, hint=hint)
    return folder


def _make_folder(values: Mapping[str, str]) -> Path | None:
    """Make the folder for what is fetched, if one is named."""
    if "folder" not in values:
        return None
    folder = expand_user(values["folder"]).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what, hint = "this folder cannot be made", "folder=PATH, where this user may write"
        raise ConfigError(what, where=f"folder ({COMMAND_LINE})", found=error, hint=hint) from error
    return folder


def _say(line: str) -> None:
    print_at_once(f"{time.strftime('%H:%M:%S')} {line}")


main = as_command(_HELP, _generate)
