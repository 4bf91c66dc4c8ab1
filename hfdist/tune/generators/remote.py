"""A generator on another machine than the run: it joins, answers, and joins again where the connection breaks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from hfdist.errors import ConfigError, PeerError
from hfdist.messages.door import SECRET
from hfdist.messages.message import Message, NotAMessageError, RefusedError
from hfdist.tune.generators.chunks import Listing
from hfdist.tune.generators.generator import Generator, serve
from hfdist.tune.generators.link import TcpLink
from hfdist.tune.generators.policy_files import PolicyFiles
from hfdist.tune.generators.remote_files import RETRY_SECONDS, RemoteFiles, use_own
from hfdist.tune.generators.served_files import ADAPTER, MODEL, POLICY
from hfdist.tune.generators.settings import Settings
from hfdist.version import __version__

_CONNECT_SECONDS = 20.0
_MOST_NAMED = 5
"""Files that a refusal names."""
_HINTS = {SECRET: f"the same {SECRET} in the environment of the run and here"}
"""What helps one that is refused, by the key of the refusal."""


class RemoteGenerator:
    """Serves a run until it has ended, through all of its starts.

    Args:
        address: host and port at which the run lets generators in.
        secret: that the run asks for; empty: none.
        folder: for the run's model, and for one version of the policy.
        own: folder of the same model; its files are not fetched.
        wait_seconds: for which a run is tried that does not answer.
        say: takes a line for people.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: str,
        folder: Path,
        *,
        own: Path | None,
        wait_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self._address, self._secret, self._folder, self._own = address, secret, folder, own
        self._wait_seconds, self._say = wait_seconds, say

    def run(self) -> None:
        """Serve until the training has ended.

        Raises:
            PeerError: the run does not answer for so long.
            ConfigError: it refuses this generator, or has another model.
            ResourceError: the disk is too small.
        """
        start, generator, files = "", None, None
        while True:
            link = self._join()
            try:
                if link.welcome.text("start") != start or generator is None:
                    generator = None  # Its memory is free before the next one is built.
                    start = link.welcome.text("start")
                    if files is not None:
                        files.close()
                    files = RemoteFiles(partial(self._connect, "files"), start, self._wait_seconds)
                    generator = self._build(link.welcome, files)
                serve(generator, link)
                self._say("the training has ended")
                return
            except FileNotFoundError:
                generator = None  # The run has started again meanwhile.
            except (OSError, NotAMessageError) as error:
                self._say(f"the connection has ended ({error})")
            finally:
                link.close()

    def _connect(self, kind: str) -> TcpLink:
        return TcpLink(self._address, self._secret, {"hfdist": __version__, "is": kind}, _CONNECT_SECONDS)

    def _join(self) -> TcpLink:
        deadline, is_told = time.monotonic() + self._wait_seconds, False
        while True:
            try:
                return self._connect("generator")
            except RefusedError as error:
                raise _refusal(error) from None
            except (OSError, NotAMessageError) as error:
                if time.monotonic() > deadline:
                    raise PeerError(
                        "the run does not answer",
                        where="join",
                        found=f"{':'.join(map(str, self._address))}: {error}",
                        hint="task.generators_port of the run; a larger wait_seconds, if it starts later",
                    ) from error
                if not is_told:
                    self._say(f"the run does not answer yet ({error}): trying for {self._wait_seconds:.0f} s")
                is_told = True
                time.sleep(RETRY_SECONDS)

    def _build(self, welcome: Message, files: RemoteFiles) -> Generator:
        settings = Settings.from_message(welcome.mapping("settings"))
        shutil.rmtree(self._folder / POLICY, ignore_errors=True)
        places = {}
        for of in (MODEL, ADAPTER):
            listing = files.list(of)
            if of == MODEL and self._own is not None:
                self._take_own(self._own, listing, files)
            if listing:
                places[of] = self._folder / of
                files.fetch(listing, places[of], of)
        made = settings.at(self._folder, model=places.get(MODEL), adapter=places.get(ADAPTER))
        self._say(f"joined: {files.num_bytes:,} bytes fetched")
        return Generator(made, FetchedPolicy(self._folder / POLICY, files, self._say), device=0)

    def _take_own(self, own: Path, listing: Listing, files: RemoteFiles) -> None:
        others = use_own(own, listing, self._folder / MODEL)
        if others:
            found = "another " + ", ".join(others[:_MOST_NAMED]) + (" and more" if len(others) > _MOST_NAMED else "")
            files.refuse(found)
            what, hint = "this is not the run's model and tokenizer", "without model=, which fetches those of the run"
            raise ConfigError(what, where="model", found=f"{found}, in {own}", hint=hint)


class FetchedPolicy:
    """Versions of the policy, each fetched whole before the model gets any of it.

    Args:
        folder: for one version.
        files: of the run.
        say: takes a line for people.
    """

    def __init__(self, folder: Path, files: RemoteFiles, say: Callable[[str], None]) -> None:
        self._kept, self._files, self._say = PolicyFiles(folder), files, say

    def read(self, rollback: int, version: int, model: nn.Module) -> None:
        """Put the weights of a version into a whole model; raises what `RemoteFiles.fetch` does."""
        begin, before = time.monotonic(), self._files.num_bytes
        folder = self._kept.path(rollback, version)
        listing = self._files.list(POLICY, rollback=rollback, version=version)
        try:
            self._files.fetch(listing, folder, POLICY, rollback=rollback, version=version)
            self._kept.read(rollback, version, model)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        seconds = time.monotonic() - begin
        self._say(f"version {version}: {self._files.num_bytes - before:,} bytes in {seconds:.2f} s")


def _refusal(error: RefusedError) -> ConfigError:
    """Make the error of a generator that the run has refused."""
    told = Message(error.answer)
    key, allowed = told.get("key"), told.get("allowed")
    return ConfigError(
        f"the run refuses this generator: {told.get('refused')}",
        where=None if key is None else str(key),
        found=told.get("found"),
        allowed=None if allowed is None else str(allowed),
        hint=_HINTS.get(str(key)),
    )
