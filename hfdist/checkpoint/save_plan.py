"""What a save writes where, and which rank writes it: found from what all ranks hold, without gathering it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hfdist.checkpoint import safetensors_io
from hfdist.checkpoint.piece import NUMBER, STEP, WEIGHT, Piece, is_number
from hfdist.checkpoint.safetensors_io import DTYPE_NAMES, FilePlan
from hfdist.checkpoint.save_planner import Assignment, Region, TensorId, TensorSpec, assign_writers, pack_files
from hfdist.collectives import gather_json, on_all_ranks, rank
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
    numbers: dict[str, dict[str, float]]
    """Those of the optimizer, such as step counts: by key, and then by parameter."""
    index: dict[str, Any] | None
    """Content of the Hub's index, where the weights take several files."""

    @property
    def num_bytes(self) -> int:
        """Of all tensor files."""
        return sum(file.num_bytes for file in self.files.values())

    def numbers_as_json(self) -> dict[str, Any]:
        """Step counts, and other numbers where the optimizer has some."""
        others = {key.removeprefix(NUMBER): of_key for key, of_key in self.numbers.items() if key != STEP}
        return {"steps": self.numbers.get(STEP, {})} | ({"numbers": others} if others else {})


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


@dataclass(frozen=True, kw_only=True)
class WriteItem:
    """A run of elements that this rank writes, and its place."""

    id: TensorId
    file: str
    """Relative to the checkpoint."""
    begin: int
    """Byte offset in the file."""
    end: int
    """One past the last byte in the file."""
    is_trained: bool
    piece: int
    """Which of this rank's pieces in the plan holds them."""
    elements_of_piece: slice

    def elements(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Give the live elements, 1-D."""
        return pieces[self.piece].view.detach().reshape(-1)[self.elements_of_piece]


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
        self._held: list[Any] | None = None
        """What this rank held at the last plan: elements, and names with a number, by key."""
        self._numbered: list[dict[str, list[str]]] = []
        """Those names, of each rank."""
        self._plan: Plan | None = None
        self._slots: list[WriteItem] = []

    def plan(self, pieces: Iterable[Piece]) -> tuple[Plan, list[WriteItem], list[torch.Tensor]]:
        """Give the plan, equal on all ranks, and what this rank writes: places in files, and live elements for each.

        The places are in the order of the files, and the same list as before where nothing has changed. A collective.

        Raises:
            CheckpointError: elements that no rank holds, or ranks that contradict each other; on all ranks alike.
        """
        own: list[Piece] = []
        held: list[Any] = []

        def look() -> list[Any]:
            numbers: dict[str, dict[str, torch.Tensor]] = {}
            for piece in pieces:
                if is_number(piece.key):
                    numbers.setdefault(piece.key, {})[piece.name] = piece.view
                elif piece.key == WEIGHT or not self._weights_only:
                    own.append(piece)
            held.extend(_sketch(piece) for piece in own)
            held.append({key: list(by_name) for key, by_name in numbers.items()})
            is_as_before = self._held == held
            if not is_as_before:
                declare(own)  # here, so that a type that cannot be saved is raised on all ranks
            return [is_as_before, _read_numbers(numbers)]

        looked = on_all_ranks(look)
        if self._plan is None or not all(is_as_before for is_as_before, _ in looked):
            regions = declare(own)
            self._plan = self._make([region.to_json() for region in regions], held[-1])
            self._slots = self._list_slots(self._plan, regions)
            self._held = held
        plan = replace(self._plan, numbers=self._merge_numbers([values for _, values in looked]))
        return plan, self._slots, [slot.elements(own) for slot in self._slots]

    def _make(self, own_regions: list[list[object]], own_numbered: dict[str, list[str]]) -> Plan:
        declared = gather_json([own_regions, own_numbered])
        regions = [[Region.from_json(values) for values in of_rank] for of_rank, _ in declared]
        self._numbered = [names for _, names in declared]
        assignments = assign_writers(regions)
        specs = {region.spec.id: region.spec for rank_regions in regions for region in rank_regions}
        return _make_plan(list(specs.values()), assignments, self._stem)

    def _list_slots(self, plan: Plan, regions: list[Region]) -> list[WriteItem]:
        """What the plan wants this rank to write, from its own pieces, in order of the places."""
        held: dict[TensorId, list[int]] = {}
        for number, region in enumerate(regions):
            held.setdefault(region.spec.id, []).append(number)
        trained = {name for by_key in self._numbered for names in by_key.values() for name in names}
        slots = []
        for assignment in plan.assignments:
            if assignment.writer != rank():
                continue
            spec, start, stop = assignment.spec, assignment.start, assignment.stop
            number = next(n for n in held[spec.id] if regions[n].start <= start and stop <= regions[n].stop)
            first = regions[number].start
            file, begin = plan.places[spec.id]
            begin += start * spec.itemsize_bytes
            slots.append(
                WriteItem(
                    id=spec.id,
                    file=file,
                    begin=begin,
                    end=begin + assignment.num_bytes,
                    is_trained=spec.name in trained,
                    piece=number,
                    elements_of_piece=slice(start - first, stop - first),
                )
            )
        return sorted(slots, key=lambda slot: (slot.file, slot.begin))

    def _merge_numbers(self, values_by_rank: list[dict[str, list[float]]]) -> dict[str, dict[str, float]]:
        merged: dict[str, dict[str, float]] = {}
        for numbered, by_key in zip(self._numbered, values_by_rank, strict=True):
            for key, names in numbered.items():
                of_key, values = merged.setdefault(key, {}), by_key[key]
                for name, value in zip(names, values * len(names) if len(values) == 1 else values, strict=True):
                    if of_key.setdefault(name, value) != value:
                        raise CheckpointError(
                            "the ranks disagree about how often a parameter was stepped"
                            if key == STEP
                            else "the ranks disagree about a number of the optimizer",
                            where=name if key == STEP else f"{name}/{key}",
                            found=f"{of_key[name]} and {value}",
                        )
        return {key: dict(sorted(of_key.items())) for key, of_key in sorted(merged.items())}


def _sketch(piece: Piece) -> list[Any]:
    """What a plan depends on."""
    return [piece.name, piece.key, piece.shape, piece.start, piece.view.numel(), piece.view.dtype]


def _read_numbers(numbers: dict[str, dict[str, torch.Tensor]]) -> dict[str, list[float]]:
    """By key, in order; only one where all are the same, as they mostly are."""
    read = {}
    for key, by_name in numbers.items():
        values = _read_together(list(by_name.values()))
        if key == STEP:
            values = [int(value) for value in values]
        read[key] = values[:1] if len(set(values)) == 1 else values
    return read


def _read_together(views: Sequence[torch.Tensor]) -> list[float]:
    """Numbers of one kind: on a GPU each read waits for all that runs there."""
    read: list[float] = [0] * len(views)
    for device in {view.device for view in views}:
        places = [place for place, view in enumerate(views) if view.device == device]
        values = torch.stack([views[place].detach().reshape(()) for place in places]).tolist()
        for place, value in zip(places, values, strict=True):
            read[place] = value
    return read


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
            files[path] = safetensors_io.plan_file({_name_in_file(spec): spec for spec in members})
            places |= {spec.id: (path, files[path].begins[_name_in_file(spec)]) for spec in members}
    index = None
    if len(weights) > 1:
        by_name = {spec.name: places[spec.id][0] for members in weights for spec in members}
        total = sum(spec.num_bytes for members in weights for spec in members)
        index = {"metadata": {"total_size": total}, "weight_map": by_name}
    return Plan(files=files, places=places, assignments=assignments, numbers={}, index=index)


def _name_in_file(spec: TensorSpec) -> str:
    return spec.name if spec.key == WEIGHT else f"{spec.name}/{spec.key}"
