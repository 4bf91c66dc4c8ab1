"""One run of the Trainer on a rank: what its steps, its start, its memory, its messages and its checkpoint cost."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import hfdist
from benchmarks.growth.traffic import socket_bytes
from benchmarks.small_llama import make_trainer
from hfdist.collectives import gather_json
from hfdist.models.loss import LossHead
from hfdist.sent_bytes import SEND, SentBytes
from hfdist.trainer.run_options import RunOptions

_NUM_WARM_UP_STEPS, _NUM_COUNTED_STEPS = 2, 1
_LARGEST_SMALL = 100_000
"""Elements: `stage3_param_persistence_threshold`."""
_SAMPLED_EVERY_SECONDS = 0.003
_AXES = ("tensor", "context", "expert", "pipeline", "replicate", "sharded", "sharded_experts", "tokens_of_experts",
         "tokens", "data")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run trains, and in which layout."""

    layout: dict[str, Any]
    """The keys of `strategy.*`."""
    sizes: dict[str, Any]
    """Fields of the model's config; with a `model_type` it is not a Llama."""
    global_batch_size: int
    sequence_tokens: int
    num_steps: int
    """Number of steps that are timed."""
    micro_batch_size: int | None = None
    """Sequences; None: all of a rank at once, or 1 in a pipeline."""
    loss_head: LossHead | None = None
    """None: the model computes its loss, from whole logits."""
    optimizer: tuple[Any, dict[str, Any]] | None = None
    """Its class and settings; None: the Trainer's own, AdamW."""
    saves: bool = False
    """Whether a checkpoint is written at the end: first one to warm up, then the one that counts."""


@dataclass(kw_only=True)
class Costs:
    """Costs of one rank."""

    num_parameters: int = 0
    """Parameters of the whole model."""
    num_small_parameters: int = 0
    """Parameters in tensors that ZeRO-3 keeps whole unless told otherwise."""
    step_cpu_seconds: float = 0.0
    """CPU seconds of all threads in the median step."""
    start_cpu_seconds: float = 0.0
    """CPU seconds from before the model is made to the end of the first step, without those of a later step."""
    axis_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    """Bytes that are sent in a step, by axis of the mesh and kind of collective, each as a ring. Other groups stand by
    their ranks."""
    sent_bytes: int = 0
    """Bytes that are sent in a step, as the sockets count them."""
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    """Bytes of the optimizer's state, master weights included."""
    peak_bytes: int = 0
    """Bytes of the largest heap in a step, above the heap before the model was made."""
    checkpoint_bytes: int = 0
    """Bytes of the checkpoint, of all ranks together."""
    checkpoint_seconds: float = 0.0
    checkpoint_cpu_seconds: float = 0.0
    checkpoint_stall_seconds: float = 0.0

    @property
    def ring_bytes(self) -> int:
        """Bytes that are sent in a step, over all axes."""
        return sum(self.axis_bytes.values())


def train(work: Work) -> Costs:
    """Run it on this rank."""
    # As recipes do: looking for garbage among what was imported takes as long as a step, and comes when it likes.
    gc.freeze()
    costs, begin = Costs(), time.process_time()
    before_bytes = heap_bytes()
    with _shared_folder() as folder:
        trainer, clock = _make_trainer(work, folder)
        trainer.train()
        if work.saves:
            _save_twice(trainer, costs)
    steps = clock.cpu_seconds[_NUM_WARM_UP_STEPS:][: work.num_steps]
    sizes = [getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters()]
    costs.num_parameters = sum(sizes)
    costs.num_small_parameters = sum(size for size in sizes if size <= _LARGEST_SMALL)
    costs.step_cpu_seconds = statistics.median(steps)
    costs.start_cpu_seconds = clock.first_end - begin - costs.step_cpu_seconds
    names = _axes_of_groups(trainer.strategy)
    for (ranks, kind), sent in clock.collectives.num_bytes.items():
        # A message of a pipeline of more than two stages is not of all its ranks.
        key = names.get(ranks, "pipeline" if kind == SEND else str(ranks)), kind
        # One that is between two others sends to both.
        costs.axis_bytes[key] = costs.axis_bytes.get(key, 0) + sent // _NUM_COUNTED_STEPS
    costs.sent_bytes = clock.sent_bytes // _NUM_COUNTED_STEPS
    costs.peak_bytes = clock.peak_bytes - before_bytes
    costs.gradient_bytes = clock.gradient_bytes
    costs.weight_bytes = sum(_held_bytes(parameter) for parameter in trainer.model.parameters())
    costs.optimizer_bytes = _optimizer_bytes(trainer)
    return costs


