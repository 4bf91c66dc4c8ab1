"""A cache whose rows come and go while the others are continued: keys and values, and states of linear attention.

The newest tokens of all rows stand in one column, as in a batch that is padded on the left. So a model makes its masks,
those of windows too, as it does for such a batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from hfdist.models.new_tokens import NewTokens

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What forwards and their outputs call the cache: `cache` from transformers 5.24 on."""

_STEP_COLUMNS = 64
"""Columns that are free after the tensors have grown: all is copied once for so many tokens."""


class _Keys(DynamicLayer):
    """Keys and values of one layer, of shape [rows, heads, columns, head size], with room for more rows and columns."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write after the columns that the cache has counted, and give all that the model sees."""
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        cache = self._cache
        stop = cache.stop + key_states.shape[2]
        self.keys[: cache.num_rows, :, cache.stop : stop] = key_states
        self.values[: cache.num_rows, :, cache.stop : stop] = value_states
        return self.keys[: cache.num_rows, :, cache.start : stop], self.values[: cache.num_rows, :, cache.start : stop]

    def _hold(self, keys: torch.Tensor, values: torch.Tensor, *, stop: int) -> None:
        """Hold copies of these, up to column `stop`, in tensors with room for all rows and for more columns.

        All else is 0: what is masked must be finite.
        """
        before, more = stop - keys.shape[2], self._cache.num_rows - len(keys)
        self.keys, self.values = (pad(held, (0, 0, before, _STEP_COLUMNS, 0, 0, 0, more)) for held in (keys, values))
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Give the number of columns before the forward that runs: the same in all layers."""
        return self._cache.num_columns

    def lay(self, stop: int) -> None:
        """Copy what the model sees into tensors in which it ends at column `stop`, with room after it."""
        if self.is_initialized:
            cache = self._cache
            seen = [held[: cache.num_rows, :, cache.start : cache.stop] for held in (self.keys, self.values)]
            self._hold(*seen, stop=stop)

    def is_full(self) -> bool:
        """Whether there is no room for the rows, or for another token of each."""
        cache = self._cache
        return self.is_initialized and (len(self.keys) < cache.num_rows or self.keys.shape[2] == cache.stop)

    def move(self, sources: Sequence[int], places: Sequence[int]) -> None:
        """Copy rows to other places."""
        if self.is_initialized:
            seen = slice(self._cache.start, self._cache.stop)
            for held in (self.keys, self.values):
                held[places, :, seen] = held[sources, :, seen]

    def take(self, other: _Keys, rows: Sequence[int], first: int) -> None:
        """Copy rows of another cache, from the row `first` on."""
        if other.is_initialized:
            cache, other_cache = self._cache, other._cache
            if not self.is_initialized:
                none = (held[:0, :, :0] for held in (other.keys, other.values))
                self._hold(*none, stop=cache.stop)
            columns = slice(cache.stop - other_cache.num_columns, cache.stop)
            for held, given in ((self.keys, other.keys), (self.values, other.values)):
                held[first : cache.num_rows, :, columns] = given[rows, :, other_cache.start : other_cache.stop]


class _States(LinearAttentionLayer):
    """States of one layer of linear attention or of convolutions, of the rows that the model sees alone."""

    def keep(self, sources: Sequence[int], places: Sequence[int], num_rows: int) -> None:
        """Copy rows to other places, and keep the first ones."""
        for states in (self.conv_states, self.recurrent_states):
            for i, held in states.items():
                if held is not None:
                    held[places] = held[sources]
                    states[i] = held[:num_rows]

    def take(self, other: _States, rows: Sequence[int], first: int) -> None:
        """Add rows of another cache after the first ones."""
        for states, others in (
            (self.conv_states, other.conv_states),
            (self.recurrent_states, other.recurrent_states),
        ):
            for i, given in others.items():
                if given is not None:
                    held = states[i]
                    states[i] = given[rows] if held is None else torch.cat([held[:first], given[rows]])
        for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
            getattr(self, name).update(getattr(other, name))
        self.conv_kernel_size.update(other.conv_kernel_size)
        self.dtype, self.device = other.dtype, other.device


class SlotCache(Cache):
    """What models of a config keep of rows.

    Args:
        config: config of a model.
        num_rows: rows whose first tokens the next forward writes.

    Raises:
        ValueError: they keep something else than keys, values and states.
    """

    def __init__(self, config: PreTrainedConfig, num_rows: int = 0) -> None:
        self.num_rows = num_rows
        """Number of rows that the model sees."""
        self.start, self.stop = 0, 0
        """Columns that the model sees."""
        layers: Any = [self._make_layer(layer) for layer in DynamicCache(config=config).layers]
        super().__init__(layers=layers)
        # Some run their blocks several times, and count the runs as blocks.
        make: Any = self._make_keys
        self.layer_class_to_replicate = make

    def _make_keys(self) -> _Keys:
        return _Keys(self)

    def _make_layer(self, kind: object) -> object:
        if type(kind) in (DynamicLayer, DynamicSlidingWindowLayer):
            return self._make_keys()
        if type(kind) is LinearAttentionLayer:
            return _States(number_of_states=kind.number_of_states)
        if type(kind) is DummyLayer:
            return kind
        raise ValueError(f"it keeps a {type(kind).__name__}")

    @property
    def num_columns(self) -> int:
        """Number of columns that the model sees."""
        return self.stop - self.start

    def count(self, num_tokens: int) -> None:
        """Count the tokens that a forward has written in all layers."""
        self.stop += num_tokens

    def narrow(self, num_columns: int) -> None:
        """Show the newest columns alone, and have room for another token."""
        self.start = self.stop - num_columns
        if any(layer.is_full() for layer in self._keys()):
            self._lay(num_columns)

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Keep these rows alone, the last ones at the places of those that leave; give the rows in their new order."""
        places = sorted(set(range(len(rows))) - set(rows))
        moved = [row for row in rows if row >= len(rows)]
        for layer in self._keys():
            layer.move(moved, places)
        for states in self._states():
            states.keep(moved, places, len(rows))
        self.num_rows = len(rows)
        by_place = dict(zip(places, moved, strict=True))
        return [by_place.get(place, place) for place in range(len(rows))]

    def add(self, other: SlotCache, rows: Sequence[int]) -> None:
        """Add copies of these rows of another cache after those that are here."""
        if self.num_rows == 0:
            self.start = self.stop
        first, num_columns = self.num_rows, max(self.num_columns, other.num_columns)
        self.num_rows += len(rows)
        self.layers += [self._make_keys() for _ in other.layers[len(self.layers) :]]
        if self.stop < num_columns or any(layer.is_full() for layer in self._keys()):
            self._lay(num_columns)
        for layer, source in zip(self._keys(), other._keys(), strict=True):
            layer.take(source, rows, first)
        for states, given in zip(self._states(), other._states(), strict=True):
            states.take(given, rows, first)
        self.start = self.stop - num_columns

    def _keys(self) -> list[_Keys]:
        return [layer for layer in self.layers if isinstance(layer, _Keys)]

    def _states(self) -> list[_States]:
        return [layer for layer in self.layers if isinstance(layer, _States)]

    def _lay(self, num_columns: int) -> None:
        for layer in self._keys():
            layer.lay(num_columns)
        self.start, self.stop = num_columns - self.num_columns, num_columns


