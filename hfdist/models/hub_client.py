"""Asks the Hub: tries again where that may help, for a bounded time, and says what went wrong in one message.

The chain of causes of a failure decides. What may pass is tried up to ATTEMPTS times in all; what does not becomes a
ConfigError or a ResourceError at once.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from huggingface_hub import constants, get_session, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # its __all__ lacks the second
    _http,
    parse_ratelimit_headers,
)
from safetensors import SafetensorError

from hfdist.config.checks.urls import redact
from hfdist.errors import ConfigError, HfdistError, ResourceError
from hfdist.failures import causes, is_full_disk, is_network, seconds_before_retry

T = TypeVar("T")
logger = logging.getLogger(__name__)

FETCH_FIRST = "a local folder, or fetch it first with `hf download` on a connected machine"
"""What to do without a connection, for hints."""
LOG_IN = "`hf auth login`, or HF_TOKEN"
"""How to give a token, for hints."""
ATTEMPTS = 3
"""How often the Hub is asked. huggingface_hub itself asks some things six times."""
FIRST_WAIT_SECONDS = 1.0
"""The wait before the second attempt; later ones are twice as long each, give or take a half."""
LONGEST_WAIT_SECONDS = 120.0
"""The longest wait that the Hub may ask for after too many requests; of a longer one, an error says how long it is."""
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
"""HTTP codes of failures that may pass."""
# What huggingface_hub and transformers raise for what goes wrong outside of them. RuntimeError: a failed upload of a
# file, which has the reason as its cause.
_FAILURES = (OSError, ValueError, ImportError, RuntimeError, SafetensorError, HfHubHTTPError)


_SESSION_LOCK = threading.RLock()
"""Held while the waits of huggingface_hub's client are bounded: threads of a process share the client."""


class DamagedError(Exception):
    """Files have come that are not those of the repository."""


class _WaitError(Exception):
    """The Hub wants so long a wait that nobody should sit through it."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"wait {seconds} s")
        self.seconds = seconds


def ask_hub(action: Callable[[], T], *, key: str, name: str) -> T:
    """Call `action`, and call it again where the failure may pass.

    Args:
        action: calls huggingface_hub.
        key: the config key that names the repository, for messages.
        name: the value of `key`: a repository, a folder or a file.

    Returns:
        What `action` returns.

    Raises:
        ConfigError: a failure that does not pass: no such repository or revision, no access, no token.
        ResourceError: a failure that may pass: the Hub is not reached, is busy or fails, a cut or damaged download, a
            full disk.
    """
    for attempt in itertools.count(1):
        try:
            with _bounded_waits():
                return action()
        except HfdistError:
            raise
        except Exception as error:
            chain = causes(error)
            if not _is_of_the_hub(chain):
                raise
            explained = _explained(chain, key, name)
            if not _may_pass(chain) or attempt >= ATTEMPTS:
                raise explained from error
            answer = _first(chain, HfHubHTTPError)
            asked_seconds = None if answer is None else _asked_wait(answer.response)
        wait_seconds = seconds_before_retry(attempt, FIRST_WAIT_SECONDS) if asked_seconds is None else asked_seconds
        logger.warning("%s: %s; attempt %d of %d", redact(name), explained.what, attempt + 1, ATTEMPTS)
        time.sleep(wait_seconds)
    raise AssertionError("the loop ends by return or raise")


@contextmanager
def reading_from_hub(key: str, name: str) -> Iterator[None]:
    """Turn what transformers and huggingface_hub raise in this context into a ConfigError or a ResourceError.

    Args:
        key: the config key that names what is read, for messages.
        name: the value of `key`: a repository, a folder or a file.
    """
    try:
        yield
    except (HfdistError, MemoryError):
        raise
    except Exception as error:  # on a file of unknown origin a library may raise anything
        raise _explained(causes(error), key, name) from error


@contextmanager
def _bounded_waits() -> Iterator[None]:
    """Let no wait of huggingface_hub's client be longer than LONGEST_WAIT_SECONDS, in this context.

    The client itself waits as long as an answer asks for, and for some answers without end. The context is for one
    thread at a time.
    """

    def refuse_long_wait(response: Any) -> None:
        seconds = _asked_wait(response)
        if response.status_code in _TEMPORARY and seconds is not None and seconds > LONGEST_WAIT_SECONDS:
            raise _WaitError(seconds)

    def bound(session: Any) -> Any:
        changed.append(_Changed(session, session.event_hooks, session.timeout))
        hooks = [*session.event_hooks["response"], refuse_long_wait]
        session.event_hooks = {**session.event_hooks, "response": hooks}
        session.timeout = LONGEST_WAIT_SECONDS
        return session

    changed: list[_Changed] = []
    with _SESSION_LOCK:
        bound(get_session())
        # After a failed connection huggingface_hub makes another client, by a factory that is private.
        make = _http._GLOBAL_CLIENT_FACTORY
        _http._GLOBAL_CLIENT_FACTORY = lambda: bound(make())
        try:
            yield
        finally:
            _http._GLOBAL_CLIENT_FACTORY = make
            for client, hooks, timeout in changed:
                client.event_hooks, client.timeout = hooks, timeout


class _Changed(NamedTuple):
    """A client of huggingface_hub whose waits are bounded, with what it had before."""

    client: Any
    """An `httpx.Client`, in the huggingface_hub that this file is written for."""
    hooks: Any
    timeout: Any


def _asked_wait(response: Any) -> int | None:
    """Give the seconds for which an answer of the Hub asks to wait; None: it asks for none."""
    limit = parse_ratelimit_headers(response.headers)
    if response.status_code == 429 and limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds
    text = response.headers.get("Retry-After", "").strip()
    return int(text) if text.isdecimal() else None


def _first(chain: list[BaseException], kind: type[T]) -> T | None:
    """Give the first exception of a class in a chain of causes; None: there is none."""
    return next((cause for cause in chain if isinstance(cause, kind)), None)


def _is_network(error: BaseException) -> bool:
    """Whether the network failed; huggingface_hub's offline mode is an error of the same family, but a choice."""
    return is_network(error) and not isinstance(error, OfflineModeIsEnabled)


