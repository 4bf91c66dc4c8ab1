"""DeepSpeed's config, generated from ours: every number written out, never "auto".

Further keys are checked against DeepSpeed's own schemas, which it consults only in part by itself.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from hfdist.config.batch import BatchPlan
from hfdist.config.checks.deepspeed import OPTIMIZER_SECTIONS, PLACE, own_keys
from hfdist.config.strategy import Offload, Sharding, StrategyConfig
from hfdist.config.train import Precision, TrainConfig
from hfdist.errors import ConfigError
from hfdist.strategies.deepspeed.buckets import BUCKET_ELEMENTS

# DeepSpeed has no schema for its top level: it picks keys by name and ignores the rest.
_TOP_LEVEL: dict[str, type] = {
    "communication_data_type": str,
    "prescale_gradients": bool,
    "gradient_predivide_factor": float,
    "disable_allgather": bool,
    "dump_state": bool,
    "memory_breakdown": bool,
    "wall_clock_breakdown": bool,
    "steps_per_print": int,
    "zero_allow_untested_optimizer": bool,
    "zero_force_ds_cpu_optimizer": bool,
}

QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
"""Keys of ZeRO++, whose kernels are of CUDA."""

STAGE = {Sharding.zero1: 1, Sharding.zero2: 2, Sharding.zero3: 3}
"""Number of each kind of sharding in DeepSpeed's words."""


def generate(strategy: StrategyConfig, train: TrainConfig, batch: BatchPlan, device_type: str) -> dict[str, Any]:
    """Give the dict that `deepspeed.initialize` reads, with `strategy.deepspeed` merged over it.

    Args:
        strategy: the layout.
        train: precision and clipping.
        batch: the batch of a step.
        device_type: `cpu` or `cuda`: where the run is to be.

    Raises:
        ConfigError: a key of `strategy.deepspeed` that DeepSpeed does not know, of which hfdist derives another
            value, or that needs a GPU.
    """
    generated = _generated(strategy, train, batch, device_type)
    _check_all_names(strategy.deepspeed, generated)
    extra = own_keys(strategy.deepspeed, generated)
    _check_extra_keys(extra, generated)
    _check_device(extra, device_type)
    return _merge(generated, _with_aliases(extra))


def _generated(strategy: StrategyConfig, train: TrainConfig, batch: BatchPlan, device_type: str) -> dict[str, object]:
    return {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.num_microbatches,
        "gradient_clipping": train.max_grad_norm,
        "zero_optimization": _zero_section(strategy, device_type),
        "bf16": {"enabled": train.precision is Precision.bf16},
        "fp16": {"enabled": train.precision is Precision.fp16},
        # Gradients of many micro batches are summed in float32 whatever the arithmetic's type.
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        # With offload DeepSpeed insists on its own CPU Adam, which it compiles for a minute at first use;
        # torch's fused AdamW runs on the CPU too.
        "zero_force_ds_cpu_optimizer": False,
        # No progress lines of DeepSpeed's: the run has a progress bar and metrics.jsonl.
        "steps_per_print": sys.maxsize,
        "wall_clock_breakdown": False,
    }


