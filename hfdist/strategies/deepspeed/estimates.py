"""What a rank of DeepSpeed's ZeRO sends and holds in a step, in closed form from a few sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from hfdist.config.strategy import Offload
from hfdist.sent_bytes import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from hfdist.strategies.deepspeed.buckets import bucket_elements
from hfdist.strategies.step_memory import Copied, MemoryUse, RankSizes
from hfdist.strategies.traffic import DATA, Axes, Phase, Sent

LIVE_ELEMENTS = 1e9
"""The most elements of weights that ZeRO-3 gathers and keeps at a time: `stage3_max_live_parameters`."""
_SPLIT = 1 / 3
"""Share of a block's parameters whose gradients a rank of ZeRO-1 and 2 keeps whole, though it steps only a part."""
_COPIES_OF_GRADIENTS, _COPIES_OF_STATE = 7, 6
"""How often DeepSpeed reads or writes each gradient more than autograd does, on its way through a bucket to its owner,
and each element of a rank's own part more than the optimizer does: by traces of ZeRO-1, -2 and -3."""


def reduce_to_owners(axes: Axes, *, microbatches: int, hidden_by: Phase | None) -> Iterator[Sent]:
    """Give what ZeRO-1 and 2 send: gradients to the ranks that step them, and the weights back to all."""
    held = axes.held()
    # See `use_multi_rank_bucket_allreduce` in deepspeed_config.py.
    kind = ALL_REDUCE if axes.sizes.is_gpu else "reduce"
    calls = axes.sizes.num_blocks * microbatches
    yield from axes.reduce(kind, DATA, held * microbatches, calls=calls, hidden_by=hidden_by, microbatches=microbatches)
    yield from axes.reduce(ALL_GATHER, DATA, held, calls=1)


def gather_weights(axes: Axes, *, most_live: float) -> Iterator[Sent]:
    """Give what ZeRO-3 sends: weights for each forward and backward, and gradients to their owners.

    `most_live`: the most elements that it may keep between a forward and its backward.
    """
    num_microbatches, small = axes.batch.num_microbatches, axes.sizes.small
    held, calls = axes.held(), axes.sizes.num_blocks * num_microbatches
    large = held - small
    again = max(0.0, large - most_live)
    reduce = partial(axes.reduce, calls=calls, microbatches=num_microbatches)
    forward, backward = num_microbatches * large * axes.sizes.passes, num_microbatches * again
    yield from reduce(ALL_GATHER, DATA, forward, is_gradient=False, hidden_by=Phase.forward)
    yield from reduce(ALL_GATHER, DATA, backward, is_gradient=False, hidden_by=Phase.backward)
    yield from reduce(REDUCE_SCATTER, DATA, num_microbatches * held, hidden_by=Phase.backward)
    yield from axes.reduce(ALL_GATHER, DATA, small, calls=1)


def with_master_weights(sizes: RankSizes) -> RankSizes:
    """Add the float32 copies that DeepSpeed steps, with float32 gradients."""
    return replace(sizes, gradient_bytes=4.0, optimizer_bytes=sizes.optimizer_bytes + 4.0)


def hold_in_step(sizes: RankSizes, stage: int) -> Iterator[tuple[Phase, MemoryUse]]:
    """Give the moments of a step at which a rank may hold most.

    Gradients go through buckets, and autocast makes no copies of weights in its own type.
    """
    weight_bytes = sizes.half_bytes or sizes.weight_bytes
    use = with_master_weights(replace(sizes, weight_bytes=weight_bytes)).state()
    use = use if sizes.half_bytes is None else replace(use, activations=sizes.kept)
    return _hold_parts(sizes, use) if stage == 3 else _hold_whole(sizes, use, stage)


def _hold_parts(sizes: RankSizes, use: MemoryUse) -> Iterator[tuple[Phase, MemoryUse]]:
    """ZeRO-3. Gradients have a place that stays."""
    bucket, item_bytes = _bucket(sizes)
    buffers = min(sizes.elements, LIVE_ELEMENTS) * item_bytes + bucket
    yield Phase.forward, replace(use, activations=use.activations + sizes.of_head, buffers=buffers)
    yield Phase.backward, replace(use, activations=use.activations + sizes.working, buffers=buffers + bucket)
    yield Phase.optimizer, replace(use, activations=0.0, buffers=bucket + _stepped_bytes(sizes))


def _hold_whole(sizes: RankSizes, use: MemoryUse, stage: int) -> Iterator[tuple[Phase, MemoryUse]]:
    """ZeRO-1 and 2."""
    bucket, item_bytes = _bucket(sizes)
    kept = _bytes_of_kept_gradients(sizes)
    # ZeRO-1 of bfloat16 has none.
    buckets = 0.0 if stage == 1 and sizes.half_bytes is not None else 2 * bucket
    accumulates = sizes.layout.num_microbatches > 1
    before = (sizes.trained * 4.0 if stage == 1 else kept) if accumulates else 0.0
    # ZeRO-1 lets its buckets go after the last micro batch only.
    waiting = buckets if stage == 1 and accumulates else 0.0
    in_forward, in_backward = use.activations + sizes.of_head, use.activations + sizes.working
    yield Phase.forward, replace(use, gradients=before, activations=in_forward, buffers=waiting)
    yield Phase.backward, replace(use, gradients=before, activations=in_backward, buffers=buckets)
    at_end, sent = kept if stage == 1 else before + kept, min(bucket, sizes.stepped * item_bytes)
    yield Phase.backward, replace(use, gradients=at_end, activations=sizes.working, buffers=buckets + sent)
    yield Phase.optimizer, replace(use, gradients=kept, activations=0.0, buffers=_stepped_bytes(sizes))


def _bucket(sizes: RankSizes) -> tuple[float, float]:
    """Give the bytes of a bucket, and of an element in it."""
    item_bytes = sizes.half_bytes or sizes.gradient_bytes
    return bucket_elements(sizes.trained, sizes.trained_end) * item_bytes, item_bytes


def _stepped_bytes(sizes: RankSizes) -> float:
    """Give the bytes on the device of float32 gradients of what the rank steps."""
    return sizes.stepped * 4.0 if sizes.layout.offload is Offload.none else 0.0


def _bytes_of_kept_gradients(sizes: RankSizes) -> float:
    """Give the bytes on the device of the gradients that a rank of ZeRO-1 and 2 keeps."""
    stepped = sizes.stepped
    is_split = sizes.half_bytes is None and sizes.fractions.optimizer < 1 and stepped > 0
    if not is_split or sizes.layout.offload is not Offload.none:
        return _stepped_bytes(sizes)
    # A rank keeps gradients whole, also of what it steps in part; where the largest one ends, it keeps it with the rest
    # of its own part.
    whole = stepped * max(1, math.ceil(sizes.trained_end / stepped))
    return (whole + _SPLIT * sizes.trained_block) * 4.0


def copied_in_step(sizes: RankSizes) -> Copied:
    """Give the bytes that ZeRO-2 and 3 copy: gradients on their way through buckets, and the rank's own state."""
    return Copied(
        backward=_COPIES_OF_GRADIENTS * sizes.trained * (sizes.half_bytes or sizes.gradient_bytes),
        optimizer=_COPIES_OF_STATE * sizes.stepped * sizes.gradient_bytes,
    )
