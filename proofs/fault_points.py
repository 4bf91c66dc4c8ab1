"""Named moments of a run, each found by what the process does then, so that a test can strike exactly there.

Nothing of the run is replaced: functions of torch and of the system are wrapped, and files are told by their names.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from enum import Enum
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hfdist.trainer.trainer import Trainer

SAVE_EVERY = 2
_UNFINISHED = re.compile(r"/checkpoints/step-(\d+)\.tmp-[0-9a-f]+(?:/(.+))?$")
_EXPORT = re.compile(r"/model/\.hfdist-export-[0-9a-f]+/(.+)$")
_GRADIENT_ELEMENTS = 1000
"""What is reduced besides gradients is a few numbers."""


class Place(Enum):
    """Of a moment in the run."""

    step = "in a step, on every rank"
    share = "in a save, on every rank"
    save = "in a save, on rank 0"
    end = "at the end, on every rank"
    export = "at the end, on rank 0"


class Moment(Enum):
    """In the order of a run."""

    first_batch = "the first batch is read", Place.step
    forward = "forward, in a block", Place.step
    backward = "backward, after a block", Place.step
    reduction = "reduction, as a rank joins it", Place.step
    before_step = "before the optimizer's step", Place.step
    after_step = "after the optimizer's step", Place.step
    evaluation = "evaluation", Place.share
    snapshot = "snapshot, half of it", Place.share
    first_file = "save: its first file", Place.save
    state = "save: the training state", Place.save
    weights = "save: half of a weight", Place.share
    optimizer = "save: half of an optimizer's tensor", Place.share
    sync = "save: a file is synced", Place.save
    before_manifest = "before the manifest", Place.save
    after_manifest = "after the manifest, before the rename", Place.save
    rename = "after the rename, before it is synced", Place.save
    prune = "prune, half removed", Place.save
    export = "export: half of a weight", Place.end
    export_moves = "export: one file in its place", Place.export
    shutdown = "all is done", Place.end

    def __init__(self, title: str, place: Place) -> None:
        self.title = title
        self.place = place


class Watch:
    """Strikes once, at a moment of a step.

    Args:
        moment: when.
        step: the optimizer step that is done or saved then.
        strike: what to do; the process may live on.
    """

    def __init__(self, moment: Moment, step: int, strike: Callable[[], object]) -> None:
        self._moment, self._step, self._strike = moment, step, strike
        self._has_struck = False
        self._current_step = 0
        self._renamed_step = 0
        self._removed_step = 0
        self._num_removed = 0
        self._num_moved = 0
        self._watch_steps()
        self._watch_optimizers()
        self._watch_snapshot()
        self._watch_files()

    def reach(self, moment: Moment, step: int | None = None) -> None:
        """Strike if this is the moment; without `step` it is that of the batch that was read last."""
        is_then = moment.place in (Place.end, Place.export) or (step or self._current_step) == self._step
        if moment is self._moment and is_then and not self._has_struck:
            self._has_struck = True
            self._strike()

    def _before(self, holder: Any, name: str, look: Callable[..., object]) -> None:
        """Call `look` with the same arguments before each call of a function."""
        real = getattr(holder, name)

        @wraps(real)
        def call(*values: Any, **named: Any) -> Any:
            look(*values, **named)
            return real(*values, **named)

        setattr(holder, name, call)

    def _watch_steps(self) -> None:
        read, forward = Trainer.get_batch_samples, LlamaDecoderLayer.forward

        def get_batch_samples(trainer: Any, *values: Any) -> Any:
            batches = read(trainer, *values)
            self._current_step = trainer.state.global_step + 1
            self.reach(Moment.first_batch)
            return batches

        def run_block(*values: Any, **named: Any) -> torch.Tensor:
            self.reach(Moment.forward)
            output = forward(*values, **named)
            if output.requires_grad:
                output.register_hook(lambda gradient: self.reach(Moment.backward))
            return output

        Trainer.get_batch_samples, LlamaDecoderLayer.forward = get_batch_samples, run_block

    def _watch_optimizers(self) -> None:
        register_optimizer_step_pre_hook(lambda *values: self.reach(Moment.before_step))
        register_optimizer_step_post_hook(lambda *values: self.reach(Moment.after_step))
        for name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"):
            self._before(dist, name, self._see_reduction)
        if self._moment is not Moment.reduction:
            return
        wrap = DistributedDataParallel.__init__

        def init(model: DistributedDataParallel, *values: Any, **named: Any) -> None:
            wrap(model, *values, **named)
            # DDP reduces in C++: this is the way in that it offers, and computes the same.
            model.register_comm_hook(None, lambda group, bucket: self._reduce(group, bucket))

        DistributedDataParallel.__init__ = init

    def _reduce(self, group: Any, bucket: Any) -> Any:
        self._see_reduction(bucket.buffer())
        return allreduce_hook(group, bucket)

    def _see_reduction(self, *values: Any, **named: Any) -> None:
        tensors = [value for value in (*values, *named.values()) if isinstance(value, torch.Tensor)]
        if any(tensor.numel() >= _GRADIENT_ELEMENTS for tensor in tensors):
            self.reach(Moment.reduction)

    def _watch_snapshot(self) -> None:
        def see_save(trainer: Any, *more: Any, **named: Any) -> None:
            engine, step = trainer.engine, trainer.state.global_step
            every = type(engine).pieces

            def pieces() -> Any:
                listed = list(every(engine))
                for number, piece in enumerate(listed):
                    if number == len(listed) // 2:
                        self.reach(Moment.snapshot, step)
                    yield piece

            engine.pieces = pieces

        self._before(Trainer, "_save_checkpoint", see_save)
        self._before(Trainer, "evaluation_loop", lambda *values, **named: self.reach(Moment.evaluation))

    def _watch_files(self) -> None:
        pwrite = os.pwrite

        def write_in_halves(descriptor: int, data: Any, offset: int) -> int:
            moment, step = _moment_of_write(_path_of(descriptor))
            if moment is not None:
                pwrite(descriptor, data[: len(data) // 2], offset)
                self.reach(moment, step)
            return pwrite(descriptor, data, offset)

        os.pwrite = write_in_halves
        self._before(os, "fsync", self._see_sync)
        sys.addaudithook(self._see_event)

    def _see_sync(self, descriptor: int) -> None:
        path = _path_of(descriptor)
        if match := _UNFINISHED.search(path):
            if match[2]:
                self.reach(Moment.sync, int(match[1]))
        elif path.endswith("/checkpoints") and self._renamed_step:
            self.reach(Moment.rename, self._renamed_step)

    def _see_event(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            self._see_open(str(values[0]))
        elif event == "os.rename":
            self._see_rename(str(values[0]), str(values[1]))
        elif event == "shutil.rmtree":
            match = _UNFINISHED.search(str(values[0]))
            self._removed_step, self._num_removed = int(match[1]) if match else 0, 0
        elif event == "os.remove" and self._removed_step:
            self._num_removed += 1
            if self._num_removed == 3:
                self.reach(Moment.prune, self._removed_step + SAVE_EVERY)

    def _see_open(self, path: str) -> None:
        match = _UNFINISHED.search(path)
        if match is None:
            return
        step, name = int(match[1]), match[2] or ""
        self.reach(Moment.first_file, step)
        if name.endswith("state.json"):
            self.reach(Moment.state, step)
        if name.startswith("manifest.json"):
            self.reach(Moment.before_manifest, step)

    def _see_rename(self, source: str, target: str) -> None:
        if (match := _UNFINISHED.search(source)) and not match[2]:
            self.reach(Moment.after_manifest, int(match[1]))
            self._renamed_step = int(match[1])
        elif _EXPORT.search(source):
            self._num_moved += 1
            if self._num_moved > 1:
                self.reach(Moment.export_moves)


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _moment_of_write(path: str) -> tuple[Moment | None, int | None]:
    if match := _UNFINISHED.search(path):
        name = match[2] or ""
        return (Moment.optimizer if "optimizer" in name else Moment.weights), int(match[1])
    return (Moment.export, None) if _EXPORT.search(path) else (None, None)
