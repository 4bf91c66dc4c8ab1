"""What a save writes where, and which rank writes it: found from what all ranks hold, without gathering it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hfdist.checkpoint import tensorfile
from hfdist.checkpoint.exchange import gather_json, on_all_ranks
from hfdist.checkpoint.layout import Assignment, Region, TensorId, TensorSpec, assign_writers, pack_files
from hfdist.checkpoint.piece import STEP, WEIGHT, Piece
from hfdist.checkpoint.tensorfile import DTYPE_NAMES, FilePlan
from hfdist.errors import CheckpointError

TRAINING_STATE = "training_state"
OPTIMIZER_STEM = f"{TRAINING_STATE}/optimizer"
MODEL_STEM = "model"
ADAPTER_STEM = "adapter_model"
"""Of the weights where they are an adapter's alone. PEFT reads one file, whatever its size."""

MAX_FILE_BYTES = 2_000_000_000
"""Of one tensor file."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Equal on all ranks."""

    files: dict[str, FilePlan]
    """By path relative to the checkpoint."""
    places: dict[TensorId, tuple[str, int]]
    """File and byte offset of each tensor."""
    assignments: list[Assignment]
    steps: dict[str, int]
    """The optimizer's step count of each parameter."""
    index: dict[str, Any] | None
    """Content of the Hub's index, where the weights take several files."""

    @property
    def num_bytes(self) -> int:
        """Of all tensor files."""
        return sum(file.num_bytes for file in self.files.values())


def declare(pieces: Iterable[Piece]) -> list[Region]:
    """Describe pieces without their tensors.

    Raises:
        CheckpointError: a type that safetensors does not know.
    """
    regions = []
    for piece in pieces:
        if piece.view.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                "a type that a checkpoint cannot hold", where=f"{piece.name}/{piece.key}", found=piece.view.dtype
            )
        spec = TensorSpec(
            name=piece.name,
            key=piece.key,
            shape=tuple(piece.shape),
            dtype=DTYPE_NAMES[piece.view.dtype],
            itemsize_bytes=piece.view.element_size(),
        )
        regions.append(Region(spec=spec, start=piece.start, stop=piece.stop))
    return regions


class Planner:
    """Finds out from what all ranks hold which file each tensor goes into, and who writes what.

    In a series of saves the plan is made once: later ones only ask whether any rank holds something else than before.

    Args:
        weights_only: leave out the optimizer's state.
        stem: `MODEL_STEM`, or `ADAPTER_STEM` where the weights are an adapter's.
    """

    def __init__(self, *, weights_only: bool = False, stem: str = MODEL_STEM) -> None:
        self._weights_only = weights_only
        self._stem = stem
        self._declared: tuple[list[Region], list[str]] | None = None
        """What this rank held at the last plan: elements, and names with a step count."""
        self._stepped: list[list[str]] = []
        """Those names, of each rank."""
        self._plan: Plan | None = None

    def plan(self, pieces: Iterable[Piece]) -> tuple[Plan, list[Piece]]:
        """Give the plan, equal on all ranks, and the pieces of this rank that are in it. A collective.

        Raises:
            CheckpointError: elements that no rank holds, or ranks that contradict each other; on all ranks alike.
        """
        own: list[Piece] = []
        steps: dict[str, int] = {}
        regions: list[Region] = []

        def look() -> list[Any]:
            for piece in pieces:
                if piece.key == STEP:
                    steps[piece.name] = int(piece.view)
                elif piece.key == WEIGHT or not self._weights_only:
                    own.append(piece)
            regions.extend(declare(own))
            values = list(steps.values())
            is_as_before = self._declared == (regions, list(steps))
            # Mostly all parameters were stepped equally often.
            return [is_as_before, values[0] if values and len(set(values)) == 1 else values]

        looked = on_all_ranks(look)
        if self._plan is None or not all(is_as_before for is_as_before, _ in looked):
            self._make([region.to_json() for region in regions], list(steps))
            self._declared = regions, list(steps)
        assert self._plan is not None
        return replace(self._plan, steps=self._merge_steps([values for _, values in looked])), own

    def _make(self, own_regions: list[list[object]], own_stepped: list[str]) -> None:
        declared = gather_json([own_regions, own_stepped])
        regions = [[Region.from_json(values) for values in of_rank] for of_rank, _ in declared]
        self._stepped = [names for _, names in declared]
        assignments = assign_writers(regions)
        specs = {region.spec.id: region.spec for rank_regions in regions for region in rank_regions}
        self._plan = _make_plan(list(specs.values()), assignments, self._stem)

    def _merge_steps(self, values_by_rank: list[int | list[int]]) -> dict[str, int]:
        merged: dict[str, int] = {}
        for names, values in zip(self._stepped, values_by_rank, strict=True):
            for name, step in zip(names, [values] * len(names) if isinstance(values, int) else values, strict=True):
                if merged.setdefault(name, step) != step:
                    raise CheckpointError(
                        "the ranks disagree about how often a parameter was stepped",
                        where=name,
                        found=f"{merged[name]} and {step}",
                    )
        return dict(sorted(merged.items()))


def _make_plan(specs: list[TensorSpec], assignments: list[Assignment], weights_stem: str) -> Plan:
    files: dict[str, FilePlan] = {}
    places: dict[TensorId, tuple[str, int]] = {}
    limit_bytes = MAX_FILE_BYTES if weights_stem == MODEL_STEM else sys.maxsize
    weights = pack_files([spec for spec in specs if spec.key == WEIGHT], limit_bytes)
    optimizer = pack_files([spec for spec in specs if spec.key != WEIGHT], MAX_FILE_BYTES)
    for stem, packed in ((weights_stem, weights), (OPTIMIZER_STEM, optimizer)):
        for number, members in enumerate(packed, start=1):
            if not members:
                continue
            is_all_weights = stem == weights_stem and len(packed) == 1
            part = "" if is_all_weights else f"-{number:05d}-of-{len(packed):05d}"
            path = f"{stem}{part}.safetensors"
            files[path] = tensorfile.plan_file({_name_in_file(spec): spec for spec in members})
            places |= {spec.id: (path, files[path].begins[_name_in_file(spec)]) for spec in members}
    index = None
    if len(weights) > 1:
        by_name = {spec.name: places[spec.id][0] for members in weights for spec in members}
        total = sum(spec.num_bytes for members in weights for spec in members)
        index = {"metadata": {"total_size": total}, "weight_map": by_name}
    return Plan(files=files, places=places, assignments=assignments, steps={}, index=index)


def _name_in_file(spec: TensorSpec) -> str:
    return spec.name if spec.key == WEIGHT else f"{spec.name}/{spec.key}"
