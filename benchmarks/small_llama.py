"""A small Llama of random weights and tokens under `hfdist.Trainer`, in any layout: what several benchmarks train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, TrainingArguments

import hfdist


def make_trainer(
    folder: str,
    layout: dict[str, Any],
    sizes: dict[str, Any],
    *,
    batch: tuple[int, int],
    sequence_tokens: int,
    max_steps: int,
    callbacks: Sequence[TrainerCallback],
    **named: Any,
) -> hfdist.Trainer:
    """Make it on this rank; every rank has the same weights and tokens.

    Args:
        folder: for what the Trainer writes.
        layout: the keys of `strategy.*`.
        sizes: fields of the model's config; with a `model_type` it is not a Llama.
        batch: sequences of a global batch, and of a micro batch.
        sequence_tokens: of each sequence.
        max_steps: optimizer steps.
        callbacks: the benchmark's own.
        named: further arguments of the Trainer.
    """
    global_batch_size, micro_batch_size = batch
    strategy = hfdist.make_strategy(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        sequence_length=sequence_tokens,
        **layout,
    )
    fields: dict[str, Any] = strategy.training_arguments()
    arguments = TrainingArguments(
        folder,
        max_steps=max_steps,
        logging_steps=10_000,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **fields,
    )
    # Before the model is made, which ZeRO-3 shards at once.
    strategy.start()
    torch.manual_seed(0)
    tokens = torch.randint(sizes["vocab_size"], (global_batch_size * max_steps, sequence_tokens))
    return hfdist.Trainer(
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**{"model_type": "llama"} | sizes)),
        arguments,
        strategy=strategy,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=list(callbacks),
        **named,
    )
