"""Attention of packed sequences, document by document: no mask of tokens x tokens, and no kernel of another package.

    tokens      a a a b | c c d d        two sequences of four tokens, four documents
    borders     0     3   4   6   8      where documents begin in all tokens end to end, and the end of the last one

It stands in transformers' registries of attention and of masks, so that models need no change. Where a sequence holds
several documents, models get the borders in place of a mask. All else (one document a sequence, padding, caches) is
left to the implementation beneath: transformers' own, which takes a mask.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from hfdist.errors import first_line
from hfdist.models.differences import largest_difference

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a torch without it
    varlen_attn = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

BY_DOCUMENTS = {"sdpa": "varlen", "eager": "varlen_eager"}
"""Names in the registries of the two attentions of this file, by the implementation beneath. Models without sdpa have
eager attention, which may have soft caps or sinks."""
_BENEATH = {name: beneath for beneath, name in BY_DOCUMENTS.items()}
"""The implementation beneath, by name in the registries."""

_MaskFunction = Callable[..., Any]
"""Takes sequence, head, row and column, and says whether the token of the row sees that of the column."""
_Mask = torch.Tensor | None
"""A mask of tokens x tokens, or borders, int32 of [documents + 1]. Where a token sees only a window, borders have the
shape [window, documents + 1], all rows in one memory: compiled code knows the window without reading a value."""
_Attended = tuple[torch.Tensor, torch.Tensor | None]
"""Outputs [sequences, tokens, heads, size], and weights of attention, which no implementation here gives."""


def dense_name(name: str) -> str:
    """Give the name of the implementation that takes a mask: the one beneath `name`, or `name` itself."""
    return _BENEATH.get(name, name)


def _borders_or_mask(
    beneath: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: _MaskFunction = causal_mask_function,
    **more: Any,
) -> _Mask:
    """Give borders of documents where a sequence has several; else the mask of the implementation beneath.

    Models call it by the registry of masks, whose arguments it has.
    """
    # A function that needs vmap takes no whole rows and columns, so nothing can be found out about it.
    is_known = more.get("attention_mask") is None and not more.get("use_vmap")
    # Offsets are those of a cache. Under a trace they may be symbols, which have no value to compare.
    has_no_offset = all(type(offset) is int and offset == 0 for offset in (q_offset, kv_offset))
    # transformers forbids to skip the mask where it has found documents in the positions.
    may_have_documents = not more.get("allow_is_causal_skip", True)
    if is_known and has_no_offset and q_length == kv_length and may_have_documents:
        device, window = more.get("device", "cpu"), more.get("local_size")
        borders = _find_borders(batch_size, q_length, mask_function, device)
        if borders is not None:
            return borders if window is None else borders.expand(window, -1)
    mask: _Mask = ALL_MASK_ATTENTION_FUNCTIONS[beneath](
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, **more
    )
    return mask


def _find_borders(
    batch_size: int, num_tokens: int, mask_function: _MaskFunction, device: torch.device | str
) -> torch.Tensor | None:
    """Find where documents begin, and the end of the last one, in tokens of all sequences end to end.

    Returns:
        int32 of [documents + 1]. None: a token sees a later one, as tokens of images do, or a trace has no values.
    """
    rows = torch.arange(batch_size, device=device)[:, None]
    columns = torch.arange(1, num_tokens, device=device)[None]
    if is_tracing(rows) or mask_function(rows, 0, columns - 1, columns).any():
        return None
    if rows.is_cuda:
        # The kernel is tried here, since compiled blocks ask for the answer and cannot try it.
        _try_kernel(rows.device)
    goes_on = mask_function(rows, 0, columns, columns - 1).expand(batch_size, -1)
    starts = functional.pad(~goes_on, (1, 0), value=True).flatten().nonzero().flatten()
    return functional.pad(starts, (0, 1), value=batch_size * num_tokens).int()


def _attend(
    beneath: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: _Mask,
    **more: Any,
) -> _Attended:
    """Compute attention of states [sequences, heads, tokens, size]; models call it by the registry of attention."""
    # Each of transformers' model files has an eager attention of its own.
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(beneath, eager)
    if attention_mask is None or attention_mask.ndim > 2:
        attended: _Attended = attend(module, query, key, value, attention_mask, **more)
        return attended
    if attention_mask.ndim == 2:
        borders, window = attention_mask[0], attention_mask.shape[0]
    else:
        borders, window = attention_mask, None
    if query.shape[2] != key.shape[2]:
        raise ValueError("document attention needs queries and keys of the same tokens")
    if beneath == "sdpa" and query.is_cuda and torch.is_autocast_enabled(query.device.type):
        # SDPA does the same under autocast, which does not know this kernel. Rotary positions leave float32.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (state.to(dtype) for state in (query, key, value))
    is_plain = beneath == "sdpa" and not more.get("dropout") and more.get("position_bias") is None
    if is_plain and _fits_kernel(query, key, value):
        return _in_one_call(query, key, value, borders, window, more.get("scaling")), None
    return _one_by_one(attend, beneath, module, (query, key, value), borders, window, more), None


# ---- torch's kernel ----


_KERNEL_WORKS: dict[int, bool] = {}
"""Whether the kernel works, by the index of a GPU; a plain table, since compiled code looks into it."""
HAS_KERNEL = varlen_attn is not None
"""Whether this torch has a kernel for documents."""
HEAD_MULTIPLE, LARGEST_HEAD = 8, 256
"""Sizes of heads that the kernel takes."""
_KERNEL_BOUND = 0.05
"""Largest relative difference in bfloat16; documents that see each other make ten times as much."""


def _fits_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's kernel takes these states on their device, and works there."""
    size = query.shape[-1]
    is_half = query.dtype in (torch.float16, torch.bfloat16) and query.dtype == key.dtype == value.dtype
    fits = is_half and size % HEAD_MULTIPLE == 0 and value.shape[-1] <= size <= LARGEST_HEAD
    return fits and query.is_cuda and _KERNEL_WORKS.get(query.device.index, False)