def _zero_section(strategy: StrategyConfig, device_type: str) -> dict[str, object]:
    stage = STAGE[strategy.sharding]
    section: dict[str, object] = {
        "stage": stage,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if stage < 3:
        # Each gradient to the rank that steps it: an all-reduce, DeepSpeed's default, sends it twice as far. On a GPU
        # DeepSpeed waits for the device before each such reduction, which costs more than fast links take.
        section["use_multi_rank_bucket_allreduce"] = device_type == "cuda"
    if stage == 3:
        section |= {
            "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
            "stage3_param_persistence_threshold": 100_000,
            # Saving never gathers: each rank writes what it holds.
            "stage3_gather_16bit_weights_on_model_save": False,
        }
    if strategy.offload is Offload.cpu:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return section


def _merge(base: Mapping[str, object], extra: Mapping[str, object]) -> dict[str, object]:
    merged = dict(base)
    for key, value in extra.items():
        inner = merged.get(key)
        merged[key] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _check_all_names(given: Mapping[str, object], generated: Mapping[str, object]) -> None:
    """Check the names of keys, also of those that are `auto`, which is left out later.

    Raises:
        ConfigError: names the full key, what is allowed and the nearest known key.
    """
    sections = _sections() if given else {}
    known = (*sections, *_TOP_LEVEL, *generated, *OPTIMIZER_SECTIONS)
    for key, value in given.items():
        if key not in known:
            raise _unknown(key, value, [*sections, *_TOP_LEVEL], "")
        if key in sections and isinstance(value, dict):
            _check_names(value, sections[key], f"{key}.")


def _check_extra_keys(extra: Mapping[str, object], generated: Mapping[str, object]) -> None:
    """Check types and ranges of what is merged over the generated config; ConfigError: one does not fit."""
    sections = _sections() if extra else {}
    for key, value in extra.items():
        ours = generated.get(key)
        if key in sections:
            _check_section(key, value, sections[key])
        elif isinstance(ours, dict) and isinstance(value, dict):
            # All keys that go there are derived.
            for name, inner in value.items():
                raise _unknown(name, inner, list(ours), f"{key}.")
        else:
            _check_scalar(key, value, _TOP_LEVEL.get(key) or type(ours))


def _check_device(extra: dict[str, Any], device_type: str) -> None:
    asked = [name for name in QUANTIZED if extra.get("zero_optimization", {}).get(name)]
    if asked and device_type != "cuda":
        what, where = "ZeRO++ quantizes on GPUs only", f"{PLACE}.zero_optimization.{asked[0]}"
        hint = "a GPU, or strategy=ddp with strategy.compression=bf16"
        raise ConfigError(what, where=where, found="True, on a CPU", allowed="False", hint=hint)


def _sections() -> dict[str, type[BaseModel]]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
    }


def _check_section(key: str, value: object, schema: type[BaseModel]) -> None:
    if not isinstance(value, dict):
        raise ConfigError("a section of keys is needed here", where=f"{PLACE}.{key}", found=value, allowed="a mapping")
    try:
        schema.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(first["msg"], where=f"{PLACE}.{key}.{place}".rstrip("."), found=first.get("input")) from error


def _with_aliases(extra: Mapping[str, object]) -> dict[str, object]:
    """Name fields as the generated config does: DeepSpeed takes a field by its alias or its name, but not by both."""
    sections, named = _sections() if extra else {}, dict(extra)
    for key, values in extra.items():
        if key in sections and isinstance(values, dict):
            alias = {name: field.alias or name for name, field in sections[key].model_fields.items()}
            named[key] = {alias.get(name, name): value for name, value in values.items()}
    return named


def _check_names(values: Mapping[str, object], schema: type[BaseModel], prefix: str) -> None:
    fields = dict(schema.model_fields)
    fields |= {field.alias: field for field in schema.model_fields.values() if field.alias}
    for key, value in values.items():
        if key not in fields:
            raise _unknown(key, value, list(fields), prefix)
        inner = _inner_schema(fields[key].annotation)
        if inner is not None and isinstance(value, dict):
            _check_names(value, inner, f"{prefix}{key}.")


def _inner_schema(annotation: object) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _check_scalar(key: str, value: object, kind: type) -> None:
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError("a value of another type", where=f"{PLACE}.{key}", found=value, allowed=kind.__name__)


def _unknown(key: object, value: object, known: list[str], prefix: str) -> ConfigError:
    # YAML and Python have numbers as keys, too.
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
    return ConfigError(
        "DeepSpeed has no such key" if prefix else "this key does not go to DeepSpeed",
        where=f"{PLACE}.{prefix}{key}",
        found=value,
        allowed=", ".join(sorted(known)),
        hint=f"{PLACE}.{prefix}{near[0]}" if near else None,
    )
