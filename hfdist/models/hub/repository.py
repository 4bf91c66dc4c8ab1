"""A repository of the Hub in the Hub's own cache: one commit, whose files come once a machine and are verified."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from filelock import FileLock
from huggingface_hub import HfApi, constants, get_cached_repo_tree, is_offline_mode, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

from hfdist.errors import ResourceError
from hfdist.models.hub.client import Patience, ask
from hfdist.models.hub.verify import verify_files

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """One commit."""

    commit: str
    names: set[str]
    whole: bool
    """Whether these are all files of the repository; else those in the local cache."""


@dataclass(frozen=True)
class Repository:
    """Files of `name`, which config key `key` gives."""

    name: str
    key: str
    cache_dir: Path
    patience: Patience | None = None

    def resolve(self, revision: str | None) -> Snapshot:
        """Ask the Hub for the commit and its files; where it does not answer, look into the cache.

        Raises:
            ConfigError, ResourceError: see `ask`.
        """
        if is_offline_mode():
            return ask(lambda: self._known(revision), key=self.key, name=self.name)
        try:
            info = ask(
                lambda: HfApi().model_info(self.name, revision=revision),
                key=self.key,
                name=self.name,
                patience=self.patience,
            )
        except ResourceError as error:
            cached = self._cached(revision)
            if cached is None:
                raise
            logger.warning("%s: %s; going on with the copy in the local cache", self.name, error.what)
            return cached
        assert info.sha is not None
        self._remember(revision, info.sha)
        logger.info("%s: commit %s", self.name, info.sha)
        return Snapshot(info.sha, {file.rfilename for file in info.siblings or ()}, whole=True)

    def fetch(self, snapshot: Snapshot, names: list[str]) -> Path:
        """Give the folder of the snapshot with these files in it, verified. One process of a machine at a time.

        Raises:
            ConfigError, ResourceError: see `ask`.
        """
        folder = self._storage / "snapshots" / snapshot.commit
        notes = self.cache_dir / "downloads"
        files = [folder / name for name in names]

        def action() -> None:
            notes.mkdir(parents=True, exist_ok=True)
            # Their locks are of single files: who waits for the first would fetch the second meanwhile, and would hash
            # all of them once more.
            with FileLock(notes / f"{self._storage.name}.lock"):
                if not all(file.is_file() for file in files):
                    snapshot_download(self.name, revision=snapshot.commit, allow_patterns=names)
                verify_files(files, notes)

        ask(action, key=self.key, name=self.name, patience=self.patience)
        return folder

    @property
    def _storage(self) -> Path:
        return Path(constants.HF_HUB_CACHE) / f"models--{self.name.replace('/', '--')}"

    def _known(self, revision: str | None) -> Snapshot:
        cached = self._cached(revision)
        if cached is None:
            raise LocalEntryNotFoundError("nothing of the repository is cached")
        return cached

    def _cached(self, revision: str | None) -> Snapshot | None:
        ref = self._ref(revision)
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision or ""
        folder = self._storage / "snapshots" / commit
        if not commit or not folder.is_dir():
            return None
        try:
            files = get_cached_repo_tree(self.name, revision=commit)
        except CachedRepoTreeNotFoundError:
            names = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
            return Snapshot(commit, names, whole=False)
        return Snapshot(commit, {file.path for file in files}, whole=True)

    def _ref(self, revision: str | None) -> Path:
        return self._storage / "refs" / (revision or constants.DEFAULT_REVISION)

    def _remember(self, revision: str | None, commit: str) -> None:
        """Note what a branch or tag is, as huggingface_hub does when it is asked for one: offline it is looked up."""
        ref = self._ref(revision)
        if revision == commit or (ref.is_file() and ref.read_text(encoding="utf-8") == commit):
            return
        # A cache that many share may be read-only.
        with suppress(OSError):
            ref.parent.mkdir(parents=True, exist_ok=True)
            temporary = ref.with_name(f"{ref.name}.{uuid4().hex[:8]}.tmp")
            temporary.write_text(commit, encoding="utf-8")
            os.replace(temporary, ref)
