"""Checks of where a run's files come from and go to: folders that must take a save, and the Hub. Loads no torch."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

from hfdist.config.paths import expand_user
from hfdist.errors import first_line, printable
from hfdist.tools.doctor.finding import Finding

_GIB = 1 << 30
_LEAST_FREE = 1 * _GIB
"""Least free bytes: with fewer, no run can be saved."""
_ENOUGH_FREE = 20 * _GIB
"""Free bytes below which the checkpoints of a run may fill the disk."""
_SLOW_SYNC_SECONDS = 1.0
"""A disk whose probe takes longer makes saves slow."""
_PROBE_BYTES = 1 << 20
_HUB_SECONDS = 5.0
"""Seconds to wait for an answer of the Hub."""


def check_folders(run_dir: Path) -> list[Finding]:
    """Check the folder of runs, and the folder of models and data from the Hub."""
    # Imported here and below, as it is slow to import, and the Hub may not be asked.
    from huggingface_hub import constants

    return [
        _check_folder("run.dir", run_dir, "run.dir=FOLDER on a disk that can be written"),
        _check_folder("Hub cache", Path(constants.HF_HUB_CACHE), "export HF_HOME=FOLDER on a disk that can be written"),
    ]


def existing_part(folder: Path) -> Path:
    """Give a folder, or the first folder above it that exists."""
    path = expand_user(folder).absolute()
    return next(part for part in (path, *path.parents) if os.path.lexists(part))


def _check_folder(check: str, folder: Path, hint: str) -> Finding:
    """Check a folder by its free bytes and by a save."""
    existing = existing_part(folder)
    try:
        free = shutil.disk_usage(existing).free
        seconds = _save(existing)
    except OSError as error:
        return Finding.of(check, f"{folder} cannot hold a save: {error.strerror}", error=True, hint=hint)
    text = f"{folder}: {free / _GIB:.1f} GiB free; written, synced and renamed in {1000 * seconds:.0f} ms"
    if free < _ENOUGH_FREE:
        more_room = "free space, a smaller checkpoint.keep, or another disk"
        return Finding.of(check, text, error=free < _LEAST_FREE, warning=True, hint=more_room)
    if seconds > _SLOW_SYNC_SECONDS:
        return Finding.of(check, text, warning=True, hint="another disk: each save waits for this one")
    return Finding.of(check, text)


def _save(parent: Path) -> float:
    """Save some bytes in a folder as a checkpoint is saved, and give the seconds: write, fsync, rename, fsync again."""
    with tempfile.TemporaryDirectory(prefix=".hfdist-doctor-", dir=parent) as name:
        folder, content = Path(name), os.urandom(_PROBE_BYTES)
        begun = time.monotonic()
        with (folder / "unfinished").open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        (folder / "unfinished").rename(folder / "whole")
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if (folder / "whole").read_bytes() != content:
            raise OSError(0, "it gives back other bytes than were written")
        return time.monotonic() - begun


def check_hub() -> Finding:
    """Check whether the Hub answers, and whether it takes the token, by asking whose token it is."""
    from huggingface_hub import constants, get_token

    check, has_token = "Hub", get_token() is not None
    if constants.HF_HUB_OFFLINE:
        return Finding.of(check, "switched off (HF_HUB_OFFLINE): models and data come from this machine")
    offline = "HF_HUB_OFFLINE=1, with models and data from `hf download` on a connected machine"
    status = _status_of_hub()
    if isinstance(status, str):
        text = f"{constants.ENDPOINT} is not reached: {status}"
        return Finding.of(check, text, warning=True, hint=offline)
    if status in (401, 403) and has_token:
        return Finding.of(check, "the Hub refuses the token", error=True, hint="`hf auth login`, or another HF_TOKEN")
    if status >= 500 or status == 429:
        return Finding.of(check, f"{constants.ENDPOINT} answers {status}", warning=True, hint=f"wait, or {offline}")
    return Finding.of(check, f"{constants.ENDPOINT} answers, {'with' if has_token else 'without'} a token")


def _status_of_hub() -> int | str:
    """Give the HTTP status of the Hub's answer, or in words why there is no answer."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # its __all__ lacks it

    answers: list[int | str] = []

    def ask() -> None:
        url = f"{constants.ENDPOINT}/api/whoami-v2"
        try:
            answers.append(get_session().get(url, headers=build_hf_headers(), timeout=_HUB_SECONDS).status_code)
        except Exception as error:
            # Whatever the client raises: that is the finding.
            answers.append(printable(first_line(error), 200))

    # The time limit of the request does not hold for the search of the address, which may take a minute.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS + 1)
    return answers[0] if answers else f"no answer within {_HUB_SECONDS:.0f} s"