def _is_cut(error: BaseException) -> bool:
    """Whether a download ended before the file did: huggingface_hub says so only by this text."""
    return isinstance(error, OSError) and "Consistency check failed" in str(error)


def _is_of_the_hub(chain: list[BaseException]) -> bool:
    """Whether the Hub, the network or a file is at fault, and not a bug."""
    return isinstance(chain[-1], (*_FAILURES, DamagedError, _WaitError)) or any(_is_network(error) for error in chain)


def _may_pass(chain: list[BaseException]) -> bool:
    """Whether another attempt may succeed."""
    if _first(chain, _WaitError) is not None or _first(chain, OfflineModeIsEnabled) is not None:
        return False
    answer = _first(chain, HfHubHTTPError)
    if answer is not None:
        return answer.response.status_code in _TEMPORARY
    return any(_is_network(cause) or _is_cut(cause) or isinstance(cause, DamagedError) for cause in chain)


class _Reason(NamedTuple):
    """Why nothing could be read, as the parts of an error."""

    kind: type[HfdistError]
    """ConfigError: another config would help; ResourceError: the machine, the network or the Hub is at fault."""
    what: str
    hint: str | None


def _explained(chain: list[BaseException], key: str, name: str) -> HfdistError:
    """Make the error about `key` from a chain of causes."""
    reason = _reason(chain)
    return reason.kind(reason.what, where=key, found=redact(name), hint=reason.hint)


def _reason(chain: list[BaseException]) -> _Reason:
    """Find the reason in a chain of causes: the disk, a wait, an answer of the Hub, a file, the network, or else."""
    full = next((error for error in chain if isinstance(error, OSError) and is_full_disk(error)), None)
    if full is not None:
        hint = f"free space in {full.filename or constants.HF_HUB_CACHE}, or set HF_HOME to a folder on a larger disk"
        return _Reason(ResourceError, "no space is left on the disk for the download", hint)
    wait = _first(chain, _WaitError)
    if wait is not None:
        what = f"the Hub's rate limit is used up, and it wants a wait of {wait.seconds} s"
        return _Reason(ResourceError, what, "start again then; a token raises the limit: " + LOG_IN)
    answer = _first(chain, HfHubHTTPError)
    if answer is not None:
        return _reason_of_answer(answer)
    if _first(chain, DamagedError) is not None:
        hint = "start again; if that does not help, a proxy between here and the Hub may be at fault"
        return _Reason(ResourceError, f"what the Hub sent is damaged: {chain[-1]}", hint)
    if any(_is_cut(error) for error in chain):
        return _Reason(ResourceError, "the download breaks off again and again", "check the network, then start again")
    network = next((error for error in chain if _is_network(error)), None)
    if network is None and any(isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError)) for error in chain):
        return _Reason(
            ConfigError, "the Hub is switched off, and the files are not all in the local cache", FETCH_FIRST
        )
    if network is not None:
        said = _redact_urls(str(network).splitlines()[0]) if str(network) else type(network).__name__
        hint = f"check the network and HF_ENDPOINT, or {FETCH_FIRST}"
        if "Connect" in type(network).__name__:
            return _Reason(ResourceError, f"the Hub cannot be reached at {redact(constants.ENDPOINT)}: {said}", hint)
        return _Reason(ResourceError, f"the connection to the Hub breaks off: {said}", hint)
    return _reason_of_other(chain[-1])


