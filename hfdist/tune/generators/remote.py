"""A generator on another machine than the run: it joins, answers, and joins again where the connection breaks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from hfdist.config.task import TaskConfig
from hfdist.data.cache import digest_of
from hfdist.environments.registry import check_environment, load_environment
from hfdist.errors import ConfigError, PeerError
from hfdist.messages.door import SECRET
from hfdist.messages.message import Message, NotAMessageError, RefusedError
from hfdist.tune.generators.chunks import Listing, write_listing
from hfdist.tune.generators.generator import Generator
from hfdist.tune.generators.link import TcpLink
from hfdist.tune.generators.policy_files import PolicyFiles
from hfdist.tune.generators.remote_files import RETRY_SECONDS, GoneError, RemoteFiles, reporting_disk_errors, use_own
from hfdist.tune.generators.served_files import ADAPTER, MODEL, POLICY, TOKENIZER
from hfdist.tune.generators.serving import serve
from hfdist.tune.generators.settings import Settings
from hfdist.version import __version__

_CONNECT_SECONDS = 20.0
_MOST_NAMED = 5
"""Files that a refusal names."""
_HINTS = {SECRET: f"the same {SECRET} in the environment of the run and here"}
"""What a refused generator may do, by the key of the refusal."""


class RemoteGenerator:
    """Serves a run until it has ended, through all of its starts.

    Args:
        address: host and port at which the run lets generators in.
        secret: secret that the run asks for; "": none.
        folder: folder for the models of runs; other processes may use it, too.
        scratch: folder of this process alone, on the same disk, for one version of the policy.
        own: folder of the same model on this machine, whose files are not fetched; None: there is none.
        wait_seconds: seconds in which a run that does not answer is tried again.
        say: takes a line for people.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: str,
        folder: Path,
        scratch: Path,
        *,
        own: Path | None,
        wait_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self._address, self._secret, self._own = address, secret, own
        self._folder, self._scratch = folder, scratch
        self._wait_seconds, self._say = wait_seconds, say

    def run(self) -> None:
        """Serve until the training has ended.

        Raises:
            PeerError: the run does not answer for `wait_seconds`.
            ConfigError: the run refuses this generator, or has another model.
            ResourceError: the disk is too small, or fails.
        """
        try:
            self._serve_all_starts()
        except RefusedError as error:
            raise _refusal(error) from None

    def _serve_all_starts(self) -> None:
        start, generator, files = "", None, None
        while True:
            link = self._join()
            try:
                if link.welcome.text("start") != start or generator is None:
                    generator = None  # Its memory is free before the next one is built.
                    start = link.welcome.text("start")
                    if files is not None:
                        files.close()
                    files = RemoteFiles(partial(self._connect, "files"), start, self._wait_seconds, self._scratch)
                    # transformers raises an OSError for a file that lacks.
                    with reporting_disk_errors(self._folder):
                        generator = self._build(link.welcome, files)
                serve(generator, link)
                self._say("the training has ended")
                return
            except GoneError:
                generator = None  # The run has started again meanwhile.
            except (OSError, NotAMessageError) as error:
                self._say(f"the connection has ended ({error})")
            finally:
                link.close()
            # A run that lets it in and drops it at once is not asked without a pause.
            time.sleep(RETRY_SECONDS)

    def _connect(self, kind: str) -> TcpLink:
        return TcpLink(self._address, self._secret, {"hfdist": __version__, "is": kind}, _CONNECT_SECONDS)

    def _join(self) -> TcpLink:
        deadline, is_told = time.monotonic() + self._wait_seconds, False
        while True:
            try:
                return self._connect("generator")
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
        if settings.config.task.environment is not None:
            _check_environment(settings, files)
        places = {}
        for of in (MODEL, ADAPTER, TOKENIZER):
            if listing := files.list(of):
                # Each model has a folder of its own: files of others must not be found beside it.
                places[of] = self._folder / f"{of}-{digest_of([write_listing(listing)])[:16]}"
                if of == MODEL and self._own is not None:
                    places[of] = self._link_own(self._own, listing, files)
                files.fetch(listing, places[of], of)
        made = settings.at(
            self._folder, model=places.get(MODEL), adapter=places.get(ADAPTER), tokenizer=places.get(TOKENIZER)
        )
        self._say(f"joined: {files.num_bytes:,} bytes fetched")
        return Generator(made, FetchedPolicy(self._scratch / POLICY, files, self._say), device=0)

    def _link_own(self, own: Path, listing: Listing, files: RemoteFiles) -> Path:
        linked = self._scratch / MODEL
        shutil.rmtree(linked, ignore_errors=True)  # of an earlier start
        others = use_own(own, listing, linked)
        if others:
            found = "another " + ", ".join(others[:_MOST_NAMED]) + (" and more" if len(others) > _MOST_NAMED else "")
            files.refuse(found)
            what, hint = "this is not the run's model and tokenizer", "without model=, which fetches those of the run"
            raise ConfigError(what, where="model", found=f"{found}, in {own}", hint=hint)
        return linked


class FetchedPolicy:
    """Versions of the policy, each fetched whole before the model gets any of it.

    Args:
        folder: folder for one version at a time.
        files: files of the run.
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


def _check_environment(settings: Settings, files: RemoteFiles) -> None:
    """Check that this machine has the run's environment, as the run has it. ConfigError: it has not."""
    task: TaskConfig = settings.config.task
    try:
        check_environment(task)
        if list(load_environment(task).tools) != settings.tools:
            what, hint = "this environment offers other tools than the run's", "the run's version of the package"
            raise ConfigError(what, where="task.environment", found=task.environment, hint=hint)
    except ConfigError as error:
        files.refuse(f"not the environment {task.environment} of the run: {error.what}")
        raise


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