class _Clock(TrainerCallback):
    """Times steps; in those that follow, counts messages and samples memory, which would slow down the others."""

    def __init__(self, num_timed_steps: int) -> None:
        self.cpu_seconds: list[float] = []
        self.first_end = 0.0
        self.collectives = SentBytes()
        self.sent_bytes = 0
        self.peak_bytes = 0
        self.gradient_bytes = 0
        self._first_counted = _NUM_WARM_UP_STEPS + num_timed_steps
        self._is_counting = threading.Event()
        self._begin = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Called by the Trainer."""
        if state.global_step == self._first_counted:
            # What a rank sends late is of the step that it belongs to.
            if dist.is_initialized():
                dist.barrier()
            self.sent_bytes = -socket_bytes()
            self._is_counting.set()
            threading.Thread(target=self._sample, daemon=True).start()
            self.collectives.__enter__()
        self._begin = time.process_time()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Called by the Trainer."""
        gradients = (p.grad for p in named["model"].parameters() if p.grad is not None)
        self.gradient_bytes = sum(_local(gradient).nbytes for gradient in gradients)

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Called by the Trainer."""
        now = time.process_time()
        self.cpu_seconds.append(now - self._begin)
        self.first_end = self.first_end or now
        if state.global_step == state.max_steps:
            self.collectives.__exit__(None, None, None)
            self._is_counting.clear()
            self.sent_bytes += socket_bytes()
            # A rank that ends closes its peers' sockets, and with a socket goes its count.
            if dist.is_initialized():
                dist.barrier()

    def _sample(self) -> None:
        while self._is_counting.is_set():
            self.peak_bytes = max(self.peak_bytes, heap_bytes())
            time.sleep(_SAMPLED_EVERY_SECONDS)


def _make_trainer(work: Work, folder: str) -> tuple[hfdist.Trainer, _Clock]:
    # Pipelines cut a step into micro batches, the others take a rank's share at once.
    data_size = _world_size() // work.layout.get("pipeline", 1)
    own_size = 1 if "pipeline" in work.layout else work.global_batch_size // data_size
    clock = _Clock(work.num_steps)
    trainer = make_trainer(
        folder,
        work.layout,
        work.sizes,
        batch=(work.global_batch_size, work.micro_batch_size or own_size),
        sequence_tokens=work.sequence_tokens,
        max_steps=_NUM_WARM_UP_STEPS + work.num_steps + _NUM_COUNTED_STEPS,
        callbacks=[clock],
        options=RunOptions(loss_head=work.loss_head),
        optimizer_cls_and_kwargs=work.optimizer,
    )
    return trainer, clock


def _axes_of_groups(strategy: Any) -> dict[tuple[int, ...], str]:
    """The ranks of the mesh's groups, and the axis of each; the first one where axes have the same ranks."""
    names: dict[tuple[int, ...], str] = {}
    # Elsewhere there is none, and making it is a collective.
    for axis in _AXES if "mesh" in vars(strategy) else ():
        with suppress(KeyError):
            names.setdefault(tuple(dist.get_process_group_ranks(strategy.mesh.get_group(axis))), axis)
    return names


def _save_twice(trainer: Any, costs: Costs) -> None:
    for _ in range(2):
        os.sync()
        if dist.is_initialized():
            dist.barrier()
        begin = time.process_time()
        trainer.checkpointer.save()
        trainer.checkpointer.saver.wait()
        costs.checkpoint_cpu_seconds = time.process_time() - begin
        (report,) = trainer.checkpointer.saver.take_reports()
        costs.checkpoint_bytes, costs.checkpoint_seconds = report.num_bytes, report.total_seconds
        costs.checkpoint_stall_seconds = report.stall_seconds
        trainer.state.global_step += 1


def _held_bytes(parameter: Any) -> int:
    """What of a parameter is on this rank between steps; ZeRO-3 keeps small ones whole beside their shares."""
    share = getattr(parameter, "ds_tensor", None)
    return int(_local(parameter).nbytes + (0 if share is None else share.nbytes))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _optimizer_bytes(trainer: Any) -> int:
    """Moments, and master weights: what the optimizer steps and the model does not hold."""
    optimizer = trainer.optimizer
    masters: list[torch.Tensor] = []
    while hasattr(optimizer, "optimizer"):
        # ZeRO-3 gives its masters to the optimizer for the time of a step only.
        masters = getattr(optimizer, "fp32_partitioned_groups_flat", masters)
        optimizer = optimizer.optimizer
    of_model = {_local(parameter).untyped_storage().data_ptr() for parameter in trainer.model.parameters()}
    stepped = [_local(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    masters = masters or [p for p in stepped if p.numel() and p.untyped_storage().data_ptr() not in of_model]
    values = (value for state in optimizer.state.values() for value in state.values())
    moments = [_local(value) for value in values if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in [*masters, *moments])


def heap_bytes() -> int:
    """What is allocated by C and C++, tensors above all: resident pages would count those of the imports, too."""
    info = _mallinfo2()
    return int(info.hblkhd + info.uordblks)


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


_mallinfo2 = ctypes.CDLL(None).mallinfo2
_mallinfo2.restype = _MallInfo


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def _shared_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as own:
        yield gather_json(own)[0]
        if dist.is_initialized():
            dist.barrier()
