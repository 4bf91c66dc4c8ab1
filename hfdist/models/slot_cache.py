"""A cache whose rows come and go while the others are continued: keys and values, and states of linear attention.

    column     0   1   2   3   4   5   6   7        start = 2, stop = 6: the model sees columns 2 to 5
    row 0              a0  a1  a2  a3               free columns come after them
    row 1                  b0  b1  b2               its column 2 is padding
    row 2                      c0  c1

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
"""Free columns that the tensors get when they grow: so everything is copied only once for so many tokens."""


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
        """Write the keys and values of new tokens after those that the model sees.

        Returns:
            The keys and values that the model sees, with those of the new tokens.
        """
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        cache = self._cache
        stop = cache.stop + key_states.shape[2]
        self.keys[: cache.num_rows, :, cache.stop : stop] = key_states
        self.values[: cache.num_rows, :, cache.stop : stop] = value_states
        return self._seen(self.keys, stop), self._seen(self.values, stop)

    def _seen(self, held: torch.Tensor, stop: int) -> torch.Tensor:
        """Give the rows and columns of keys or values that the model sees, up to column `stop`."""
        return held[: self._cache.num_rows, :, self._cache.start : stop]

    def _hold(self, keys: torch.Tensor, values: torch.Tensor, *, stop: int) -> None:
        """Copy keys and values into tensors in which they end at column `stop`, with room for more rows and columns.

        All else is 0: what is masked must be finite.
        """
        columns_before = stop - keys.shape[2]
        rows_after = self._cache.num_rows - len(keys)
        # Pairs of sizes, the last dimension first: head size, columns, heads, rows.
        sizes = (0, 0, columns_before, _STEP_COLUMNS, 0, 0, 0, rows_after)
        self.keys, self.values = pad(keys, sizes), pad(values, sizes)
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Give the number of columns that the model has seen before the forward that runs: the same in all layers."""
        return self._cache.num_columns

    def move_columns(self, stop: int) -> None:
        """Copy what the model sees into tensors in which it ends at column `stop`, with room after it."""
        if self.is_initialized:
            seen_stop = self._cache.stop
            self._hold(self._seen(self.keys, seen_stop), self._seen(self.values, seen_stop), stop=stop)

    def is_full(self) -> bool:
        """Whether the tensors lack room for all rows of the cache, or for another token of each."""
        cache = self._cache
        return self.is_initialized and (len(self.keys) < cache.num_rows or self.keys.shape[2] == cache.stop)

    def move_rows(self, sources: Sequence[int], places: Sequence[int]) -> None:
        """Copy the rows of numbers `sources` over the rows of numbers `places`, one each."""
        if self.is_initialized:
            seen = slice(self._cache.start, self._cache.stop)
            for held in (self.keys, self.values):
                held[places, :, seen] = held[sources, :, seen]

    def take(self, other: _Keys, rows: Sequence[int], first: int) -> None:
        """Copy these rows of another cache's layer to this one's rows from number `first` on."""
        if other.is_initialized:
            cache, other_cache = self._cache, other._cache
            if not self.is_initialized:
                # Tensors without rows and columns, of which only types, heads and head sizes are taken.
                self._hold(other.keys[:0, :, :0], other.values[:0, :, :0], stop=cache.stop)
            columns = slice(cache.stop - other_cache.num_columns, cache.stop)
            for held, given in ((self.keys, other.keys), (self.values, other.values)):
                held[first : cache.num_rows, :, columns] = given[rows, :, other_cache.start : other_cache.stop]


