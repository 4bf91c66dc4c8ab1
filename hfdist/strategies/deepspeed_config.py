"""DeepSpeed's config, generated from ours: every number written out, never "auto"."""

from __future__ import annotations

import sys
from typing import Any

import torch

from hfdist.config.batch import BatchPlan
from hfdist.config.strategy import Offload, Sharding, StrategyConfig
from hfdist.config.train import Precision, TrainConfig
from hfdist.strategies.deepspeed_schema import check_extra_keys

STAGE = {Sharding.zero1: 1, Sharding.zero2: 2, Sharding.zero3: 3}


def generate(strategy: StrategyConfig, train: TrainConfig, batch: BatchPlan) -> dict[str, Any]:
    """Give the dict that `deepspeed.initialize` reads, with `strategy.deepspeed` merged over it.

    Raises:
        ConfigError: a key of `strategy.deepspeed` that DeepSpeed does not know or that hfdist sets itself.
    """
    check_extra_keys(strategy.deepspeed)
    return _merge(_generated(strategy, train, batch), strategy.deepspeed)


def _generated(strategy: StrategyConfig, train: TrainConfig, batch: BatchPlan) -> dict[str, Any]:
    return {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.num_microbatches,
        "gradient_clipping": train.max_grad_norm,
        "zero_optimization": _zero_section(strategy),
        "bf16": {"enabled": train.precision is Precision.bf16},
        "fp16": {"enabled": train.precision is Precision.fp16},
        # Gradients of many micro batches are summed in float32 whatever the arithmetic's type.
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        # With offload DeepSpeed insists on its own CPU Adam, which it compiles for a minute at first use;
        # torch's fused AdamW runs on the CPU too.
        "zero_force_ds_cpu_optimizer": False,
        # Its own progress lines are off: the run has a progress bar and metrics.jsonl.
        "steps_per_print": sys.maxsize,
        "wall_clock_breakdown": False,
    }


def _zero_section(strategy: StrategyConfig) -> dict[str, Any]:
    stage = STAGE[strategy.sharding]
    section: dict[str, Any] = {
        "stage": stage,
        # Buckets of 50M elements: as fast as DeepSpeed's 500M on one node, at a tenth of the memory.
        "reduce_bucket_size": 50_000_000,
        "allgather_bucket_size": 50_000_000,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if stage < 3:
        # Each gradient to the rank that steps it: an all-reduce, DeepSpeed's default, sends it twice as far. On a GPU
        # DeepSpeed waits for the device before each such reduction, which costs more than fast links take.
        section["use_multi_rank_bucket_allreduce"] = torch.cuda.is_available()
    if stage == 3:
        section |= {
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 100_000,
            # Saving never gathers: each rank writes what it holds.
            "stage3_gather_16bit_weights_on_model_save": False,
        }
    if strategy.offload is Offload.cpu:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return section


def _merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in extra.items():
        inner = merged.get(key)
        merged[key] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
