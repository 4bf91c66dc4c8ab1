"""Context parallelism: the ranks of a group share each sequence, and attention sees all of it.

ulysses   all-to-all before and after attention: each rank has all tokens there, of its share of the heads
gather    all-gather of keys and values: each rank's queries see all tokens before them

Both stand in transformers' registries of attention and of masks, so that models need no change.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Not public; these collectives alone have a backward and can be compiled.
import torch.distributed._functional_collectives as _collectives
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfdist.collectives import device_of
from hfdist.config.batch import IGNORED
from hfdist.config.strategy import ContextMethod
from hfdist.errors import ConfigError
from hfdist.models.document_attention import dense_name
from hfdist.models.positions import Positions, padding_id
from hfdist.models.routers import COUNTED
from hfdist.strategies.self_check import POSITIONS

# The second name is that before torch 2.13.
_GATHERS = ("all_gather_single_autograd", "all_gather_tensor_autograd")
_all_gather: Callable[..., torch.Tensor] = next(
    getattr(_collectives, name) for name in _GATHERS if hasattr(_collectives, name)
)

_MaskFunction = Callable[..., object]
"""(sequence, head, row, column) -> whether the row sees the column."""
_Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""(module, queries, keys, values, mask, ...) -> what transformers' implementations of attention give."""

_KEYS = ("input_ids", "labels", "position_ids", "attention_mask", COUNTED)
"""What a batch may hold."""
_DEPENDENT_ON_LENGTH = {"dynamic", "longrope"}
"""Types of rotary embeddings."""
_numbers = itertools.count()
"""Numbers of the names in transformers' registries."""


@dataclass(frozen=True, kw_only=True)
class _Sequence:
    """The whole sequences whose shares are in the model."""

    indices: torch.Tensor
    """Places in the sequence of this rank's tokens, [tokens of this rank]."""
    order: torch.Tensor
    """Places among the gathered tokens of those of the sequence, in its order, [tokens]."""
    positions: torch.Tensor
    """[sequences, tokens]."""
    documents: torch.Tensor | None
    """Number of each token's document, [sequences, tokens]; None: each token sees all before it."""
    attention_mask: torch.Tensor | None
    """True at tokens that are no padding, [sequences, tokens]; None: there is no padding."""


