"""What a save writes where, and which rank writes it: found from what all ranks hold, without gathering it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hfdist.checkpoint import tensorfile
from hfdist.checkpoint.exchange import on_all_ranks
from hfdist.checkpoint.layout import Assignment, Region, TensorId, TensorSpec, assign_writers, pack_files
from hfdist.checkpoint.piece import STEP, WEIGHT, Piece
from hfdist.checkpoint.tensorfile import DTYPE_NAMES, FilePlan
from hfdist.errors import CheckpointError

TRAINING_STATE = "training_state"
OPTIMIZER_STEM = f"{TRAINING_STATE}/optimizer"
MODEL_STEM = "model"

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


def agree_on_plan(pieces: Iterable[Piece], *, weights_only: bool) -> tuple[Plan, list[Piece]]:
    """Find out from what all ranks hold which file each tensor goes into, and who writes what. A collective.

    Args:
        pieces: what this rank holds.
        weights_only: leave out the optimizer's state.

    Returns:
        The plan, equal on all ranks, and the pieces of this rank that are in it.

    Raises:
        CheckpointError: elements that no rank holds, or ranks that contradict each other; on all ranks alike.
    """
    own: list[Piece] = []
    steps: dict[str, int] = {}

    def list_own() -> dict[str, Any]:
        for piece in pieces:
            if piece.key == STEP:
                steps[piece.name] = int(piece.view)
            elif piece.key == WEIGHT or not weights_only:
                own.append(piece)
        return {"regions": [region.to_json() for region in declare(own)], "steps": steps}

    declared = on_all_ranks(list_own)
    regions = [[Region.from_json(values) for values in other["regions"]] for other in declared]
    assignments = assign_writers(regions)
    specs = {region.spec.id: region.spec for rank_regions in regions for region in rank_regions}
    return _make_plan(list(specs.values()), assignments, _merge_steps([other["steps"] for other in declared])), own


def _merge_steps(steps_by_rank: list[dict[str, int]]) -> dict[str, int]:
    merged: dict[str, int] = {}
    for steps in steps_by_rank:
        for name, step in steps.items():
            if merged.setdefault(name, step) != step:
                raise CheckpointError(
                    "the ranks disagree about how often a parameter was stepped",
                    where=name,
                    found=f"{merged[name]} and {step}",
                )
    return dict(sorted(merged.items()))


def _make_plan(specs: list[TensorSpec], assignments: list[Assignment], steps: dict[str, int]) -> Plan:
    files: dict[str, FilePlan] = {}
    places: dict[TensorId, tuple[str, int]] = {}
    weights = pack_files([spec for spec in specs if spec.key == WEIGHT], MAX_FILE_BYTES)
    optimizer = pack_files([spec for spec in specs if spec.key != WEIGHT], MAX_FILE_BYTES)
    for stem, packed in ((MODEL_STEM, weights), (OPTIMIZER_STEM, optimizer)):
        for number, members in enumerate(packed, start=1):
            if not members:
                continue
            is_whole_model = stem == MODEL_STEM and len(packed) == 1
            part = "" if is_whole_model else f"-{number:05d}-of-{len(packed):05d}"
            path = f"{stem}{part}.safetensors"
            files[path] = tensorfile.plan_file({_name_in_file(spec): spec for spec in members})
            places |= {spec.id: (path, files[path].begins[_name_in_file(spec)]) for spec in members}
    index = None
    if len(weights) > 1:
        by_name = {spec.name: places[spec.id][0] for members in weights for spec in members}
        total = sum(spec.num_bytes for members in weights for spec in members)
        index = {"metadata": {"total_size": total}, "weight_map": by_name}
    return Plan(files=files, places=places, assignments=assignments, steps=steps, index=index)


def _name_in_file(spec: TensorSpec) -> str:
    return spec.name if spec.key == WEIGHT else f"{spec.name}/{spec.key}"