class _States(LinearAttentionLayer):
    """States of one layer of linear attention or of convolutions. There are no free rows: each is seen by the model."""

    def keep(self, sources: Sequence[int], places: Sequence[int], num_rows: int) -> None:
        """Copy the rows of numbers `sources` over those of numbers `places`, and keep the first `num_rows`."""
        for states in (self.conv_states, self.recurrent_states):
            for i, held in states.items():
                if held is not None:
                    held[places] = held[sources]
                    states[i] = held[:num_rows]

    def take(self, other: _States, rows: Sequence[int], first: int) -> None:
        """Add these rows of another cache's layer after the first `first` rows of this one."""
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
    """A cache of all layers of a model, from which rows can leave and to which rows of another cache can be added.

    Args:
        config: config of the model.
        num_rows: number of rows whose first tokens the next forward writes.

    Raises:
        ValueError: models of this config keep something else than keys, values and states.
    """

    def __init__(self, config: PreTrainedConfig, num_rows: int = 0) -> None:
        self.num_rows = num_rows
        """Number of rows that the model sees."""
        self.start, self.stop = 0, 0
        """The first column that the model sees, and one past the last one."""
        layers: Any = [self._make_layer(layer) for layer in DynamicCache(config=config).layers]
        super().__init__(layers=layers)
        # Models that run their blocks several times need a layer for each run: transformers makes it by this attribute.
        make_layer: Any = self._make_keys
        self.layer_class_to_replicate = make_layer

    def _make_keys(self) -> _Keys:
        return _Keys(self)

    def _make_layer(self, usual: object) -> object:
        """Make the layer that stands here for one of transformers' own cache."""
        if type(usual) in (DynamicLayer, DynamicSlidingWindowLayer):
            return self._make_keys()
        if type(usual) is LinearAttentionLayer:
            return _States(number_of_states=usual.number_of_states)
        if type(usual) is DummyLayer:
            return usual
        raise ValueError(f"it keeps a {type(usual).__name__}")

    @property
    def num_columns(self) -> int:
        """Number of columns that the model sees."""
        return self.stop - self.start

    def count(self, num_tokens: int) -> None:
        """Let the model see the `num_tokens` columns that a forward has written in all layers."""
        self.stop += num_tokens

    def narrow(self, num_columns: int) -> None:
        """Let the model see the newest `num_columns` only, and make room for another token of each row."""
        self.start = self.stop - num_columns
        if any(layer.is_full() for layer in self._keys()):
            self._move_columns(num_columns)

    def keep(self, rows: Sequence[int]) -> list[int]:
        """Keep these rows only. The last rows move to the places of rows that leave.

        Returns:
            The rows that are kept, by their old numbers, in their new order.
        """
        places = sorted(set(range(len(rows))) - set(rows))
        moved = [row for row in rows if row >= len(rows)]
        for layer in self._keys():
            layer.move_rows(moved, places)
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
        # A model that runs its blocks several times has made layers in the other cache.
        self.layers += [self._make_keys() for _ in other.layers[len(self.layers) :]]
        if self.stop < num_columns or any(layer.is_full() for layer in self._keys()):
            self._move_columns(num_columns)
        for layer, source in zip(self._keys(), other._keys(), strict=True):
            layer.take(source, rows, first)
        for states, given in zip(self._states(), other._states(), strict=True):
            states.take(given, rows, first)
        self.start = self.stop - num_columns

    def _keys(self) -> list[_Keys]:
        return [layer for layer in self.layers if isinstance(layer, _Keys)]

    def _states(self) -> list[_States]:
        return [layer for layer in self.layers if isinstance(layer, _States)]

    def _move_columns(self, num_columns: int) -> None:
        """Let the newest column be number `num_columns` - 1, in tensors with room for all rows and more columns."""
        for layer in self._keys():
            layer.move_columns(num_columns)
        self.start, self.stop = num_columns - self.num_columns, num_columns


def next_logits(model: Any, cache: SlotCache, new: NewTokens) -> torch.Tensor:
    """Run a model on the next tokens of each row, and give the logits of the token after them.

    Args:
        model: a model of transformers with all its blocks, or what acts as one.
        cache: the cache of the tokens before; the new ones are added.
        new: the next tokens of each row, on the model's device.

    Returns:
        Logits of shape [rows, vocabulary].
    """
    num_tokens = new.ids.shape[1]
    width = cache.num_columns + num_tokens
    positions = torch.arange(width, device=new.ids.device) - width + new.lengths[:, None]
    inputs = {CACHE: cache, "attention_mask": (positions >= 0).long(), "use_cache": True, **new.seen}
    takes = inspect.signature(model.forward).parameters
    if "position_ids" in takes:
        in_text = positions[:, -num_tokens:].clamp(min=0)
        # Positions of text come first, then those of time, height and width: masks are made from the first ones.
        inputs["position_ids"] = in_text if new.shifts is None else torch.cat([in_text[None], in_text + new.shifts])
    if "logits_to_keep" in takes:
        inputs["logits_to_keep"] = 1
    # A class may add inputs of its own here.
    prepared = model.prepare_inputs_for_generation(new.ids, is_first_iteration=cache.num_columns == 0, **inputs)
    if "position_ids" in inputs and prepared.get("position_ids") is None:
        # A class that takes the positions away would count the padding of a row, too.
        prepared["position_ids"] = inputs["position_ids"]
    logits: torch.Tensor = model(**prepared, return_dict=True).logits[:, -1]
    cache.count(num_tokens)
    return logits
