"""What ranks tell each other: small JSON values and failures, never pickle; and on which device tensors travel.

Every local action runs through `on_all_ranks`, so that a rank that fails takes the others along at once instead of
leaving them in a collective that it never joins. What runs beside the training speaks in a `ControlGroup`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hfdist.errors import CheckpointError, ConfigError, DataError, HfdistError, NumericsError, PeerError, ResourceError
from hfdist.failures import is_full_disk
from hfdist.open_files import TOO_MANY, too_many_open

_LENGTH_BYTES = 8
_HEAD_BYTES = 1016
"""Bytes of a text that travel with its length."""
_NO_BYTES = torch.empty(0, dtype=torch.uint8)

# torch 2.11 has them under their old names alone, of which later ones warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

TRAVELLING_ERRORS = {
    kind.__name__: kind for kind in (CheckpointError, ConfigError, DataError, NumericsError, PeerError, ResourceError)
}
"""Errors that the other ranks raise as what they are, by name."""


class Texts(Protocol):
    """A group of all ranks that carries texts in its own way: `ControlGroup`."""

    def gather(self, text: bytes) -> list[bytes]:
        """Give the texts of all ranks, in order of rank. A collective."""

    def broadcast(self, text: bytes) -> bytes:
        """Give all ranks the text of rank 0. A collective."""


Group = dist.ProcessGroup | Texts | None
"""Who speaks with each other; None: all ranks, in the default group."""


def rank() -> int:
    """Give this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes that save and load together; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Give the device that tensors must be on to travel through `group`, or the default one if it is None."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_planned(group: dist.ProcessGroup | None = None) -> bool:
    """Whether the other ranks of a group exist in a plan only (hfdist/planning): nothing comes from them."""
    return dist.is_initialized() and dist.get_backend(group) == "fake"


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Give all ranks of a group what the first has. In place; the tensor is contiguous."""
    # Some backends know no truth values.
    dist.broadcast(tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor, group=group, group_src=0)


def gather_json(value: object, group: Group = None) -> list[Any]:
    """Give the JSON `value` of every rank of `group`, or of all, in order of rank. A collective over them.

    Where ranks say the same they may get one object: do not change what is given.
    """
    return _read(gather_texts(json.dumps(value).encode(), group))


def _read(texts: Sequence[bytes]) -> list[Any]:
    # Thousands of ranks say the same most of the time, and reading takes longer than comparing.
    read = {text: json.loads(text) for text in set(texts)}
    return [read[text] for text in texts]


def first_problem(problem: str | None, group: Group = None) -> str | None:
    """Give the problem of the first rank that has one, on all ranks alike; None: none has. A collective over them."""
    return next((found for found in gather_json(problem, group) if found is not None), None)


def swap_texts(texts: Sequence[bytes], group: dist.ProcessGroup) -> list[bytes]:
    """Give what each rank of a group of the host has for this one; `texts`: one for each. A collective over them.

    What a rank sends and gets grows with its own texts alone, and not with those between other ranks.
    """
    lengths = torch.tensor([len(text) for text in texts])
    arriving = torch.empty_like(lengths)
    dist.all_to_all_single(arriving, lengths, group=group)
    sent = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8) if any(texts) else _NO_BYTES
    received = torch.empty(int(arriving.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, sent, arriving.tolist(), lengths.tolist(), group=group)
    content = received.numpy().tobytes()
    return [content[begin:end] for begin, end in pairwise(accumulate(arriving.tolist(), initial=0))]


def broadcast_text(text: bytes, group: Group) -> bytes:
    """Give all ranks of a group the text of the first. A collective over them."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return group.broadcast(text)
    if world_size() == 1 or is_planned(group):
        return text
    head = torch.frombuffer(bytearray(_head(text)), dtype=torch.uint8).to(device_of(group))
    dist.broadcast(head, group=group, group_src=0)
    begun = head.cpu().numpy().tobytes()
    length = int.from_bytes(begun[:_LENGTH_BYTES], "little")
    if length <= _HEAD_BYTES:
        return begun[_LENGTH_BYTES:][:length]
    rest = torch.frombuffer(bytearray(text[_HEAD_BYTES:length].ljust(length - _HEAD_BYTES)), dtype=torch.uint8)
    rest = rest.to(device_of(group))
    dist.broadcast(rest, group=group, group_src=0)
    return begun[_LENGTH_BYTES:] + rest.cpu().numpy().tobytes()


