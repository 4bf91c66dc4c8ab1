"""One clear message for what can go wrong between here and the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hfdist.errors import ConfigError


@contextmanager
def reading_from_hub(key: str, name: str) -> Iterator[None]:
    """Translate what transformers and huggingface_hub raise while they read `name`, given by config key `key`."""
    try:
        yield
    except (OSError, ValueError, ImportError, HfHubHTTPError) as error:
        cause = _cause(error)
        what, hint = _explain(cause)
        raise ConfigError(what, where=key, found=name, hint=hint) from error


def _cause(error: BaseException) -> BaseException:
    """transformers wraps the Hub's errors in an OSError: find the one that says why."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, EntryNotFoundError)):
            return seen
        seen = seen.__cause__ or seen.__context__
    return error


def _explain(error: BaseException) -> tuple[str, str | None]:
    # Gated is a kind of not found, so it comes first.
    match error:
        case GatedRepoError():
            return (
                "the repository is gated: your account has not been granted access",
                "ask for access on its page, then `hf auth login`",
            )
        case RevisionNotFoundError():
            return "the repository has no such revision", "another revision, or none for the default branch"
        case RepositoryNotFoundError():
            return (
                "the Hub has no such repository, or it is private",
                "check the spelling; for a private one, `hf auth login`",
            )
        case OfflineModeIsEnabled() | LocalEntryNotFoundError():
            return (
                "the Hub cannot be reached and the files are not in the local cache",
                "a local folder, or fetch it first with `hf download` on a connected machine",
            )
        case _:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"cannot be read: {lines[0] if lines else type(error).__name__}", None
