"""What the plan of a save costs one rank of thousands: the others are faked, by what they would send to it.

The model has the shapes of a Llama of 405 billion parameters, and Adam's two moments. Its tensors have no memory, and
no other rank is started: only the transport of `hfdist.collectives` and of control groups is replaced, so all that a
rank computes is real.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from hfdist import collectives, control_group
from hfdist.checkpoint.holders import answers_by_holder, directory_rank
from hfdist.checkpoint.manifest import Manifest, Part
from hfdist.checkpoint.piece import STEP, WEIGHT, Piece, is_number
from hfdist.checkpoint.regions import Region, split_tensors
from hfdist.checkpoint.safetensors_io import TensorSpec
from hfdist.checkpoint.save_plan import Planner, SavePlan, regions_of
from hfdist.collectives import on_all_ranks

BLOCKS, WIDTH, INNER_WIDTH, KEY_WIDTH, VOCABULARY = 126, 16_384, 53_248, 1_024, 128_256
LAYOUTS = {"fsdp2": 1, "tensor 8 x fsdp2": 8}
"""Tensor ranks of each layout."""
_KEYS = (WEIGHT, "exp_avg", "exp_avg_sq")
_RANK = b"00000"
"""In names of files that each rank has."""
_DIVIDED_BY_COLUMNS = ("o_proj", "down_proj")

Shapes = dict[str, tuple[int, ...]]


@dataclass(kw_only=True)
class Costs:
    """Costs of the plan of a save on one rank."""

    first_cpu_seconds: float
    later_cpu_seconds: float
    told_cpu_seconds: float
    """CPU seconds to hear, in a later save, what all ranks have written, without the need for their hashes."""
    manifest_cpu_seconds: float
    """CPU seconds of rank 0 for these hashes and the manifest."""
    received_bytes: int
    """Bytes that come from other ranks for the first save."""
    peak_bytes: int
    """The most that Python's objects take at a time for the first save, beside what a rank holds."""


def measure(layout: str, num_ranks: int) -> Costs:
    """Plan a first save and a later one, as the rank of the first that is asked about most tensors."""
    shapes = dict(_shapes())
    asked = [directory_rank(piece_id, num_ranks) for piece_id in _ids(shapes)]
    own = max(range(num_ranks), key=asked.count)
    others = _Others(shapes, LAYOUTS[layout], num_ranks, own)
    pieces = list(others.pieces(own, shapes))
    with others.faked():
        tracemalloc.start()
        Planner().plan(pieces)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        planner = Planner()
        first, later = (_timed(lambda: planner.plan(pieces)) for _ in range(2))
        plan, *_ = planner.plan(pieces)
        told = _timed(lambda: on_all_ranks(_written, is_told=False))
        manifest = _timed(lambda: _write_manifest(on_all_ranks(_written), plan))
    return Costs(
        first_cpu_seconds=first,
        later_cpu_seconds=later,
        told_cpu_seconds=told,
        manifest_cpu_seconds=manifest,
        received_bytes=others.received_bytes,
        peak_bytes=peak_bytes,
    )


def _timed(action: Callable[[], object]) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


def _written() -> list[Part]:
    """What a rank says once it has written."""
    return [Part.first(f"training_state/{kind}-{_RANK.decode()}", b"") for kind in ("rng", "hashes")]


def _write_manifest(of_ranks: Sequence[Sequence[Sequence[Any]]], plan: SavePlan) -> None:
    parts = [Part(*values) for of_rank in of_ranks for values in of_rank]
    with tempfile.TemporaryDirectory() as folder:
        files = {name: file.num_bytes for name, file in plan.files.items()} | {part.file: 0 for part in parts}
        Manifest(step=1, files=files, parts=parts).write(Path(folder))


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, WIDTH)
    for block in range(BLOCKS):
        for name, shape in {
            "input_layernorm": (WIDTH,),
            "self_attn.q_proj": (WIDTH, WIDTH),
            "self_attn.k_proj": (KEY_WIDTH, WIDTH),
            "self_attn.v_proj": (KEY_WIDTH, WIDTH),
            "self_attn.o_proj": (WIDTH, WIDTH),
            "post_attention_layernorm": (WIDTH,),
            "mlp.gate_proj": (INNER_WIDTH, WIDTH),
            "mlp.up_proj": (INNER_WIDTH, WIDTH),
            "mlp.down_proj": (WIDTH, INNER_WIDTH),
        }.items():
            yield f"model.layers.{block}.{name}.weight", shape
    yield "model.norm.weight", (WIDTH,)
    yield "lm_head.weight", (VOCABULARY, WIDTH)


def _ids(names: Shapes) -> list[tuple[str, str]]:
    return [(name, key) for name in names for key in (*_KEYS, STEP)]


