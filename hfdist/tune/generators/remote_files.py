"""Files of a run on another machine, fetched chunk by chunk: a file is there once all of it has come and fits.

A broken connection costs the chunk that was under way. What is there already, or is the user's own and the same, is not
fetched. Several processes may fetch into one folder at a time.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hfdist.errors import PeerError, ResourceError
from hfdist.messages.message import Message, NotAMessageError, RefusedError, read_message
from hfdist.tune.generators.chunks import CHUNK_BYTES, ListedFile, Listing, hash_chunk, list_file, read_listing
from hfdist.tune.generators.link import TcpLink
from hfdist.tune.generators.messages import pack

RETRY_SECONDS = 1.0
_MOST_MISFITS = 3
"""How often a chunk may come that has another hash than the list says."""
_UNFINISHED = "unfinished"


class GoneError(FileNotFoundError):
    """The run does not have these files any more."""


class RemoteFiles:
    """Asks one start of a run for files.

    Args:
        connect: connects to the gate as a reader of files; OSError: nobody answers.
        start: name of the start of the run.
        wait_seconds: seconds in which a connection is tried anew.
        scratch: folder of this process alone, on the disk of what is fetched.
    """

    def __init__(self, connect: Callable[[], TcpLink], start: str, wait_seconds: float, scratch: Path) -> None:
        self._connect, self._start, self._wait_seconds = connect, start, wait_seconds
        self._unfinished = scratch / _UNFINISHED
        self._link: TcpLink | None = None
        self.num_bytes = 0
        """Bytes of chunks that have come."""

    def list(self, of: str, **more: int) -> Listing:
        """List the files of a kind; `more`: for the policy, `rollback` and `version`. Raises what `fetch` does."""
        answer, _ = self._ask({"of": of, **more})
        return read_listing(answer.mapping("files"))

    def fetch(self, listing: Listing, folder: Path, of: str, **more: int) -> None:
        """Bring all files of a listing into a folder, where some of them may be.

        Args:
            listing: a listing from `list`.
            folder: the folder; it need not be there yet.
            of: kind of the files.
            more: for the policy, `rollback` and `version`.

        Raises:
            GoneError: the run does not have them any more.
            PeerError: the run does not answer for `wait_seconds`, or what comes is not what was listed.
            RefusedError: the run does not let this reader in, or cannot send them.
            ResourceError: the disk is too small, or fails.
        """
        with reporting_disk_errors(folder):
            self._fetch(listing, folder, of, **more)

    def _fetch(self, listing: Listing, folder: Path, of: str, **more: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        wanted = {name: file for name, file in listing.items() if not _is_there(folder / name, file)}
        free, needed = shutil.disk_usage(folder).free, sum(file.num_bytes for file in wanted.values())
        if needed > free:
            what, found = "the disk is too small for the run's model", f"{needed} bytes, of which {free} are free"
            raise ResourceError(what, where=str(folder), found=found, hint="folder=PATH, on another disk")
        for name, file in wanted.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            with self._unfinished.open("wb") as output:
                for chunk in range(len(file.hashes)):
                    output.write(self._chunk({"of": of, **more, "file": name, "chunk": chunk}, file.hashes[chunk]))
            os.replace(self._unfinished, path)

    def refuse(self, what: str) -> None:
        """Tell the run why this generator does not join, if it still listens."""
        with suppress(OSError, NotAMessageError, RefusedError):
            self._link = self._link or self._connect()
            self._link.send(pack({"differs": what}))
        self.close()

    def close(self) -> None:
        """End the connection."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _chunk(self, asked: Mapping[str, object], wanted: str) -> bytes:
        for _ in range(_MOST_MISFITS):
            _, content = self._ask(asked)
            self.num_bytes += len(content)
            if hash_chunk(content) == wanted:
                return content
        what = "a part of the run's files comes otherwise than it was listed"
        raise PeerError(what, where=f"{asked['file']}, chunk {asked['chunk']}", hint="the same command again")

    def _ask(self, asked: Mapping[str, object]) -> tuple[Message, bytes]:
        """Ask until there is an answer; give it, and what follows it."""
        deadline = time.monotonic() + self._wait_seconds
        while True:
            try:
                self._link = self._link or self._connect()
                self._link.send(pack({"start": self._start, **asked}))
                answer = read_message(self._link.recv())
                content = self._link.recv_bytes(answer.integer("bytes", most=CHUNK_BYTES)) if "bytes" in answer else b""
            except (OSError, NotAMessageError) as error:
                self.close()
                if time.monotonic() > deadline:
                    what, hint = "the run gives no files any more", "the same command, once the run is back"
                    raise PeerError(what, where="join", found=str(error), hint=hint) from error
                time.sleep(RETRY_SECONDS)
                continue
            if "refused" in answer:
                raise RefusedError(**answer)
            if "gone" in answer:
                raise GoneError(f"{asked}")
            return answer, content


@contextmanager
def reporting_disk_errors(folder: Path) -> Iterator[None]:
    """Raise a ResourceError in place of an OSError of the block, which must come from this machine's disk.

    So connections in the block must raise other errors.
    """
    try:
        yield
    except GoneError:
        raise
    except OSError as error:
        what, hint = "the run's files cannot be kept or read here", "folder=PATH, on a disk that has room"
        raise ResourceError(what, where=str(folder), found=error, hint=hint) from error


def use_own(own: Path, listing: Listing, folder: Path) -> list[str]:
    """Link from an empty folder to the user's own copies of the run's files.

    Args:
        own: folder of the user.
        listing: the run's files.
        folder: the empty folder.

    Returns:
        Names of files that differ from the run's; if there are any, nothing is linked.
    """
    found = {name: list_file(own / name) for name in listing if (own / name).is_file()}
    others = [name for name, file in found.items() if file != listing[name]]
    if others:
        return others
    for name in found:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to((own / name).resolve())
    return []


def _is_there(path: Path, file: ListedFile) -> bool:
    return path.is_file() and list_file(path) == file
