"""The contenders of `benchmarks.checkpoint`: one model saved by hfdist, by its peers, and written without a format."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hfdist
from hfdist.checkpoint import Saver
from hfdist.checkpoint.piece import STEP, Piece
from hfdist.strategies import pieces

OURS, OURS_TRAINER = "hfdist", "hfdist Trainer"
DCP, DCP_CACHED = "torch DCP async", "torch DCP async, memory kept"
HF_TRAINER, DEEPSPEED, OURS_ZERO = "HF Trainer", "HF Trainer + DeepSpeed", "hfdist, zero2"
LIMIT_COPY, LIMIT_WRITE, LIMIT_WRITE_UNSYNCED = "copy in memory", "write and fsync", "write, not synced"

_SIZES: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
          "num_key_value_heads": 8, "tie_word_embeddings": False}  # fmt: skip
_NUM_LAYERS = 4
_QUICK_SIZES = _SIZES | {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384}


class Times(NamedTuple):
    """Times of one save."""

    stall_ms: float
    total_ms: float


Save = Callable[[Path], Times]


def sizes(quick: bool) -> float:
    """Weights and both moments, in MiB."""
    return 12 * sum(parameter.numel() for parameter in _model(quick).parameters()) / 2**20


def alone(quick: bool) -> dict[str, Save]:
    """All, in one process."""
    model = _model(quick)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _step(model, optimizer)
    state = get_state_dict(model, optimizer)
    return {
        **_limits(model, optimizer),
        OURS: _ours(lambda: _pieces(model, optimizer)),
        DCP_CACHED: _dcp_async(state, _kept_memory()),
        DCP: _dcp_async(state, None),
        OURS_TRAINER: _our_trainer(model),
        HF_TRAINER: _hf_trainer(model),
        DEEPSPEED: _deepspeed(_model(quick))[DEEPSPEED],
    }


def replicated(quick: bool) -> dict[str, Save]:
    """Those that save a model under DDP, and what the machine itself can do."""
    model = _model(quick)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _step(DistributedDataParallel(model), optimizer)
    return {
        **_limits(model, optimizer),
        OURS: _ours(lambda: _pieces(model, optimizer)),
        DCP_CACHED: _dcp_async(get_state_dict(model, optimizer), _kept_memory()),
    }


def sharded(quick: bool) -> dict[str, Save]:
    """Those that save a model under ZeRO-2."""
    return _deepspeed(_model(quick))


def _model(quick: bool) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**(_QUICK_SIZES if quick else _SIZES), num_hidden_layers=_NUM_LAYERS))


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(input_ids=_tokens(), labels=_tokens()).loss.backward()
    optimizer.step()


def _tokens() -> torch.Tensor:
    return torch.arange(16).view(1, 16)


def _pieces(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Piece]:
    return list(pieces.list_pieces(model, optimizer))


def _waits(write: Callable[[Path], object]) -> Save:
    """Training stands still until it is done."""

    def save(folder: Path) -> Times:
        begin = time.perf_counter()
        write(folder)
        return Times(*[1000 * (time.perf_counter() - begin)] * 2)

    return save


def _limits(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Save]:
    """Limits of a save: the share of this rank is copied in memory, or written as it is."""
    pieces = [piece.view.flatten() for piece in _pieces(model, optimizer) if piece.key != STEP]
    share = torch.cat(pieces).chunk(dist.get_world_size())[dist.get_rank()].clone()
    memory = torch.zeros_like(share)

    def write(folder: Path, *, syncs: bool) -> None:
        with (folder / f"raw-{dist.get_rank()}").open("wb", buffering=0) as file:
            data = share.numpy().view("uint8").data
            while data:
                data = data[file.write(data) :]
            if syncs:
                os.fsync(file.fileno())

    return {
        LIMIT_COPY: _waits(lambda folder: memory.copy_(share)),
        LIMIT_WRITE: _waits(lambda folder: write(folder, syncs=True)),
        LIMIT_WRITE_UNSYNCED: _waits(lambda folder: write(folder, syncs=False)),
    }


def _ours(pieces: Callable[[], list[Piece]]) -> Save:
    saver = Saver()

    def save(folder: Path) -> Times:
        # First, as a Trainer does: finding the pieces is part of the stall.
        begin_seconds = time.monotonic()
        saver.save(
            folder,
            step=1,
            pieces=pieces(),
            state={},
            keep=None,
            begin_seconds=begin_seconds,
        )
        return _wait(saver)

    return save


def _wait(saver: Saver) -> Times:
    saver.wait()
    (report,) = saver.take_reports()
    return Times(1000 * report.stall_seconds, 1000 * report.total_seconds)


def _kept_memory() -> DefaultStager:
    # Without a GPU there is no pinned memory. A stager that is kept uses its memory again.
    return DefaultStager(StagingOptions(False, False, False, False))


def _dcp_async(state: Any, stager: DefaultStager | None) -> Save:
    named = {"model": state[0], "optimizer": state[1]}

    def save(folder: Path) -> Times:
        begin = time.perf_counter()
        writer = dcp.FileSystemWriter(folder)
        future: Any = dcp.async_save(named, storage_writer=writer, async_stager=stager)
        stall = time.perf_counter() - begin
        future.result()
        return Times(1000 * stall, 1000 * (time.perf_counter() - begin))

    return save


def _arguments(folder: str, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        folder, max_steps=1, per_device_train_batch_size=1, use_cpu=True, disable_tqdm=True, report_to="none",
        logging_steps=1000, save_strategy="no", **more,
    )  # fmt: skip


def _dataset() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": _tokens()[0], "labels": _tokens()[0]}]


def _our_trainer(model: LlamaForCausalLM) -> Save:
    """All that a save of a run does, from the Trainer's own call on."""
    strategy = hfdist.make_strategy(global_batch_size=1, sequence_length=16)
    arguments = _arguments(tempfile.mkdtemp(prefix="trainer-"), **_without_sizes(strategy.training_arguments()))
    trainer = hfdist.Trainer(model, arguments, strategy=strategy, train_dataset=_dataset())
    trainer.train()

    def save(folder: Path) -> Times:
        shutil.rmtree(trainer.args.output_dir, ignore_errors=True)
        trainer.args.output_dir = str(folder)
        trainer.checkpointer.save()
        return _wait(trainer.checkpointer.saver)

    return save


