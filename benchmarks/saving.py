"""Saving one model in one run with hfdist, torch's DCP and DeepSpeed: how long training stands still, and all of it.

python -m benchmarks.saving --write
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import RESULTS, describe_machine, markdown, write_section
from hfdist.checkpoint import Saver
from hfdist.checkpoint.exchange import gather_json
from hfdist.checkpoint.piece import Piece
from hfdist.strategies import pieces_replicated, pieces_zero
from hfdist.testing.launch import run_ranks

NUM_RANKS = 2
SIZES: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12,
         "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False}  # fmt: skip
OURS_DDP, OURS_ZERO = "hfdist, ddp", "hfdist, zero2"
DCP, DCP_CACHED = "torch DCP async, ddp", "torch DCP async, ddp, memory kept"
DEEPSPEED = "HF Trainer + DeepSpeed, zero2"
COPY, WRITE = "a copy in memory", "a write to the disk"


class Times(NamedTuple):
    """Of one save, in seconds; the slowest rank's."""

    stall: float
    total: float


Save = Callable[[Path], "Times"]


def main() -> None:
    """Measure all, and print or write the table."""
    options = _options()
    measured: dict[str, list[Times]] = {}
    for contenders in (replicated_contenders, zero_contenders):
        for name, times in run_ranks(measure, NUM_RANKS, contenders, options.rounds, timeout_seconds=3600)[0].items():
            measured[name] = [Times(*pair) for pair in times]
    section = _section(options, measured)
    sys.stdout.write(section + "\n")
    if options.write:
        write_section(RESULTS, "saving", section)


def measure(contenders: Callable[[], dict[str, Save]], num_rounds: int) -> dict[str, list[Times]]:
    """Save in turn with each contender, over and over; what is first is warming up, and does not count."""
    saves = list(contenders().items())
    measured: dict[str, list[Times]] = {name: [] for name, _ in saves}
    for turn in range(num_rounds + 1):
        # What one has written is still on its way when the next begins: each follows each.
        saves = [*saves[1:], saves[0]]
        for name, save in saves:
            with _shared_folder() as folder:
                os.sync()
                dist.barrier()
                own = save(folder)
                slowest = Times(*(max(values) for values in zip(*gather_json(own), strict=True)))
            if turn > 0:
                measured[name].append(slowest)
    return measured


def replicated_contenders() -> dict[str, Save]:
    """Those that save a model under DDP, and what the machine itself can do."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _step(DistributedDataParallel(model), optimizer)
    state = get_state_dict(model, optimizer)
    share = torch.cat([piece.view.flatten() for piece in _pieces(model, optimizer)]).chunk(NUM_RANKS)[dist.get_rank()]
    # Without a GPU there is no pinned memory. A stager that is kept uses its memory again.
    stager = DefaultStager(StagingOptions(False, False, False, False))
    return {
        COPY: _copier(share),
        WRITE: _raw_writer(share),
        OURS_DDP: _ours(lambda: _pieces(model, optimizer)),
        DCP: lambda folder: _dcp(folder, state, None),
        DCP_CACHED: lambda folder: _dcp(folder, state, stager),
    }


def zero_contenders() -> dict[str, Save]:
    """Those that save a model under ZeRO-2."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    engine.backward(engine(input_ids=_tokens(), labels=_tokens()).loss)
    engine.step()

    def trainer_with_deepspeed(folder: Path) -> Times:
        # What transformers' `_save_checkpoint` does: the model as a Hub folder, and DeepSpeed's own files.
        begin = time.perf_counter()
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        engine.save_checkpoint(str(folder))
        dist.barrier()
        return _both(begin)

    return {OURS_ZERO: _ours(lambda: list(pieces_zero.list_pieces(model, engine))), DEEPSPEED: trainer_with_deepspeed}


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(input_ids=_tokens(), labels=_tokens()).loss.backward()
    optimizer.step()


def _tokens() -> torch.Tensor:
    return torch.arange(16).view(1, 16)