def gather_texts(text: bytes, group: Group) -> list[bytes]:
    """Give the text of every rank of `group`, or of all, in order of rank. A collective over them."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return group.gather(text)
    if world_size() == 1 or is_planned(group):
        # In a plan all ranks say the same.
        return [text] * (dist.get_world_size(group) if is_planned(group) else 1)
    # The length travels with what comes first, so that short texts take one exchange.
    heads = _gather_bytes(_head(text), group)
    lengths = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
    longest = max(lengths) - _HEAD_BYTES
    rests = [b""] * len(heads) if longest <= 0 else _gather_bytes(text[_HEAD_BYTES:].ljust(longest, b" "), group)
    return [(head[_LENGTH_BYTES:] + rest)[:length] for head, rest, length in zip(heads, rests, lengths, strict=True)]


def _head(text: bytes) -> bytes:
    """Give the length of a text and what of it travels with the length, filled up."""
    return (len(text).to_bytes(_LENGTH_BYTES, "little") + text[:_HEAD_BYTES]).ljust(_LENGTH_BYTES + _HEAD_BYTES)


def _gather_bytes(content: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Gather the bytes of all ranks, filled up to the same length: at least that of a head."""
    padded = bytearray(content.ljust(_LENGTH_BYTES + _HEAD_BYTES, b" "))
    own = torch.frombuffer(padded, dtype=torch.uint8).to(device_of(group))
    gathered = torch.empty(dist.get_world_size(group), len(padded), dtype=torch.uint8, device=own.device)
    dist.all_gather(list(gathered.unbind()), own, group=group)
    return [row.tobytes() for row in gathered.cpu().numpy()]


def on_all_ranks(action: Callable[[], object], group: Group = None, *, is_told: bool = True) -> list[Any]:
    """Run `action` on every rank and give what each returned (JSON values), in order of rank. A collective.

    A rank that is not told hears of failures alone, and gets nothing: of thousands of ranks that saves it time.

    Raises:
        HfdistError: the failure of the first rank that failed, on all ranks alike. Exceptions that are no failures
            of a file or of a checkpoint are raised unchanged on the rank where they came up.
    """
    own_error: Exception | None = None
    try:
        # Within: a value that is no JSON is a failure as well, and the other ranks must hear of it.
        report = json.dumps({"value": action()})
    except Exception as error:
        own_error = _to_readable(error)
        report = json.dumps({"error": _describe(own_error)})
    texts = gather_texts(report.encode(), group)
    if own_error is not None:
        raise own_error
    for failed_rank, text in enumerate(texts):
        if text.startswith(b'{"error"'):
            raise _rebuild(failed_rank, json.loads(text)["error"])
    return [report["value"] for report in _read(texts)] if is_told else []


def on_rank_zero(action: Callable[[], object], group: Group = None) -> Any:
    """Run `action` on rank 0 alone and give its value on all ranks. A collective; failures as in `on_all_ranks`."""
    text = b"null"

    def act() -> object:
        nonlocal text
        if rank() == 0:
            text = json.dumps(action()).encode()
        # A long text follows by itself: a gather would fill up those of all ranks to its length.
        return [json.loads(text)] if len(text) <= _HEAD_BYTES else None

    short = on_all_ranks(act, group)[0]
    return json.loads(broadcast_text(text, group)) if short is None else short[0]


def _to_readable(error: Exception) -> Exception:
    """Give an error of the system as one for the reader; others stay as they are."""
    if not isinstance(error, OSError):
        return error
    where = str(error.filename) if error.filename else None
    if is_full_disk(error):
        readable: HfdistError = ResourceError(
            "no space is left on the disk", where=where, hint="free space, or a smaller checkpoint.keep"
        )
    elif error.errno in TOO_MANY:
        readable = too_many_open(error)
    else:
        readable = CheckpointError(
            "a file cannot be read or written",
            where=where,
            found=error.strerror or type(error).__name__,
            hint="all processes need the same folder, with the right to read and write it",
        )
    readable.__cause__ = error
    return readable


def _describe(error: Exception) -> dict[str, str | None]:
    if not isinstance(error, HfdistError):
        return {"kind": type(error).__name__, "what": str(error)}
    kind = next((name for name, known in TRAVELLING_ERRORS.items() if isinstance(error, known)), "CheckpointError")
    return {"kind": kind} | error.texts()


def _rebuild(failed_rank: int, described: dict[str, Any]) -> HfdistError:
    kind = TRAVELLING_ERRORS.get(described["kind"])
    if kind is None:
        return CheckpointError(f"rank {failed_rank} failed: {described['kind']}: {described['what']}")
    return kind(**{part: text for part, text in described.items() if part != "kind"})
