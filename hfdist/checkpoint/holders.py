"""Which other ranks hold the same elements of a tensor: each rank learns it of its own tensors only.

Each tensor has one rank that is asked about it, known by the tensor's name. It hears of all regions of this tensor,
splits them, and answers each holder:

    rank 0 holds  a [0, 6)  --> asks rank 2:  who holds a?  -->  a [0, 3): rank 0      a [3, 6): ranks 0 and 1
    rank 1 holds  a [3, 9)  --> asks rank 2:  who holds a?  -->  a [3, 6): ranks 0, 1  a [6, 9): rank 1

What a rank sends, gets and computes grows with what it holds, and not with that times the number of ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from hfdist.checkpoint.piece import STEP, is_number
from hfdist.checkpoint.regions import Column, Region, Segment, merge_specs, split_tensors
from hfdist.checkpoint.safetensors_io import TensorId, TensorSpec
from hfdist.collectives import on_all_ranks, world_size
from hfdist.control_group import exchange_json
from hfdist.errors import CheckpointError
from hfdist.garbage_collector import collector_paused

_Runs = list[list[int]]
"""Ranks in order, as JSON: [first rank, last rank, distance] of each run of equally distant ones; distance 0: one."""


class Held(NamedTuple):
    """A region and a rank that holds it."""

    holder: int
    region: Region


def gather_specs(own: Iterable[Region]) -> dict[TensorId, TensorSpec]:
    """Give all tensors that any rank holds, in order of their ids. A collective.

    Args:
        own: the regions that this rank holds.

    Raises:
        CheckpointError: ranks disagree about a tensor, or hold a region outside of it; on all ranks alike.
    """
    of_asked = _gather_asked(own)
    return _merge_on_all(lambda: merge_specs(held.region for held in of_asked))


@collector_paused()
def find_holders(own: Iterable[Region]) -> tuple[dict[TensorId, TensorSpec], list[Segment]]:
    """Give all tensors that any rank holds, and the segments of which this rank holds a part. A collective.

    Args:
        own: the regions that this rank holds.

    Returns:
        The tensors in order of their ids, and the segments. Numbers, such as step counts, have no segments.

    Raises:
        CheckpointError: ranks disagree about a tensor, or hold a region outside of it, or no rank holds some elements
            of a tensor; on all ranks alike.
    """
    of_asked = _gather_asked(own)
    split: list[Segment] = []

    def merge_and_split() -> dict[TensorId, TensorSpec]:
        specs = merge_specs(held.region for held in of_asked)
        split.extend(split_tensors(specs, [held for held in of_asked if not is_number(held.region.spec.key)]))
        return specs

    specs = _merge_on_all(merge_and_split)
    answers: list[list[object]] = [[] for _ in range(world_size())]
    for holder, answer in answers_by_holder(split):
        answers[holder].append(answer)
    # Ranks that hold one tensor alike hold others alike: their numbers are kept once.
    known: dict[str, tuple[int, ...]] = {}
    segments = []
    for (name, key), start, stop, columns_as_json in chain.from_iterable(exchange_json(answers)):
        columns = tuple(Column(begin, end, _from_runs(runs, known)) for begin, end, runs in columns_as_json)
        segments.append(Segment(Region(specs[name, key], start, stop), columns))
    return specs, segments


def answers_by_holder(segments: Iterable[Segment]) -> Iterator[tuple[int, list[object]]]:
    """Give the answer about each segment, as JSON, to each rank that holds a part of it: pairs of rank and answer."""
    for segment in segments:
        region = segment.region
        columns = [[column.start, column.stop, _to_runs(column.holders)] for column in segment.columns]
        answer: list[object] = [region.spec.id, region.start, region.stop, columns]
        for holder in segment.holders:
            yield holder, answer


def directory_rank(tensor_id: TensorId, num_ranks: int) -> int:
    """Give the rank that is asked about a tensor."""
    return zlib.crc32("/".join(tensor_id).encode()) % num_ranks


def gather_numbers(own: Mapping[TensorId, float]) -> dict[TensorId, float]:
    """Give the numbers of all ranks, from this rank's. A collective.

    It is a `CheckpointError` on all ranks if some disagree about one.
    """
    received = _send((tensor_id, (tensor_id, value)) for tensor_id, value in own.items())

    def merge() -> list[object]:
        merged: dict[TensorId, float] = {}
        for _, ((name, key), value) in received:
            if merged.setdefault((name, key), value) != value:
                of_what = "how often a parameter was stepped" if key == STEP else "a number of the optimizer"
                where, found = name if key == STEP else f"{name}/{key}", f"{merged[name, key]} and {value}"
                raise CheckpointError(f"the ranks disagree about {of_what}", where=where, found=found)
        return list(merged.items())

    return {(name, key): value for (name, key), value in chain.from_iterable(on_all_ranks(merge))}


def _send(items: Iterable[tuple[TensorId, object]]) -> list[tuple[int, Any]]:
    """Send each item to the rank that is asked about its tensor; give what this rank gets, with the sender's rank."""
    sent: list[list[object]] = [[] for _ in range(world_size())]
    for tensor_id, item in items:
        sent[directory_rank(tensor_id, world_size())].append(item)
    return [(sender, item) for sender, of_rank in enumerate(exchange_json(sent)) for item in of_rank]


def _gather_asked(own: Iterable[Region]) -> list[Held]:
    """Give all regions, of all ranks, of the tensors that this rank is asked about."""
    received = _send((region.spec.id, region) for region in own)
    return [Held(holder, Region.from_json(values)) for holder, values in received]


def _merge_on_all(merge: Callable[[], dict[TensorId, TensorSpec]]) -> dict[TensorId, TensorSpec]:
    """Give all ranks the tensors that each has merged, in order of their ids; a failure of one is raised on all."""
    of_ranks = on_all_ranks(lambda: list(merge().values()))
    specs = [TensorSpec(name, key, tuple(shape), dtype) for name, key, shape, dtype in chain.from_iterable(of_ranks)]
    return {spec.id: spec for spec in sorted(specs)}


def _to_runs(holders: Sequence[int]) -> _Runs:
    """Give ranks, which are in order, as runs: thousands of replicas are a few numbers.

    [0, 2, 4, 9] becomes [[0, 4, 2], [9, 9, 0]].
    """
    runs: _Runs = []
    for holder in holders:
        if runs:
            first, last, distance = runs[-1]
            if distance in (0, holder - last):
                runs[-1] = [first, holder, holder - last]
                continue
        runs.append([holder, holder, 0])
    return runs


def _from_runs(runs: _Runs, known: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Give the ranks that `_to_runs` has written; `known` keeps those that were read before."""
    text = str(runs)
    if text not in known:
        ranks: list[int] = []
        for first, last, distance in runs:
            ranks += [first] if distance == 0 else range(first, last + 1, distance)
        known[text] = tuple(ranks)
    return known[text]
