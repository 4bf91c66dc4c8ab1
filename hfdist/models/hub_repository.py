"""A model's repository in the Hub's own cache: one commit of it, and its files, fetched and verified."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from huggingface_hub import HfApi, constants, get_cached_repo_tree, is_offline_mode, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

from hfdist.atomic_write import write_atomically
from hfdist.errors import ResourceError
from hfdist.models.hub_client import DamagedError, ask_hub

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """One commit of a repository, and the names of its files."""

    commit: str
    """The commit's hash."""
    names: set[str]
    """Names of files, with their folders."""
    is_complete: bool
    """Whether these are all files of the commit; False: they are those in the local cache, and there may be more."""


@dataclass(frozen=True)
class Repository:
    """A model's repository on the Hub, and its copy in the Hub's cache on this machine."""

    name: str
    """The Hub id, `OWNER/NAME`."""
    key: str
    """The config key that gives the name, for messages."""
    cache_dir: Path
    """Folder for notes of which downloads were verified; all processes of the machine share it."""

    def resolve(self, revision: str | None) -> Snapshot:
        """Ask the Hub for the commit of a revision and its files; where it does not answer, look into the cache.

        Args:
            revision: a branch, a tag or a commit; None: the default branch.

        Raises:
            ConfigError: no such repository or revision, or no access.
            ResourceError: the Hub does not answer, and nothing is in the cache.
        """

        def action() -> Snapshot:
            if not is_offline_mode():
                info = HfApi().model_info(self.name, revision=revision)
                assert info.sha is not None  # the Hub gives the commit of each model
                return Snapshot(info.sha, {file.rfilename for file in info.siblings or ()}, is_complete=True)
            cached = self._cached(revision)
            if cached is None:
                raise LocalEntryNotFoundError("nothing of the repository is cached")
            return cached

        try:
            snapshot = ask_hub(action, key=self.key, name=self.name)
        except ResourceError as error:
            cached = self._cached(revision)
            if cached is None:
                raise
            logger.warning("%s: %s; going on with the copy in the local cache", self.name, error.what)
            return cached
        if not is_offline_mode():
            self._remember(revision, snapshot.commit)
            logger.info("%s: commit %s", self.name, snapshot.commit)
        return snapshot

    def fetch(self, snapshot: Snapshot, names: list[str]) -> Path:
        """Download files of a snapshot that are not here, and verify them; processes of a machine take turns.

        Args:
            snapshot: the commit.
            names: names of the files.

        Returns:
            The folder of the snapshot.

        Raises:
            ConfigError: the repository lacks a file, or access is denied.
            ResourceError: the Hub does not answer, files come damaged again and again, or the disk is full.
        """
        folder = self._storage / "snapshots" / snapshot.commit
        notes = self.cache_dir / "downloads"
        files = [folder / name for name in names]

        def action() -> None:
            notes.mkdir(parents=True, exist_ok=True)
            # huggingface_hub locks single files: who waits for the first would fetch the second meanwhile, and would
            # hash all of them once more.
            with FileLock(notes / f"{self._storage.name}.lock"):
                if not all(file.is_file() for file in files):
                    snapshot_download(self.name, revision=snapshot.commit, allow_patterns=names)
                _verify_files(files, notes)

        ask_hub(action, key=self.key, name=self.name)
        return folder

    @property
    def _storage(self) -> Path:
        """The repository's folder in the Hub's cache, as huggingface_hub lays it out: refs/, snapshots/, blobs/."""
        return Path(constants.HF_HUB_CACHE) / f"models--{self.name.replace('/', '--')}"

    def _cached(self, revision: str | None) -> Snapshot | None:
        """Find a revision in the Hub's cache; None: it is not there."""
        ref = self._ref(revision)
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision or ""
        folder = self._storage / "snapshots" / commit
        if not commit or not folder.is_dir():
            return None
        try:
            files = get_cached_repo_tree(self.name, revision=commit)
        except CachedRepoTreeNotFoundError:
            names = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
            return Snapshot(commit, names, is_complete=False)
        return Snapshot(commit, {file.path for file in files}, is_complete=True)

    def _ref(self, revision: str | None) -> Path:
        """Give the file of the cache that holds the commit of a branch or tag."""
        return self._storage / "refs" / (revision or constants.DEFAULT_REVISION)

    def _remember(self, revision: str | None, commit: str) -> None:
        """Note in the cache which commit a branch or tag is, for later starts offline.

        huggingface_hub does so when it downloads a branch; here it is asked for a commit.
        """
        ref = self._ref(revision)
        if revision == commit or (ref.is_file() and ref.read_text(encoding="utf-8") == commit):
            return
        # A cache that many share may be read-only.
        with suppress(OSError):
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(ref, commit.encode())


def _verify_files(files: Iterable[Path], notes: Path) -> None:
    """Hash the files that no earlier run has hashed, and remove damaged ones, so that they are fetched again.

    huggingface_hub compares sizes only. Hashing gigabytes takes seconds, so a note is kept of each verified file.

    Args:
        files: files of a snapshot in the Hub's cache: links to files whose name is their hash.
        notes: a folder with a note for each verified file: named by its hash, with its size and time of change.

    Raises:
        DamagedError: some are damaged, and are removed now.
    """

    def note_of(file: Path) -> Path:
        return notes / file.resolve().name

    def stamp(file: Path) -> str:
        status = file.stat()
        return f"{status.st_size} {status.st_mtime_ns}"

    def is_verified(file: Path) -> bool:
        note = note_of(file)
        return note.is_file() and note.read_text(encoding="utf-8") == stamp(file)

    unknown = [file for file in files if not is_verified(file)]
    # Several threads, as hashlib lets others run while it hashes.
    with ThreadPoolExecutor(4) as pool:
        damaged = [
            file for file, is_whole in zip(unknown, pool.map(_has_its_hash, unknown), strict=True) if not is_whole
        ]
    for file in unknown:
        if file in damaged:
            # Two names may lead to one content.
            file.resolve().unlink(missing_ok=True)
            file.unlink()
        else:
            note_of(file).write_text(stamp(file), encoding="utf-8")
    if damaged:
        raise DamagedError(f"{damaged[0].name} does not have the hash that the Hub says")


def _has_its_hash(file: Path) -> bool:
    """Whether the content has the hash that is its name: SHA-256 for large files, git's SHA-1 for small ones."""
    blob = file.resolve()
    if re.fullmatch(r"[0-9a-f]{64}", blob.name):
        digest = hashlib.sha256()
    elif re.fullmatch(r"[0-9a-f]{40}", blob.name):
        digest = hashlib.sha1(f"blob {blob.stat().st_size}\0".encode(), usedforsecurity=False)
    else:
        # The file system has no links, or a mirror of the Hub has other names.
        return True
    with blob.open("rb") as content:
        return hashlib.file_digest(content, lambda: digest).hexdigest() == blob.name
