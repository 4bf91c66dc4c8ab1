"""What saving and loading cost in each layout, beside gathering the whole state on rank 0 and writing it there."""

from __future__ import annotations

import math
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

import hfdist
from hfdist.checkpoint import read_checkpoint, verify
from hfdist.checkpoint.piece import STEP, Piece
from hfdist.collectives import gather_json
from hfdist.testing import run_ranks
from tests.unit.checkpoint.pieces import write_checkpoint

NUM_RANKS = 4
REPEATS = 3
MEBIBYTE = 2**20
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp x4": {},
    "zero1 x4": {"sharding": "zero1"},
    "zero2 x4": {"sharding": "zero2"},
    "zero3 x4": {"sharding": "zero3"},
    "pp2 x zero1 x2": {"pipeline": 2, "sharding": "zero1"},
    "pp4 interleaved": {"pipeline": 4, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
}


@dataclass(frozen=True)
class Cost:
    """Of one action of all ranks."""

    seconds: float
    """Until the last rank was done."""
    peak_bytes: int
    """What it took beyond what was held before, on the rank that took most."""


def measure_layout(folder: Path, layout: dict[str, Any]) -> dict[str, list[Cost]]:
    """Save and load in turn, both ways, several times. Every rank gives the same."""
    trainer = _train_one_step(folder / f"rank-{dist.get_rank()}", layout)
    pieces = list(trainer.engine.pieces())
    costs: dict[str, list[Cost]] = {}
    for repeat in range(REPEATS):
        ours, gathered = folder / f"ours-{repeat}", folder / f"gathered-{repeat}.safetensors"
        actions: dict[str, Callable[[], object]] = {
            "save": lambda ours=ours: write_checkpoint(
                ours, step=1, pieces=pieces, state={}, write_model_files=lambda path: None
            ),
            "gather": lambda gathered=gathered: gather_and_write(pieces, gathered),
            "load": lambda ours=ours: read_checkpoint(ours / "step-00000001", pieces),
            "distribute": lambda gathered=gathered: read_and_distribute(pieces, gathered),
        }
        before = _sums(pieces)
        for name, action in actions.items():
            if name in ("load", "distribute"):
                for piece in _tensors(pieces):
                    piece.view.zero_()
            costs.setdefault(name, []).append(_measure(action))
            assert _sums(pieces) == before
        if dist.get_rank() == 0:
            verify(ours / "step-00000001")
            shutil.rmtree(ours)
            gathered.unlink()
    return costs


def _train_one_step(folder: Path, layout: dict[str, Any]) -> Any:
    """So that the optimizer has its state."""
    strategy = hfdist.make_strategy(**layout, global_batch_size=8, sequence_length=8)
    fields = {"max_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(str(folder), **fields, **strategy.training_arguments())
    strategy.start()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **MODEL))
    items = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(8)]
    trainer = hfdist.Trainer(model, arguments, strategy=strategy, train_dataset=items)
    trainer.train()
    return trainer


def gather_and_write(pieces: list[Piece], file: Path) -> None:
    """Send everything to rank 0 once, which writes one file. A collective."""
    own = {(piece.name, piece.key, piece.start, piece.stop): piece for piece in _tensors(pieces)}
    held = gather_json([[*place, list(piece.shape)] for place, piece in own.items()])
    whole: dict[str, torch.Tensor] = {}
    sent = set()
    for source, regions in enumerate(held):
        for name, key, start, stop, shape in regions:
            place = (name, key, start, stop)
            if place in sent or start == stop:
                continue
            sent.add(place)
            if dist.get_rank() == 0:
                tensor = whole.setdefault(f"{name}/{key}", torch.empty(shape)).view(-1)[start:stop]
                tensor.copy_(own[place].view.detach().reshape(-1)) if source == 0 else dist.recv(tensor, source)
            elif dist.get_rank() == source:
                dist.send(own[place].view.detach().reshape(-1), 0)
    if dist.get_rank() == 0:
        save_file(whole, file)
        with file.open("rb") as written:
            os.fsync(written.fileno())


def read_and_distribute(pieces: list[Piece], file: Path) -> None:
    """Rank 0 reads, all hear every tensor and keep their part, as torch's `broadcast_from_rank0`. A collective."""
    whole = load_file(file) if dist.get_rank() == 0 else {}
    own: dict[tuple[str, str], list[Piece]] = {}
    for piece in _tensors(pieces):
        own.setdefault((piece.name, piece.key), []).append(piece)
    wanted = gather_json([[name, key, list(parts[0].shape)] for (name, key), parts in own.items()])
    shapes = {(name, key): shape for regions in wanted for name, key, shape in regions}
    for (name, key), shape in sorted(shapes.items()):
        tensor = whole[f"{name}/{key}"] if dist.get_rank() == 0 else torch.empty(shape)
        dist.broadcast(tensor, 0)
        for piece in own.get((name, key), []):
            piece.view.detach().reshape(-1).copy_(tensor.view(-1)[piece.start : piece.stop])


def _sums(pieces: list[Piece]) -> list[float]:
    return [piece.view.double().sum().item() for piece in pieces]


def _tensors(pieces: list[Piece]) -> Iterator[Piece]:
    return (piece for piece in pieces if piece.key != STEP)


def _measure(action: Callable[[], object]) -> Cost:
    dist.barrier()
    # "5" sets the peak back to what is held now.
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = _memory_bytes("VmRSS"), time.perf_counter()
    action()
    dist.barrier()
    seconds = time.perf_counter() - begin
    peaks = gather_json(_memory_bytes("VmHWM") - before)
    return Cost(seconds=seconds, peak_bytes=max(peaks))


def _memory_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def describe_costs(folder: Path, report: Callable[[str], object]) -> list[str]:
    """Measure all layouts, and give the lines of a document."""
    rows = []
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        (folder / f"costs-{number}").mkdir()
        costs = run_ranks(measure_layout, NUM_RANKS, folder / f"costs-{number}", layout, timeout_seconds=900)[0]
        rows.append(f"| {name} | {_compare(costs, 'save', 'gather')} | {_compare(costs, 'load', 'distribute')} |")
        report(rows[-1])
    head = "| layout | save | ratio | peak | gather | peak | load | ratio | peak | distribute | peak |"
    return [head, "|---" * 11 + "|", *rows]


def _compare(costs: dict[str, list[Cost]], ours: str, other: str) -> str:
    seconds = {name: statistics.median(cost.seconds for cost in costs[name]) for name in (ours, other)}
    peak = {name: max(cost.peak_bytes for cost in costs[name]) / MEBIBYTE for name in (ours, other)}
    ratio = seconds[ours] / seconds[other]
    return (
        f"{seconds[ours]:.2f} s | **{ratio:.2f}** | {peak[ours]:.0f} MiB | {seconds[other]:.2f} s | "
        f"{peak[other]:.0f} MiB"
    )


def num_parameters() -> int:
    """Of the model that is saved, tied ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **MODEL))
    return sum(math.prod(parameter.shape) for parameter in model.parameters())