class ContextParallel:
    """Attention of one model over the ranks of a group.

    Args:
        model: whole; its implementation of attention is replaced.
        group: the ranks that read the same sequences.
        method: not `auto`.
        keeps_apart: whether the model keeps packed documents apart.
        positions: those of sequences that come without.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        group: dist.ProcessGroup,
        method: ContextMethod,
        *,
        keeps_apart: bool,
        positions: Positions,
    ) -> None:
        self._group, self._size, self._rank = group, group.size(), group.rank()
        self._by_heads = method is ContextMethod.ulysses
        self._keeps_apart = keeps_apart
        self._positions, self._padding_id = positions, padding_id(model)
        base = model.config.get_text_config(decoder=True)._attn_implementation
        # Ranks that gather have some rows of the mask.
        self._base: str = base if self._by_heads else dense_name(base)
        self.method = method
        self.description = f"{self._base} of sequences shared by {self._size} ranks ({method.value})"
        self._sequence: _Sequence | None = None
        name = f"context_parallel_{next(_numbers)}"
        AttentionInterface.register(name, self._attention)
        AttentionMaskInterface.register(name, self._mask)
        model.set_attn_implementation(name)
        for module in model.modules():
            if _DEPENDENT_ON_LENGTH & set(_values(getattr(module, "rope_type", None))):
                module.register_forward_pre_hook(self._take_all_positions, with_kwargs=True)
                module.register_forward_hook(self._keep_own_positions)

    def __deepcopy__(self, memo: object) -> ContextParallel:
        # Modules hold hooks of it, and a stage of a pipeline is a copy of modules.
        return self

    def sharded(self, batch: dict[str, torch.Tensor]) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Give this rank's share of the tokens. All ranks of the group call the model on it, each time that it is
        entered; so is its backward, where blocks are computed again.

        Labels are shifted before they are shared out. Batches without labels stay whole: each rank computes them alone.

        Raises:
            ConfigError: a batch that holds other things than a value for each token.
        """
        if batch.get("labels") is None:
            return nullcontext(batch)
        shape = batch["input_ids"].shape
        # Positions may be one row for all sequences.
        allowed_shapes = dict.fromkeys(_KEYS, (shape,)) | {POSITIONS: (shape, (1, *shape[1:]), shape[1:])}
        # What a collator gives may be no tensor at all.
        given = {name: getattr(value, "shape", ()) for name, value in batch.items()}
        unknown = {name: own for name, own in given.items() if own not in allowed_shapes.get(name, ())}
        if unknown:
            what = "it is not known how the ranks of a context group share this part of a batch"
            found = ", ".join(f"{name} of shape {list(its)}" for name, its in unknown.items())
            allowed = f"{', '.join(_KEYS)}, of shape {list(shape)}"
            raise ConfigError(what, where="data_collator", found=found, allowed=allowed, hint="strategy.context=1")
        return _Shared(self, *self._shard(batch))

    def _shard(self, batch: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], _Sequence]:
        # Masks are made and keys put in order where the model runs.
        batch = {name: tensor.to(device_of(self._group)) for name, tensor in batch.items()}
        ids, labels, mask = batch["input_ids"], batch["labels"], batch.get("attention_mask")
        counted, num_tokens = batch.get(COUNTED), ids.shape[1]
        given = batch.get(POSITIONS)
        positions = self._positions(ids, mask, self._padding_id) if given is None else given.expand_as(ids)
        starts = torch.zeros_like(ids).bool()
        if given is not None and self._keeps_apart and mask is None:
            # transformers finds documents in the same way.
            starts = positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1
        # Padding is a document of its own after all others; of ordinary tokens, as gemma3n divides by embeddings.
        num_added = -num_tokens % (2 * self._size)
        if num_added:
            ids = torch.cat([ids, ids[:, -1:].expand(-1, num_added)], 1)
            labels = functional.pad(labels, (0, num_added), value=IGNORED)
            added = torch.arange(num_added, device=ids.device).expand(len(ids), -1)
            positions = torch.cat([positions, added], 1)
            starts = torch.cat([starts, added == 0], 1)
            mask = None if mask is None else functional.pad(mask, (0, num_added))
            counted = None if counted is None else functional.pad(counted, (0, num_added))
        is_apart = self._keeps_apart and mask is None and bool(starts.any())
        sequence = self._describe(positions, starts.cumsum(-1) if is_apart else None, mask)
        targets = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        whole = {"input_ids": ids, "labels": labels, "shift_labels": targets, "position_ids": positions}
        whole |= {} if counted is None else {COUNTED: counted}
        shared = {name: tensor[:, sequence.indices].contiguous() for name, tensor in whole.items()}
        # With a mask of its own a model does not look for documents in the positions of this rank.
        return shared | {"attention_mask": torch.ones_like(shared["input_ids"])}, sequence

    def _describe(
        self, positions: torch.Tensor, documents: torch.Tensor | None, mask: torch.Tensor | None
    ) -> _Sequence:
        # What comes late in a sequence sees more keys: by gathering, each rank has an early and a late part.
        size, rank, device = self._size, self._rank, positions.device
        parts = torch.arange(positions.shape[1], device=device).chunk(size if self._by_heads else 2 * size)
        of_ranks = [[part] if self._by_heads else [part, parts[-1 - r]] for r, part in enumerate(parts[:size])]
        return _Sequence(
            indices=torch.cat(of_ranks[rank]),
            order=torch.cat([part for of_rank in of_ranks for part in of_rank]).argsort(),
            positions=positions,
            documents=documents,
            attention_mask=None if mask is None else mask.bool(),
        )

    def _mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: _MaskFunction = causal_mask_function,
        attention_mask: torch.Tensor | None = None,
        **more: object,
    ) -> object:
        """The mask of the whole sequence, or its rows of this rank; called by transformers."""
        base = ALL_MASK_ATTENTION_FUNCTIONS[self._base]
        sequence = self._sequence
        if sequence is None:
            return base(
                batch_size,
                q_length,
                kv_length,
                q_offset,
                kv_offset,
                mask_function,
                attention_mask=attention_mask,
                **more,
            )
        if sequence.documents is not None:
            mask_function = and_masks(mask_function, packed_sequence_mask_function(sequence.documents))
        num_rows = num_tokens = sequence.positions.shape[1]
        if not self._by_heads:
            num_rows, mask_function = len(sequence.indices), _of_rows(mask_function, sequence.indices)
        if not self._by_heads or sequence.documents is not None:
            more["allow_is_causal_skip"] = False
        mask = sequence.attention_mask
        return base(batch_size, num_rows, num_tokens, 0, 0, mask_function, attention_mask=mask, **more)

    def _take_all_positions(
        self, module: nn.Module, args: tuple[object, ...], named: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Frequencies that depend on the longest position need those of the whole sequence."""
        if self._sequence is None:
            return None
        positions, own_shape = self._sequence.positions, (len(self._sequence.positions), len(self._sequence.indices))
        taken: tuple[tuple[object, ...], dict[str, object]] = tree_map_only(
            torch.Tensor, lambda value: positions if value.shape == own_shape else value, (args, named)
        )
        return taken

    def _keep_own_positions(
        self, module: nn.Module, args: object, waves: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        return waves if self._sequence is None else tuple(wave[:, self._sequence.indices] for wave in waves)

    def _attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **more: object,
    ) -> tuple[torch.Tensor, None]:
        """Attention of [sequences, heads, tokens, size]; gives [sequences, tokens, heads, size]."""
        # Each model has an eager attention of its own.
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self._base, eager)
        if self._sequence is None:
            return attend(module, query, key, value, attention_mask, **more)
        attend_to = self._attend_to_heads if self._by_heads else self._attend_to_gathered
        return attend_to(attend, self._sequence, module, (query, key, value), attention_mask, **more), None

    def _attend_to_heads(
        self,
        attend: _Attend,
        sequence: _Sequence,
        module: nn.Module,
        states: tuple[torch.Tensor, ...],
        mask: torch.Tensor | None,
        **more: object,
    ) -> torch.Tensor:
        if "position_ids" in more:
            more["position_ids"] = sequence.positions
        heads = [self._exchange(state) for state in states]
        return self._exchange(attend(module, *heads, mask, **more)[0])

    def _exchange(self, states: torch.Tensor) -> torch.Tensor:
        """Send a share of dimension 1 to each rank, and join what comes along dimension 2."""
        shares = torch.stack(states.chunk(self._size, 1))
        received = _collectives.all_to_all_single(shares.flatten(), None, None, self._group)
        return torch.cat(received.view(shares.shape).unbind(), 2)

    def _attend_to_gathered(
        self,
        attend: _Attend,
        sequence: _Sequence,
        module: nn.Module,
        states: tuple[torch.Tensor, ...],
        mask: torch.Tensor | None,
        **more: object,
    ) -> torch.Tensor:
        # `_mask` allows no skip of it here.
        assert mask is not None
        query, *others = states
        key, value = (self._gather(state).index_select(2, sequence.order) for state in others)
        part = key.shape[2] // (2 * self._size)
        found = []
        # The last of these queries sees no key after its own place.
        for half, last in enumerate((self._rank + 1, 2 * self._size - self._rank)):
            rows, before = slice(half * part, (half + 1) * part), slice(0, last * part)
            of_rows = mask[..., rows, before]
            found.append(attend(module, query[:, :, rows], key[:, :, before], value[:, :, before], of_rows, **more)[0])
        return torch.cat(found, 1)

    def _gather(self, states: torch.Tensor) -> torch.Tensor:
        return _all_gather(states.contiguous(), 2, self._group)


class _Shared(AbstractContextManager[dict[str, torch.Tensor]]):
    """A rank's share of a batch: while it is entered, attention is that of the whole sequences. Entered many times."""

    def __init__(self, context: ContextParallel, own: dict[str, torch.Tensor], sequence: _Sequence) -> None:
        self._context, self._own, self._sequence = context, own, sequence

    def __enter__(self) -> dict[str, torch.Tensor]:
        self._context._sequence = self._sequence
        return self._own

    def __exit__(self, *_: object) -> None:
        self._context._sequence = None


def _values(kinds: object) -> Iterable[object]:
    """Values of all kinds of blocks where kinds differ; otherwise the one value of all blocks."""
    return kinds.values() if isinstance(kinds, dict) else (kinds,)


def _of_rows(mask_function: _MaskFunction, indices: torch.Tensor) -> _MaskFunction:
    """Give the mask of some rows of whole sequences."""
    return lambda batch, head, row, column: mask_function(batch, head, indices[row], column)