def _try_kernel(device: torch.device) -> None:
    """Compare torch's kernel for documents of any length with a mask, once; say so where it does not work."""
    if device.index in _KERNEL_WORKS:
        return
    try:
        difference = _differ_by_kernel(device)
        reason = None if difference <= _KERNEL_BOUND else f"it differs by {difference:.0e} from a mask"
    except Exception as error:  # another signature, a device that is too old, or whatever a driver raises
        reason = first_line(error)
    _KERNEL_WORKS[device.index] = reason is None
    if reason is not None:
        what = "packed documents take a call each (model.attention=sdpa: a mask), as torch's kernel does not work: %s"
        logger.warning(what, reason)


def _differ_by_kernel(device: torch.device) -> float:
    """Give the largest difference of the kernel's attention from that with a mask, of outputs and gradients."""
    generator = torch.Generator().manual_seed(0)
    # Two heads of queries share a head of keys and values; three documents of 30, 1 and 33 tokens.
    num_tokens, head_size = 64, 64
    query, key, value = (
        torch.randn(1, num_heads, num_tokens, head_size, generator=generator).to(device, torch.bfloat16)
        for num_heads in (4, 2, 2)
    )
    states = [query, key, value]
    borders = torch.tensor([0, 30, 31, num_tokens], dtype=torch.int32, device=device)
    place = torch.arange(num_tokens, device=device)
    document = torch.bucketize(place, borders[1:], right=True)
    distance = place[:, None] - place
    differences = []
    for window in (None, 8):
        sees = (document[:, None] == document) & (distance >= 0) & (distance < (window or num_tokens))
        wanted = _output_and_gradients(partial(_with_mask, sees=sees, scaling=0.2), states)
        found = _output_and_gradients(partial(_in_one_call, borders=borders, window=window, scaling=0.2), states)
        differences.append(largest_difference(wanted[0], found[0], wanted[1:], found[1:]))
    # Python's own `max` would pass over a NaN.
    return float(torch.tensor(differences).max())


def _output_and_gradients(attend: Callable[..., torch.Tensor], states: list[torch.Tensor]) -> list[torch.Tensor]:
    """Give the output of an attention, then the gradients of a sum by query, key and value, in float32."""
    leaves = [state.clone().requires_grad_() for state in states]
    with torch.enable_grad():
        output = attend(*leaves)
        gradients = torch.autograd.grad(output.float().square().sum(), leaves)
    return [tensor.detach().float() for tensor in (output, *gradients)]


