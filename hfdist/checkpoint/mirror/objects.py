"""`Objects`: the objects of a store below one address, which are listed, read, written and removed, with retries.

An object is written whole or not at all.
"""

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
"""Schemes of stores in which an object appears once its last byte has come. Elsewhere it gets its name by a rename."""
UNFINISHED = re.compile(r".*\.tmp-[0-9a-f]{8}")
"""Names of the files that killed writes have left."""
_REMOVE_MANY = ("s3", "gs")
"""Schemes of stores that remove many objects by one request, and do not mind those that are not there.

Their libraries may hide that the store has refused to remove an object.
"""


class Objects:
    """The objects below an address, whose names are relative to it.

    Every method raises a ResourceError if the store gives no answer, refuses, or is full.

    Args:
        address: an address of fsspec, such as s3://bucket/folder, without a secret.
        network: asks stores, and tries again; None: one with the usual patience.
    """

    def __init__(self, address: str, network: Network | None = None) -> None:
        self.address = address
        self._network = network or Network()

    @property
    def shown(self) -> str:
        """The address as messages show it."""
        return redact(self.address)

    def list(self) -> dict[str, int]:
        """Give the size of each object in bytes, by name."""

        def listing(store: AbstractFileSystem) -> dict[str, int]:
            # `find` gives paths in the store's own form.
            start = store._strip_protocol(self.address).rstrip("/") + "/"
            try:
                found = store.find(self.address, detail=True)
            except FileNotFoundError:
                # The first write makes the folder, or says what is wrong with the address.
                return {}
            return {path.removeprefix(start): int(info["size"] or 0) for path, info in found.items()}

        return self._ask(listing, "cannot be listed")

    def read(self, name: str, num_bytes: int) -> bytes:
        """Read an object of so many bytes."""
        place = f"{self.address}/{name}"

        def reading(store: AbstractFileSystem) -> bytes:
            content = self._network.read_range(place, 0, num_bytes, num_bytes)
            if len(content) != num_bytes:
                raise EOFError(f"{len(content)} of {num_bytes} bytes arrived")
            return content

        return self._ask(reading, "cannot be read")

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Write objects, given by name, several at a time if the store can."""
        places = {f"{self.address}/{name}": content for name, content in contents.items()}

        def writing(store: AbstractFileSystem) -> None:
            if scheme_of(self.address) == "hf":
                # Without this each object shows a bar of its own beside that of the training.
                disable_progress_bars()
            if scheme_of(self.address) in _APPEAR_WHOLE:
                store.pipe(places)
            else:
                for place, content in places.items():
                    _write_and_rename(store, place, content)

        self._ask(writing, "cannot be written")

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects of these names; those that are not there any more count as removed.

        Raises:
            ResourceError: some are still there afterwards, too.
        """
        places = [f"{self.address}/{name}" for name in names]

        def removing(store: AbstractFileSystem) -> None:
            if scheme_of(self.address) in _REMOVE_MANY:
                store.rm(places)
                return
            for place in places:
                # An earlier try whose answer was lost may have removed it.
                with suppress(FileNotFoundError):
                    store.rm_file(place)

        if not names:
            return
        self._ask(removing, "cannot be pruned")
        if scheme_of(self.address) in _REMOVE_MANY:
            left = self.list().keys() & set(names)
            if left:
                what = "the mirror cannot be pruned: what was removed is still there"
                hint = "the right to remove objects there, or a larger store"
                raise ResourceError(what, where=self.shown, found=f"{min(left)}, of {len(left)}", hint=hint)

    def _ask(self, question: Callable[[AbstractFileSystem], T], failed: str) -> T:
        """Ask the store, with retries; ResourceError: it gives no answer. `failed` says what the mirror then is."""
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


def _write_and_rename(store: AbstractFileSystem, place: str, content: bytes) -> None:
    """Write an object under another name, and give it its own when it is whole."""
    store.makedirs(place.rpartition("/")[0], exist_ok=True)
    unfinished = f"{place}.tmp-{secrets.token_hex(4)}"
    try:
        store.pipe_file(unfinished, content)
        store.mv(unfinished, place)
    except BaseException:
        # A full store would keep the part for which it had room.
        with suppress(Exception):
            store.rm_file(unfinished)
        raise
