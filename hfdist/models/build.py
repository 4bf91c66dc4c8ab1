"""A model with weights: pretrained, or random ones that only a seed and their names determine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hfdist.config.model import Dtype, Init, ModelConfig
from hfdist.errors import ConfigError
from hfdist.models.hub_client import reading_from_hub
from hfdist.models.trainable import TrainableParameters

Cut = Callable[[PreTrainedModel], None]
"""Leaves this rank's part in a whole model, in place."""


def build_model(
    config: ModelConfig,
    architecture: PreTrainedConfig,
    *,
    seed: int,
    cut: Cut = lambda model: None,
    trained: TrainableParameters | None = None,
) -> PreTrainedModel:
    """Make the model on the CPU, as much of it as `cut` leaves; TrainingArguments must exist by then.

    No more memory is touched than for what is left: random weights are drawn, and those of a file read and converted,
    after the cut.

    Args:
        config: where the weights come from and their type.
        architecture: from `find_architecture`.
        seed: of random weights.
        cut: leaves this rank's part in the model, in place (ZeRO-3 cuts by itself, while the model is made).
        trained: what of it is trained; None: all.

    Raises:
        ConfigError: the pretrained weights cannot be read, or transformers refuses the architecture here.
    """
    trained = trained or TrainableParameters()
    _check_not_quantized(architecture)
    if config.init is Init.random:
        return _draw(config, architecture, trained, seed, cut)
    return _read(config, architecture, trained, seed, cut)


def _draw(
    config: ModelConfig, architecture: PreTrainedConfig, trained: TrainableParameters, seed: int, cut: Cut
) -> PreTrainedModel:
    """Random weights."""
    try:
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(
                architecture, dtype=_dtype(config.dtype), trust_remote_code=config.trust_remote_code
            )
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"transformers cannot make the model: {str(error).splitlines()[0]}",
            where="model.attention, model.config",
            found=config.attention.value,
            hint="model.attention=auto",
        ) from error
    # `no_init_weights` leaves ties undone too; a tied parameter must be one before it is drawn.
    model.tie_weights()
    if trained.adapter.is_used:
        # By the names that the weights have without it, and not over it.
        initialize_by_name(model, seed)
    trained.choose(model, seed=seed)
    cut(model)
    if not trained.adapter.is_used:
        initialize_by_name(model, seed)
    return model


def _read(
    config: ModelConfig, architecture: PreTrainedConfig, trained: TrainableParameters, seed: int, cut: Cut
) -> PreTrainedModel:
    """Weights of a file."""
    assert config.name is not None  # checked with the config
    dtype, is_cut_already = _dtype(config.dtype), is_deepspeed_zero3_enabled()
    with reading_from_hub("model.name", config.name):
        model = AutoModelForCausalLM.from_pretrained(
            config.name,
            config=architecture,
            revision=config.revision,
            # As in the file, so that its pages are mapped and only those of what is left are ever read. ZeRO-3 reads
            # and cuts at once, and cannot change the type afterwards.
            dtype=dtype if is_cut_already else "auto",
            # A .bin file is a pickle, which can run code: only safetensors are read.
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
        )
    if trained.reads_weights and not is_cut_already:
        nn.Module.to(model, dtype)
    trained.choose(model, seed=seed)
    cut(model)
    if not is_cut_already:
        with trained.kept_in_float32(model):
            nn.Module.to(model, dtype)
    return model


def _check_not_quantized(architecture: PreTrainedConfig) -> None:
    quantization = getattr(architecture, "quantization_config", None)
    if quantization is not None:
        raise ConfigError(
            "the weights are quantized, and cannot be trained or adapted here",
            where="model.name",
            found=f"a quantization_config in its config.json: {str(quantization)[:200]}",
            hint="the repository that it was quantized from; adapter=lora model.dtype=bfloat16 is the least memory",
        )


def _dtype(dtype: Dtype) -> torch.dtype:
    # `auto` is float32 even for a bfloat16 checkpoint: small updates vanish in bfloat16 weights, so the
    # optimizer must have float32 ones; `train.precision` chooses the type of the arithmetic.
    return torch.float32 if dtype is Dtype.auto else getattr(torch, dtype.value)


_HALF_PRECISION = (torch.bfloat16, torch.float16)


@torch.no_grad()
def initialize_by_name(model: PreTrainedModel, seed: int) -> None:
    """Give every parameter of `model` the random value that its name and `seed` determine, in place.

    Works on whole parameters and on ones that DeepSpeed ZeRO-3 has already cut (then all ranks must call it), and
    leaves out modules whose parameters another rank of a pipeline holds. Tied parameters must be tied.
    """
    initialized: set[int] = set()
    for name, module, owner in _children_first("", model, model):
        own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) not in initialized]
        # A rule may also reach into direct children, as GPT-2's does for its residual projections.
        reachable = own + [p for child in module.children() for p in child.parameters(recurse=False)]
        # A tied head comes after its embedding and must not draw it again under another name.
        is_tied_alias = not own and next(module.parameters(recurse=False), None) is not None
        if is_tied_alias or _is_elsewhere(module):
            continue
        with _whole(reachable), _on_cpu_in_float32(reachable), torch.random.fork_rng():
            torch.manual_seed(_key(seed, name))
            owner._init_weights(module)
        initialized.update(id(parameter) for parameter in own)


def _is_elsewhere(module: nn.Module) -> bool:
    return len(module._parameters) > 0 and all(parameter is None for parameter in module._parameters.values())


def _children_first(
    name: str, module: nn.Module, owner: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Walk in the order in which transformers applies its rules: a nested PreTrainedModel has its own."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child_name, child in module.named_children():
        yield from _children_first(f"{name}.{child_name}" if name else child_name, child, owner)
    yield name, module, owner


def _whole(parameters: list[nn.Parameter]) -> AbstractContextManager[object]:
    """Under ZeRO-3, put the cut parameters together for a moment; otherwise nothing."""
    if not parameters or not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed

    # Every rank computes the same values; rank 0's are the ones that are cut again.
    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)


@contextmanager
def _on_cpu_in_float32(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Draw so, and copy: ZeRO-3 makes parameters in bfloat16 and on the GPU, whose generator draws other numbers.

    So does torch 2.11 in bfloat16 on a CPU.
    """
    places = [(p, p.data) for p in parameters if p.device.type != "cpu" or p.dtype in _HALF_PRECISION]
    for parameter, data in places:
        parameter.data = data.to("cpu", torch.float32 if data.dtype in _HALF_PRECISION else data.dtype)
    yield
    for parameter, data in places:
        data.copy_(parameter.data)
        parameter.data = data


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
