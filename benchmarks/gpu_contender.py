"""One contender of `benchmarks.gpu`, in a process of its own: `python -m benchmarks.gpu_contender NAME SHAPE OUT`."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import hfdist
from hfdist.config.composition.compose import compose_config
from hfdist.models.blocks import compile_blocks, compiles_blocks
from hfdist.models.flops import flops_per_token, measure_size, peak_flops
from hfdist.models.loss import choose_loss
from hfdist.models.recompute import checkpoint_blocks
from hfdist.trainer.run_options import RunOptions

OURS = "hfdist"


class Shape(NamedTuple):
    """The model and the run."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    vocabulary: int
    sequence_tokens: int
    sequences: int
    """In a step."""
    warm_up_steps: int
    steps: int
    steps_of_a_mean: int

    def describe(self) -> str:
        """In words."""
        return (
            f"A Llama of {self.num_layers} blocks of width {self.hidden_size:,}, a tied vocabulary of "
            f"{self.vocabulary:,}, {self.sequences} sequences of {self.sequence_tokens:,} tokens a step, AdamW"
        )


SIZES = Shape(2048, 8192, 16, 32, 8, 128_256, 4096, 4, 5, 20, 5)
QUICK = Shape(64, 128, 2, 4, 2, 512, 64, 2, 1, 2, 1)

# For hfdist overrides of its config, for the HF Trainer fields of its arguments.
CONTENDERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        OURS: {},
        "HF Trainer": {},
        "HF Trainer, liger": {"use_liger_kernel": True},
        "HF Trainer, torch_compile": {"torch_compile": True},
        "hfdist, compile=none": {"train.compile": "none"},
        "hfdist, loss=full": {"model.loss": "full"},
        "hfdist, fused=false": {"optimizer.fused": "false"},
        "hfdist, recompute=cheap": {"train.gradient_checkpointing": "true", "train.recompute": "cheap"},
        "hfdist, recompute=all": {"train.gradient_checkpointing": "true"},
    }
)


class Clock(TrainerCallback):
    """Times the steps after warming up as a whole; nothing is waited for in between."""

    def __init__(self, warm_up_steps: int, last_step: int) -> None:
        self._warm_up_steps = warm_up_steps
        self._last_step = last_step
        self._begin = self.seconds = 0.0
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer."""
        if state.global_step in (self._warm_up_steps, self._last_step):
            now = _now()
            self.seconds, self._begin = now - self._begin, now

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Called by the Trainer."""
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def train(name: str, shape: Shape) -> dict[str, Any]:
    """Train as the contender does, and give its figures."""
    is_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    model = LlamaForCausalLM(_config(shape))
    num_steps = shape.warm_up_steps + shape.steps
    tokens = torch.randint(shape.vocabulary, (shape.sequences * num_steps, shape.sequence_tokens))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    clock = Clock(shape.warm_up_steps, num_steps)
    with tempfile.TemporaryDirectory() as folder:
        fields: dict[str, Any] = {
            "output_dir": folder,
            "max_steps": num_steps,
            "per_device_train_batch_size": shape.sequences,
            "bf16": is_gpu,
            "use_cpu": not is_gpu,
            "logging_steps": shape.steps_of_a_mean,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        make = _hfdist if name.startswith(OURS) else _transformers
        trainer = make(model, fields, shape, CONTENDERS[name], train_dataset=rows, callbacks=[clock])
        trainer.train()
    flops = flops_per_token(model.config, measure_size(model), shape.sequence_tokens)
    tokens_per_second = shape.steps * shape.sequences * shape.sequence_tokens / clock.seconds
    peak = peak_flops(torch.device("cuda" if is_gpu else "cpu"))
    return {
        "tokens_per_second": tokens_per_second,
        "flops_per_second": flops * tokens_per_second,
        "mfu": None if peak is None else flops * tokens_per_second / peak,
        "peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else 0,
        "losses": clock.losses,
    }


def _config(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_heads,
        max_position_embeddings=shape.sequence_tokens,
        tie_word_embeddings=True,
        use_cache=False,
    )


def _transformers(
    model: LlamaForCausalLM, fields: dict[str, Any], shape: Shape, more: Mapping[str, Any], **given: Any
) -> transformers.Trainer:
    return transformers.Trainer(model, TrainingArguments(**fields, **more), **given)


def _hfdist(
    model: LlamaForCausalLM, fields: dict[str, Any], shape: Shape, more: Mapping[str, Any], **given: Any
) -> Any:
    """What a recipe does between its config and its Trainer, on tokens that are given."""
    overrides = [f"{key}={value}" for key, value in more.items()]
    precision = "bf16" if fields["bf16"] else "fp32"
    config = compose_config(["strategy=single", f"train.precision={precision}", *overrides])
    strategy = hfdist.make_strategy(global_batch_size=shape.sequences, micro_batch_size=shape.sequences,
                                    sequence_length=shape.sequence_tokens, precision=precision)  # fmt: skip
    if compiles_blocks(config, model):
        compile_blocks(model)
    optimizer = "adamw_torch_fused" if config.optimizer.fused else "adamw_torch"
    is_selective = config.train.recompute.value == "cheap" and config.train.gradient_checkpointing
    whole = {"activation_checkpointing": config.train.gradient_checkpointing and not is_selective}
    arguments: Any = fields | strategy.training_arguments() | whole | {"optim": optimizer}
    options = RunOptions(loss_head=choose_loss(config, model, strategy))
    trainer = hfdist.Trainer(model, TrainingArguments(**arguments), strategy=strategy, options=options, **given)
    if is_selective:
        checkpoint_blocks(model, config.train.recompute)
    return trainer


def matrix_products() -> dict[str, Any]:
    """FLOP a second of large products, the best of several runs: what no model can exceed."""
    is_gpu = torch.cuda.is_available()
    size, dtype = (8192, torch.bfloat16) if is_gpu else (512, torch.float32)
    left, right = (torch.randn(size, size, device="cuda" if is_gpu else "cpu", dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        begin = _now()
        for _ in range(10):
            left @ right
        best = min(best, _now() - begin)
    return {"flops_per_second": 10 * 2 * size**3 / best}


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    name, shape, out = sys.argv[1:]
    Path(out).write_text(json.dumps(train(name, Shape(**json.loads(shape)))))