def next_logits(model: Any, cache: SlotCache, new: NewTokens) -> torch.Tensor:
    """Run a model on the next tokens of each row, and give the logits of the token after them.

    Args:
        model: of transformers, with all blocks.
        cache: what the model has kept of the tokens before, and keeps of the new ones.
        new: the tokens, on the model's device.

    Returns:
        Logits of shape [rows, vocabulary].
    """
    num_tokens = new.ids.shape[1]
    width = cache.num_columns + num_tokens
    positions = torch.arange(width, device=new.ids.device) - width + new.lengths[:, None]
    inputs = {CACHE: cache, "attention_mask": (positions >= 0).long(), "use_cache": True, **new.seen}
    takes = inspect.signature(model.forward).parameters
    if "position_ids" in takes:
        own = positions[:, -num_tokens:].clamp(min=0)
        # Those of the text come first, as masks are made of them.
        inputs["position_ids"] = own if new.shifts is None else torch.cat([own[None], own + new.shifts])
    if "logits_to_keep" in takes:
        inputs["logits_to_keep"] = 1
    # Some classes have inputs of their own.
    prepared = model.prepare_inputs_for_generation(new.ids, is_first_iteration=cache.num_columns == 0, **inputs)
    if "position_ids" in inputs and prepared.get("position_ids") is None:
        # Where they take positions away, a forward counts what pads a row, too.
        prepared["position_ids"] = inputs["position_ids"]
    logits: torch.Tensor = model(**prepared, return_dict=True).logits[:, -1]
    cache.count(num_tokens)
    return logits
