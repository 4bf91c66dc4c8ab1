"""Trainers of tiny models on uneven data, and tests whose body runs on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

import hfdist
from hfdist.config.strategy import Sharding
from hfdist.models.initialize import initialize_by_name
from hfdist.models.partitioning import Partitioning
from hfdist.testing import run_ranks

LENGTH, GLOBAL_BATCH, STEPS = 16, 8, 4
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 64}  # fmt: skip


def on_ranks(num_ranks: int, group: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on so many forked ranks: each makes all of its checks, and the first that fails is told."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(**fixtures: object) -> None:
            run_ranks(lambda: test(**fixtures), num_ranks, group=group)

        return run

    return decorate


def uneven_items(num_items=GLOBAL_BATCH * STEPS):
    """Sequences of which very different shares are targets."""
    generator = torch.Generator().manual_seed(0)
    items = []
    for number in range(num_items):
        ids = torch.randint(0, 64, (LENGTH,), generator=generator)
        items.append({"input_ids": ids, "labels": torch.where(torch.arange(LENGTH) < number * 5 % LENGTH, -100, ids)})
    return items


class NoLossKwargs(nn.Module):
    """A model of the older kind: its forward takes no further arguments and averages over its own batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.config = AutoConfig.for_model("llama", **TINY)

    def forward(self, input_ids=None, labels=None):
        logits = self.head(self.embedding(input_ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
                "logits": logits}  # fmt: skip


def make_model():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))
    initialize_by_name(model, 0, make_strategy(Sharding.zero3) if is_deepspeed_zero3_enabled() else Partitioning())
    return model


def make_strategy(sharding=Sharding.none, micro_batch_size=1, **layout):
    sizes = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": micro_batch_size, "sequence_length": LENGTH}
    return hfdist.make_strategy(sharding=sharding, **sizes, **layout)


def make_arguments(folder, strategy=None, **more):
    fields = {"per_device_train_batch_size": 1, "max_steps": STEPS, "learning_rate": 1e-2, "logging_steps": 1,
              "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}  # fmt: skip
    arguments = TrainingArguments(str(folder), **fields | (strategy.training_arguments() if strategy else {}) | more)
    if strategy is not None:
        strategy.start()
    return arguments


def make_trainer(folder, strategy=None, *, kind=hfdist.Trainer, model: Any = make_model, arguments=None, **named):
    """A Trainer on uneven items; `model`: what makes it once ZeRO-3 may partition it, or a model."""
    strategy = strategy or make_strategy()
    args = make_arguments(folder, strategy, **arguments or {})
    items = uneven_items()
    named = {"train_dataset": items, "eval_dataset": items[:6]} | named
    return kind(model if isinstance(model, nn.Module) else model(), args, strategy=strategy, **named)


def history(trainer):
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
