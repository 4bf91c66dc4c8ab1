"""Who else holds what a rank holds: ranks ask by tensor, so that none learns of all regions of all ranks.

Each tensor has a rank that is asked about it, known by the tensor's name. It hears of all regions of that tensor alone,
splits them, and answers each holder:

    rank 0 holds  a [0, 6)  --> asks rank 2:  who holds a?  -->  a [0, 3): rank 0      a [3, 6): ranks 0 and 1
    rank 1 holds  a [3, 9)  --> asks rank 2:  who holds a?  -->  a [3, 6): ranks 0, 1  a [6, 9): rank 1

What a rank sends, gets and computes grows with what it holds, and not with that times the number of ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from hfdist.checkpoint.piece import STEP, is_number
from hfdist.checkpoint.regions import Column, Region, Segment, merge_specs, split_tensors
from hfdist.checkpoint.safetensors_io import TensorId, TensorSpec
from hfdist.collectives import on_all_ranks, world_size
from hfdist.control_group import exchange_json
from hfdist.errors import CheckpointError
from hfdist.garbage_collector import collector_paused

_Runs = list[list[int]]
"""Ranks as JSON: the first, the last, and the distance of each run of equally distant ones; 0: there is one."""


def gather_specs(own: Iterable[Region]) -> dict[TensorId, TensorSpec]:
    """Give all tensors that any rank holds, in order of their ids, from this rank's regions. A collective.

    It is a `CheckpointError` on all ranks if some disagree about a tensor, or hold a region outside of it.
    """
    asked = _ask(own)
    return _merge_on_all(lambda: merge_specs(region for _, region in asked))


@collector_paused()
def find_holders(own: Iterable[Region]) -> tuple[dict[TensorId, TensorSpec], list[Segment]]:
    """Give all tensors, as `gather_specs`, and the segments of which this rank holds a part. A collective.

    Numbers have no segments. Elements of a tensor that no rank holds are a `CheckpointError`, too.
    """
    asked = _ask(own)
    found: list[Segment] = []

    def split() -> dict[TensorId, TensorSpec]:
        specs = merge_specs(region for _, region in asked)
        found.extend(split_tensors(specs, [item for item in asked if not is_number(item[1].spec.key)]))
        return specs

    specs = _merge_on_all(split)
    answers: list[list[object]] = [[] for _ in range(world_size())]
    for holder, answer in answers_by_holder(found):
        answers[holder].append(answer)
    # Ranks that hold one tensor alike hold others alike: their numbers are kept once.
    known: dict[str, tuple[int, ...]] = {}
    segments = []
    for (name, key), start, stop, cells in chain.from_iterable(exchange_json(answers)):
        columns = tuple(Column(begin, end, _from_runs(runs, known)) for begin, end, runs in cells)
        segments.append(Segment(Region(specs[name, key], start, stop), columns))
    return specs, segments


def answers_by_holder(segments: Iterable[Segment]) -> Iterator[tuple[int, list[object]]]:
    """Give what each holder hears of each segment, as JSON."""
    for segment in segments:
        (spec, start, stop, *_), columns = segment
        answer: list[object] = [spec.id, start, stop, [[a, b, _to_runs(holders)] for a, b, holders in columns]]
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
    """Send each item to the rank that is asked about its tensor; give those that this one gets, and from which rank."""
    sent: list[list[object]] = [[] for _ in range(world_size())]
    for tensor_id, item in items:
        sent[directory_rank(tensor_id, world_size())].append(item)
    return [(sender, item) for sender, of_rank in enumerate(exchange_json(sent)) for item in of_rank]


def _ask(own: Iterable[Region]) -> list[tuple[int, Region]]:
    """Give all regions of the tensors that this rank is asked about, each with the rank that holds it."""
    return [(holder, Region.from_json(region)) for holder, region in _send((region.spec.id, region) for region in own)]


def _merge_on_all(merge: Callable[[], dict[TensorId, TensorSpec]]) -> dict[TensorId, TensorSpec]:
    """Give all ranks what each has merged; a failure of one is raised on all."""
    of_ranks = on_all_ranks(lambda: list(merge().values()))
    specs = [TensorSpec(name, key, tuple(shape), dtype) for name, key, shape, dtype in chain.from_iterable(of_ranks)]
    return {spec.id: spec for spec in sorted(specs)}


def _to_runs(holders: Sequence[int]) -> _Runs:
    """Give ranks in order as runs: thousands of replicas are a few numbers."""
    runs: _Runs = []
    for holder in holders:
        if runs and (runs[-1][2] == 0 or holder - runs[-1][1] == runs[-1][2]):
            runs[-1][1:] = [holder, holder - runs[-1][1]]
        else:
            runs.append([holder, holder, 0])
    return runs


def _from_runs(runs: _Runs, known: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    text = str(runs)
    if text not in known:
        known[text] = tuple(chain.from_iterable(range(first, last + 1, step or 1) for first, last, step in runs))
    return known[text]