def _without_sizes(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "per_device_train_batch_size"}


def _hf_trainer(model: LlamaForCausalLM) -> Save:
    trainer = Trainer(model, _arguments(tempfile.mkdtemp(prefix="trainer-")), train_dataset=_dataset())
    trainer.train()
    shutil.rmtree(trainer.args.output_dir, ignore_errors=True)

    def write(folder: Path) -> None:
        trainer.args.output_dir = str(folder)
        trainer._save_checkpoint(model, None)

    return _waits(write)


def _deepspeed(model: LlamaForCausalLM) -> dict[str, Save]:
    """ZeRO-2 saved by hfdist and by DeepSpeed's engine."""
    import deepspeed

    from hfdist.strategies.deepspeed import pieces_zero

    # Nothing here calls a compiled operator, and compiling takes a minute.
    deepspeed.ops.__compatible_ops__ = {}
    # Of a launcher, without which DeepSpeed does not start.
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    engine.backward(engine(input_ids=_tokens(), labels=_tokens()).loss)
    engine.step()

    def write(folder: Path) -> None:
        # What transformers' `_save_checkpoint` does: the model as a Hub folder, and DeepSpeed's own files.
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        engine.save_checkpoint(str(folder))
        dist.barrier()

    return {OURS_ZERO: _ours(lambda: list(pieces_zero.list_pieces(model, engine))), DEEPSPEED: _waits(write)}
