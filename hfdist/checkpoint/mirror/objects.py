"""The objects below one address: listed, read, written whole or not at all, and removed, each with retries."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from fsspec.spec import AbstractFileSystem
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # its __all__ lacks it

from hfdist.config.checks.urls import redact, scheme_of
from hfdist.data.storage.network import Failure, Network
from hfdist.errors import DataError, ResourceError
from hfdist.failures import is_full_disk

T = TypeVar("T")

_APPEAR_WHOLE = ("s3", "gs", "hf", "memory")
"""Schemes of stores in which an object is there with its last byte. Elsewhere it gets its name by a rename."""
UNFINISHED = re.compile(r".*\.tmp-[0-9a-f]{8}")
"""Names of what killed writes have left."""
_REMOVE_MANY = ("s3", "gs")
"""Schemes of stores that remove many objects by one request, where those that are not there are no failure.

Their libraries may not tell of an object that the store has refused to remove.
"""


class Objects:
    """What lies below an address of fsspec, which holds no secret. Names are relative to it.

    Every method raises a ResourceError where the store gives no answer, refuses, or is full.
    """

    def __init__(self, address: str, network: Network | None = None) -> None:
        self.address = address
        self._network = network or Network()

    @property
    def shown(self) -> str:
        """The address in messages."""
        return redact(self.address)

    def list(self) -> dict[str, int]:
        """Give the bytes of all objects, by name."""

        def listing(store: AbstractFileSystem) -> dict[str, int]:
            start = store._strip_protocol(self.address).rstrip("/") + "/"
            try:
                found = store.find(self.address, detail=True)
            except FileNotFoundError:
                # The first write makes it, or says what is wrong with the address.
                return {}
            return {path.removeprefix(start): int(info["size"] or 0) for path, info in found.items()}

        return self._ask(listing, "cannot be listed")

    def read(self, name: str, num_bytes: int) -> bytes:
        """Read an object that has so many bytes."""
        place = f"{self.address}/{name}"

        def reading(store: AbstractFileSystem) -> bytes:
            content = self._network.read_range(place, 0, num_bytes, num_bytes)
            if len(content) != num_bytes:
                raise EOFError(f"{len(content)} of {num_bytes} bytes arrived")
            return content

        return self._ask(reading, "cannot be read")

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Write objects, some at a time."""
        places = {f"{self.address}/{name}": content for name, content in contents.items()}

        def writing(store: AbstractFileSystem) -> None:
            if scheme_of(self.address) == "hf":
                # Each object would have a bar of its own beside that of the training.
                disable_progress_bars()
            if scheme_of(self.address) in _APPEAR_WHOLE:
                store.pipe(places)
                return
            for place, content in places.items():
                store.makedirs(place.rpartition("/")[0], exist_ok=True)
                unfinished = f"{place}.tmp-{secrets.token_hex(4)}"
                try:
                    store.pipe_file(unfinished, content)
                    store.mv(unfinished, place)
                except BaseException:
                    # A full store would keep what it had no room for.
                    with suppress(Exception):
                        store.rm_file(unfinished)
                    raise

        self._ask(writing, "cannot be written")

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; what is not there any more counts as removed."""
        places = [f"{self.address}/{name}" for name in names]

        def removing(store: AbstractFileSystem) -> None:
            if scheme_of(self.address) in _REMOVE_MANY:
                store.rm(places)
                return
            for place in places:
                # An attempt whose answer was lost may have begun with them.
                with suppress(FileNotFoundError):
                    store.rm_file(place)

        if not names:
            return
        self._ask(removing, "cannot be pruned")
        if scheme_of(self.address) in _REMOVE_MANY and (left := self.list().keys() & set(names)):
            what, found = "the mirror cannot be pruned: what was removed is still there", f"{min(left)}, of {len(left)}"
            hint = "the right to remove objects there, or a larger store"
            raise ResourceError(what, where=self.shown, found=found, hint=hint)

    def _ask(self, question: Callable[[AbstractFileSystem], T], failed: str) -> T:
        failure = Failure(f"the mirror {failed}", "check the address, the rights there and the network")
        try:
            return self._network.ask(self.address, question, failure)
        except DataError as error:
            raise ResourceError(error.what, where=self.shown, hint=error.hint) from error
        except OSError as error:
            if not is_full_disk(error):
                raise
            what, hint = f"the mirror {failed}: it is full", "free space there, or a smaller checkpoint.keep"
            raise ResourceError(what, where=self.shown, hint=hint) from error
