"""Attention of packed sequences, document by document: no mask of tokens x tokens, and no kernel of another package.

It stands in transformers' registries of attention and of masks, so that models need no change. Where a sequence holds
several documents, models get their borders in place of a mask. All else (one document a sequence, padding, caches) is
computed as by the implementation beneath.
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
"""Name in the registries, by the implementation beneath: eager, with soft caps or sinks, where a model has no sdpa."""
_BENEATH = {name: beneath for beneath, name in BY_DOCUMENTS.items()}
"""The implementation beneath, by name in the registries."""

_MaskFunction = Callable[..., Any]
"""Takes sequence, head, row and column, and says whether the token of the row sees that of the column."""
_Mask = torch.Tensor | None
"""A mask of tokens x tokens; or [borders], with a window [window, borders]: all rows are alike and in the same memory,
so that compiled code knows the window without reading a value."""
_Attended = tuple[torch.Tensor, torch.Tensor | None]
"""Outputs [sequences, tokens, heads, size], and weights of attention, which no implementation here gives."""


def dense_name(name: str) -> str:
    """Give the implementation that takes a mask: the one beneath, or the same."""
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
    """Give borders of documents where there are several in a sequence; else what the implementation beneath takes."""
    # transformers allows no skip where it has found documents. Of functions that need vmap, nothing is known.
    is_known = more.get("attention_mask") is None and not more.get("use_vmap")
    is_whole = q_length == kv_length and all(type(n) is int and n == 0 for n in (q_offset, kv_offset))
    if is_known and is_whole and not more.get("allow_is_causal_skip", True):
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
    """Give where documents begin, and the end of the last one, in tokens of all sequences end to end.

    Returns:
        int32 of [documents + 1]. None: a token sees a later one, as those of images do, or a trace has no values.
    """
    rows, columns = torch.arange(batch_size, device=device)[:, None], torch.arange(1, num_tokens, device=device)[None]
    if is_tracing(rows) or mask_function(rows, 0, columns - 1, columns).any():
        return None
    if rows.is_cuda:
        # Now, as compiled blocks ask for the answer but cannot try the kernel.
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
    """Compute attention of states [sequences, heads, tokens, size]; models call it by the registry."""
    # Each model has an eager attention of its own.
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(beneath, eager)
    if attention_mask is None or attention_mask.ndim > 2:
        attended: _Attended = attend(module, query, key, value, attention_mask, **more)
        return attended
    borders, window = attention_mask, None
    if borders.ndim == 2:
        borders, window = borders[0], borders.shape[0]
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
    states = [torch.randn(1, heads, 64, 64, generator=generator).to(device, torch.bfloat16) for heads in (4, 2, 2)]
    borders = torch.tensor([0, 30, 31, 64], dtype=torch.int32, device=device)
    place = torch.arange(64, device=device)
    number, distance = torch.bucketize(place, borders[1:], right=True), place[:, None] - place
    differences = []
    for window in (None, 8):
        sees = (number[:, None] == number) & (distance >= 0) & (distance < (window or 64))
        wanted = _output_and_gradients(partial(_with_mask, sees=sees, scaling=0.2), states)
        found = _output_and_gradients(partial(_in_one_call, borders=borders, window=window, scaling=0.2), states)
        differences.append(largest_difference(wanted[0], found[0], wanted[1:], found[1:]))
    # Python's own `max` would pass over a NaN.
    return float(torch.tensor(differences).max())


def _output_and_gradients(attend: Callable[..., torch.Tensor], states: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [state.clone().requires_grad_() for state in states]
    with torch.enable_grad():
        output = attend(*leaves)
        gradients = torch.autograd.grad(output.float().square().sum(), leaves)
    return [tensor.detach().float() for tensor in (output, *gradients)]


def _with_mask(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees: torch.Tensor, scaling: float
) -> torch.Tensor:
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
    """Attention of all documents by torch's kernel; gives [sequences, tokens, heads, size]."""
    batch_size, num_heads, num_tokens, size = query.shape
    value_size = value.shape[-1]
    if value_size < size:
        # The kernel has one size of heads.
        value = functional.pad(value, (0, size - value_size))
    of_tokens = (state.transpose(1, 2).flatten(0, 1) for state in (query, key, value))
    attend: Any = varlen_attn
    # A sequence's length bounds each document's: the longest one would have to be read from the device.
    attended: torch.Tensor = attend(
        *of_tokens,
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
    sequences = []
    for row, sizes in enumerate(_sizes(borders, batch_size, num_tokens)):
        documents = zip(*(state[row : row + 1].split(sizes, 2) for state in states), strict=True)
        attended, start = [], 0
        for document in documents:
            length = document[0].shape[2]
            if bias is not None:
                of_row, own = bias[row : row + 1] if len(bias) > 1 else bias, slice(start, start + length)
                more["position_bias"] = of_row[..., own, own]
            mask = _mask_of_document(beneath, document[0], window)
            named = more | ({"is_causal": True} if beneath == "sdpa" else {})
            attended.append(attend(module, *document, mask, **named)[0])
            start += length
        sequences.append(attended[0] if len(attended) == 1 else torch.cat(attended, 1))
    return sequences[0] if batch_size == 1 else torch.cat(sequences)


# Compiled code has no loop over lengths that it does not know.
_one_by_one: Callable[..., torch.Tensor] = torch.compiler.disable(_attend_to_each)


def _sizes(borders: torch.Tensor, batch_size: int, num_tokens: int) -> list[list[int]]:
    """Give the lengths of the documents of each sequence."""
    sizes: list[list[int]] = [[] for _ in range(batch_size)]
    for start, stop in pairwise(borders.tolist()):
        sizes[start // num_tokens].append(stop - start)
    return sizes


def _mask_of_document(beneath: str, query: torch.Tensor, window: int | None) -> _Mask:
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