def _with_mask(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Compute the attention that the kernel should give, by a mask; give [sequences, tokens, heads, size]."""
    key, value = (state.repeat_interleave(2, 1) for state in (key, value))
    output = functional.scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scaling)
    return output.transpose(1, 2)


def _in_one_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """Compute attention of all documents by torch's kernel; give [sequences, tokens, heads, size]."""
    batch_size, num_heads, num_tokens, size = query.shape
    value_size = value.shape[-1]
    if value_size < size:
        # The kernel has one size of heads.
        value = functional.pad(value, (0, size - value_size))
    # [sequences, heads, tokens, size] becomes [tokens of all sequences, heads, size].
    query_rows, key_rows, value_rows = (state.transpose(1, 2).flatten(0, 1) for state in (query, key, value))
    attend: Any = varlen_attn
    # A sequence's length bounds each document's: the longest one would have to be read from the device.
    attended: torch.Tensor = attend(
        query_rows,
        key_rows,
        value_rows,
        borders,
        borders,
        num_tokens,
        num_tokens,
        scale=scaling,
        # Tokens before a token, without itself; none after it.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=num_heads != key.shape[1],
    )
    return attended.view(batch_size, num_tokens, num_heads, size)[..., :value_size]


# ---- a call a document ----


def _attend_to_each(
    attend: Callable[..., _Attended],
    beneath: str,
    module: torch.nn.Module,
    states: tuple[torch.Tensor, ...],
    borders: torch.Tensor,
    window: int | None,
    more: dict[str, Any],
) -> torch.Tensor:
    """Compute attention of one document after the other; give [sequences, tokens, heads, size]."""
    batch_size, _, num_tokens, _ = states[0].shape
    bias = more.pop("position_bias", None)
    if beneath == "sdpa":
        more = more | {"is_causal": True}
    sequences = []
    for row, sizes in enumerate(_sizes(borders, batch_size, num_tokens)):
        documents = zip(*(state[row : row + 1].split(sizes, 2) for state in states), strict=True)
        attended, start = [], 0
        for query, key, value in documents:
            stop = start + query.shape[2]
            if bias is not None:
                # A bias of one row is that of all sequences.
                bias_of_row = bias[row : row + 1] if len(bias) > 1 else bias
                more["position_bias"] = bias_of_row[..., start:stop, start:stop]
            output, _ = attend(module, query, key, value, _mask_of_document(beneath, query, window), **more)
            attended.append(output)
            start = stop
        sequences.append(attended[0] if len(attended) == 1 else torch.cat(attended, 1))
    return sequences[0] if batch_size == 1 else torch.cat(sequences)


# torch.compile cannot follow a loop over lengths that it does not know, so compiled blocks break their graph here.
_one_by_one: Callable[..., torch.Tensor] = torch.compiler.disable(_attend_to_each)


def _sizes(borders: torch.Tensor, batch_size: int, num_tokens: int) -> list[list[int]]:
    """Give the lengths of the documents of each sequence."""
    sizes: list[list[int]] = [[] for _ in range(batch_size)]
    for start, stop in pairwise(borders.tolist()):
        sizes[start // num_tokens].append(stop - start)
    return sizes


def _mask_of_document(beneath: str, query: torch.Tensor, window: int | None) -> _Mask:
    """Make the causal mask of one document, as the implementation beneath takes it: sdpa reads it, eager adds it."""
    length = query.shape[2]
    is_short = window is None or length <= window
    if is_short and beneath == "sdpa":
        return None
    sees = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    if not is_short and window is not None:
        sees = sees.triu(1 - window)
    if beneath == "sdpa":
        return sees[None, None]
    hidden = torch.zeros_like(sees, dtype=query.dtype).masked_fill(~sees, torch.finfo(query.dtype).min)
    return hidden[None, None]


for _beneath, _name in BY_DOCUMENTS.items():
    AttentionInterface.register(_name, partial(_attend, _beneath))
    AttentionMaskInterface.register(_name, partial(_borders_or_mask, _beneath))