class _Others:
    """The other ranks, as far as one rank hears of them."""

    def __init__(self, shapes: Shapes, tensor_ranks: int, num_ranks: int, own: int) -> None:
        self._shapes, self._tensor_ranks, self._num_ranks, self._own = shapes, tensor_ranks, num_ranks, own
        asked = {name for name, key in _ids(shapes) if directory_rank((name, key), num_ranks) == own}
        of_asked = {name: shape for name, shape in shapes.items() if name in asked}
        questions = [
            [region for region in self._declare(rank, of_asked) if directory_rank(region.spec.id, num_ranks) == own]
            for rank in range(num_ranks)
        ]
        specs: list[list[object]] = [[] for _ in range(num_ranks)]
        for region in self._declare(own, shapes):
            specs[directory_rank(region.spec.id, num_ranks)].append(region.spec)
        answers: list[list[object]] = [[] for _ in range(num_ranks)]
        for answer in self._answers():
            answers[directory_rank(tuple(answer[0]), num_ranks)].append(answer)
        self._swapped = [_texts(questions), _texts(answers)]
        self._gathered = _texts([{"value": of_rank} for of_rank in specs])
        self.received_bytes = sum(len(text) for texts in (*self._swapped, self._gathered) for text in texts)

    def pieces(self, rank: int, shapes: Shapes) -> Iterator[Piece]:
        """List what a rank holds of tensors, and their step counts."""
        shard, part = divmod(rank, self._tensor_ranks)
        num_shards = self._num_ranks // self._tensor_ranks
        step = torch.ones(())
        for name, shape in shapes.items():
            rows, width, run, start = shape[0], math.prod(shape[1:]), 0, 0
            if self._tensor_ranks > 1 and any(kind in name for kind in _DIVIDED_BY_COLUMNS):
                run = width // self._tensor_ranks
                start = part * run
            elif self._tensor_ranks > 1 and len(shape) > 1:
                rows //= self._tensor_ranks
                start = part * rows * width
            size = -(-rows // num_shards)
            first = min(shard * size, rows)
            view = torch.empty((min(first + size, rows) - first) * (run or width), device="meta")
            for key in _KEYS:
                begin, pitch = start + first * width, width if run else 0
                yield Piece(name=name, key=key, shape=shape, start=begin, view=view, run=run, pitch=pitch)
            yield Piece(name=name, key=STEP, shape=(), start=0, view=step)

    def _declare(self, rank: int, shapes: Shapes) -> list[Region]:
        """Describe it as a planner does, which asks about numbers last."""
        return sorted(regions_of(self.pieces(rank, shapes)), key=lambda region: is_number(region.spec.key))

    def _answers(self) -> Iterator[list[Any]]:
        """What ranks that are asked about this one's tensors answer."""
        first = self._own // self._tensor_ranks * self._tensor_ranks
        peers = range(first, first + self._tensor_ranks)
        held = [(rank, region) for rank in peers for region in self._declare(rank, self._shapes)]
        held = [(rank, region) for rank, region in held if not is_number(region.spec.key)]
        rest: dict[TensorSpec, list[tuple[int, int]]] = {}
        for _, region in held:
            # What ranks of other shards hold is one to this.
            pitch = region.pitch or 1
            spans = rest.setdefault(region.spec, [])
            spans.append((region.start // pitch * pitch, -(-region.stop // pitch) * pitch))
        for spec, spans in rest.items():
            ends = sorted({(0, 0), (spec.total, spec.total), *spans})
            for (_, stop), (start, _) in pairwise(ends):
                if stop < start:
                    held.append((self._num_ranks, Region(spec, stop, start)))
        segments = split_tensors({region.spec.id: region.spec for _, region in held}, held)
        return (answer for holder, answer in answers_by_holder(segments) if holder == self._own)

    @contextmanager
    def faked(self) -> Iterator[None]:
        """Replace what carries texts; ranks say what this one says where nothing else is known."""
        swapped, own_text = cycle(self._swapped), self._gathered[self._own]
        ranks = SimpleNamespace(
            is_initialized=lambda: True,
            get_rank=lambda: self._own,
            get_world_size=lambda group=None: self._num_ranks,
            get_backend=lambda group=None: "gloo",
        )

        def gather(text: bytes, group: object) -> list[bytes]:
            if text == own_text:
                return self._gathered
            # Each a text of its own, as they would arrive; the others name their own files.
            return [bytes(bytearray(text)).replace(_RANK, b"%05d" % number) for number in range(self._num_ranks)]

        group = SimpleNamespace(swap=lambda texts: next(swapped))
        with (
            patch.object(collectives, "dist", ranks),
            patch.object(collectives, "gather_texts", gather),
            patch.object(control_group, "control_group", lambda: group),
        ):
            yield


def _texts(values: Sequence[object]) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]