def _reason_of_answer(error: HfHubHTTPError) -> _Reason:
    """Find the reason in an answer of the Hub that is an HTTP error."""
    status, told = error.response.status_code, error.response.headers.get("X-Error-Message", "")
    # Without a token, the Hub says "Invalid username or password" of a repository that is not there, or private.
    if status == 401 and get_token() and "invalid" in f"{told} {error.server_message or ''}".lower():
        return _Reason(ConfigError, "the Hub does not accept the token", f"{LOG_IN}; HF_TOKEN wins over the login")
    # GatedRepoError is a subclass of RepositoryNotFoundError, so it comes first.
    match error:
        case GatedRepoError():
            denied = ": your account has not been granted access" if get_token() else ", and no token is given"
            return _Reason(
                ConfigError, f"the repository is gated{denied}", f"ask for access on its page, then {LOG_IN}"
            )
        case RevisionNotFoundError():
            return _Reason(
                ConfigError, "the repository has no such revision", "another revision, or null: the default branch"
            )
        case RepositoryNotFoundError():
            hint = f"check the spelling; for a private one, {LOG_IN}"
            return _Reason(ConfigError, "the Hub has no such repository, or it is private", hint)
        case EntryNotFoundError():
            return _Reason(ConfigError, "the repository lacks a file", "another revision or repository")
    if status in (401, 403):
        what = "the Hub refuses access" + (" with this token" if get_token() else " without a token")
        return _Reason(ConfigError, what, f"a token with the right to do this: {LOG_IN}")
    if status == 429:
        return _Reason(
            ResourceError, "the Hub's rate limit is used up (HTTP 429)", f"wait, or raise the limit: {LOG_IN}"
        )
    if status in _TEMPORARY:
        return _Reason(ResourceError, f"the Hub fails (HTTP {status})", "start again later")
    return _Reason(
        ConfigError,
        f"the Hub refuses (HTTP {status}): {_redact_urls(error.server_message or told or 'no reason')}",
        None,
    )


def _reason_of_other(error: BaseException) -> _Reason:
    """Find the reason in what transformers or huggingface_hub says of a name or a file."""
    if isinstance(error, HFValidationError):
        hint = "OWNER/NAME as on its page, without the Hub's address; ./FOLDER for one here"
        return _Reason(ConfigError, "this is neither a Hub id nor a folder", hint)
    text = _redact_urls(str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "trust_remote_code" in str(error):
        hint = "a model type that transformers knows; model.trust_remote_code=true, once you have read that code"
        return _Reason(ConfigError, "the repository brings Python code of its own, which is not run", hint)
    # transformers begins a list of problems with a line that names none, and ends it with a colon.
    is_list = bool(lines) and lines[0].endswith(":")
    first_line = " ".join(lines[:2] if is_list else lines[:1])
    # The message of some exceptions is the name of a key, or empty: then the exception's class is said, too.
    is_plain = isinstance(error, _FAILURES) and first_line
    said = first_line if is_plain else f"{type(error).__name__}: {first_line}".rstrip(": ")
    if "backend tokenizer" in said:
        return _Reason(
            ConfigError, "there are no files of a tokenizer", "save_pretrained(FOLDER) of the tokenizer writes them"
        )
    return _Reason(ConfigError, f"cannot be read: {said}", None)


def _redact_urls(text: str) -> str:
    """Redact each URL of a sentence: there may be several."""
    return re.sub(r"\w+://\S+", lambda address: redact(address[0]), text)
