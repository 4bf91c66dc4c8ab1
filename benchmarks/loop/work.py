"""What all loops train: one nano Llama on the batches of one stream, with one optimizer and one schedule."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, get_linear_schedule_with_warmup

from hfdist.data.packing.sequence import IGNORED

MICRO_BATCH_SIZE = 2
SEQUENCE_LENGTH = 32
LEARNING_RATE, WEIGHT_DECAY, BETAS, EPS = 1e-3, 0.1, (0.9, 0.95), 1e-8
NUM_WARMUP_STEPS = 10
MAX_GRAD_NORM = 1.0
LOG_EVERY = 10
"""Steps between readings of the loss."""
MODEL, BATCHES, WORK = "model", "batches.safetensors", "work.json"


@dataclass(frozen=True, kw_only=True)
class Work:
    """A training that stops after every burst of steps, until it is told to go on."""

    folder: str
    """Holds `MODEL` and `BATCHES`."""
    accumulation: int
    steps_per_burst: int
    num_bursts: int

    @property
    def num_steps(self) -> int:
        """Steps of all bursts together."""
        return self.num_bursts * self.steps_per_burst

    def write(self) -> None:
        """Leave it in its folder, for a process that is started there."""
        (Path(self.folder) / WORK).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: str) -> Work:
        """What `write` has left."""
        return cls(**json.loads((Path(folder) / WORK).read_text()))

    def model(self) -> LlamaForCausalLM:
        """With the same weights for all."""
        model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(Path(self.folder) / MODEL, dtype=torch.float32)
        # As the Trainers do; with a cache, packed documents would see each other.
        model.config.use_cache = False
        return model

    def batches(self, gate: Gate, *, counted: bool) -> Iterator[dict[str, torch.Tensor]]:
        """Micro batches, each of [MICRO_BATCH_SIZE, SEQUENCE_LENGTH], from memory.

        Args:
            gate: told when a step begins.
            counted: with the number of targets of the step, which a loop without means to count them gives the model.
        """
        columns = load_file(Path(self.folder) / BATCHES)
        if counted:
            counts = (columns["labels"][..., 1:] != IGNORED).sum(dim=(1, 2)).view(-1, self.accumulation).sum(dim=1)
            columns["num_items_in_batch"] = counts.repeat_interleave(self.accumulation)
        for number in range(self.num_steps * self.accumulation):
            if number % self.accumulation == 0:
                gate.step_begins()
            yield {name: values[number] for name, values in columns.items()}


class Gate:
    """Lets a process train one burst of steps at a time, and tells what CPU time it took."""

    def __init__(self, connection: Connection, steps_per_burst: int) -> None:
        self._connection, self._steps_per_burst = connection, steps_per_burst
        self._num_steps = 0
        self._began_seconds = time.process_time()

    def step_begins(self) -> None:
        """Wait here if a burst has ended."""
        if self._num_steps % self._steps_per_burst == 0:
            self._connection.send_bytes(json.dumps(time.process_time() - self._began_seconds).encode())
            self._connection.recv_bytes()
            self._began_seconds = time.process_time()
        self._num_steps += 1

    def end(self, losses: list[float], version: str) -> None:
        """Tell what came of it: mean losses of each `LOG_EVERY` steps."""
        self._connection.send_bytes(json.dumps({"losses": losses, "version": version}).encode())


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW in one kernel, with weight decay on matrices only."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)


def make_schedule(optimizer: torch.optim.Optimizer, num_steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Up, and down to nothing."""
    return get_linear_schedule_with_warmup(optimizer, NUM_WARMUP_STEPS, num_steps)