def _pieces(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Piece]:
    return list(pieces_replicated.list_pieces(model, optimizer))


def _both(begin: float) -> Times:
    seconds = time.perf_counter() - begin
    return Times(seconds, seconds)


def _copier(share: torch.Tensor) -> Save:
    """One rank's share, into memory that is there."""
    memory = torch.zeros_like(share)

    def copy(folder: Path) -> Times:
        begin = time.perf_counter()
        memory.copy_(share)
        return _both(begin)

    return copy


def _raw_writer(share: torch.Tensor) -> Save:
    """One rank's share, from memory, with no format at all; on the disk when it ends."""

    def write(folder: Path) -> Times:
        begin = time.perf_counter()
        with (folder / f"raw-{dist.get_rank()}").open("wb", buffering=0) as file:
            data = share.numpy().view("uint8").data
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        return _both(begin)

    return write


def _ours(pieces: Callable[[], list[Piece]]) -> Save:
    saver = Saver()

    def save(folder: Path) -> Times:
        saver.save(
            folder,
            step=1,
            pieces=pieces(),
            state={},
            write_model_files=lambda path: None,
            keep=None,
            begin_seconds=time.monotonic(),
        )
        saver.wait()
        report = saver.take_report()
        assert report is not None
        return Times(report.stall_seconds, report.total_seconds)

    return save


def _dcp(folder: Path, state: Any, stager: DefaultStager | None) -> Times:
    begin = time.perf_counter()
    writer = dcp.FileSystemWriter(folder)
    values = {"model": state[0], "optimizer": state[1]}
    future: Any = dcp.async_save(values, storage_writer=writer, async_stager=stager)
    stall = time.perf_counter() - begin
    future.result()
    return Times(stall, time.perf_counter() - begin)


@contextmanager
def _shared_folder() -> Iterator[Path]:
    names = gather_json(tempfile.mkdtemp(prefix="saving-") if dist.get_rank() == 0 else None)
    yield Path(names[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(names[0])


def _section(options: argparse.Namespace, measured: dict[str, list[Times]]) -> str:
    medians = {
        name: Times(*(statistics.median(values) for values in zip(*times, strict=True)))
        for name, times in measured.items()
    }
    best, raw = medians[DCP_CACHED], medians[WRITE]
    rows = [
        [
            name,
            f"{times.stall:.3f}",
            f"{times.stall / medians[COPY].stall:.2f}",
            f"{times.stall / best.stall:.2f}",
            f"{times.total:.2f}",
            f"{times.total / raw.total:.2f}",
            f"{times.total / best.total:.2f}",
        ]
        for name, times in medians.items()
    ]
    header = ["saver", "stall s", "x copy", "x DCP", "total s", "x write", "x DCP"]
    num_parameters = sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**SIZES)).parameters())
    return (
        "## Saving a checkpoint\n\n"
        f"A Llama of {num_parameters / 1e6:.0f} M parameters with AdamW's moments in float32, "
        f"{12 * num_parameters / 1e6:.0f} MB in all, {NUM_RANKS} ranks. Stall: for how long the training stands still, "
        "the plan and what ranks tell each other included; of DCP the call of `async_save` alone, with a state dict "
        "that is there. Total: until all is on the disk (`fsync`), nothing else going on; hfdist's includes hashes of "
        "all bytes. A copy and a write are of one rank's half, without any format. The slowest rank counts. Medians of "
        f"{options.rounds} interleaved rounds after one to warm up; x DCP: the one that keeps its memory.\n\n"
        f"{describe_machine('torch', 'deepspeed', 'transformers')}; {datetime.datetime.now(datetime.UTC):%Y-%m-%d}; "
        f"`{' '.join(['python -m benchmarks.saving', *sys.argv[1:]])}`\n\n"
        f"{markdown(header, rows)}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="saves of each, interleaved")
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.name}")
    return parser.parse_args()


if __name__ == "__main__":
    main()
