"""TRL's trainers in any layout: known by their names, since TRL need not be installed.

    class PipelineSFT(hfdist.DistributedTrainerMixin, trl.SFTTrainer): ...

What each needs of its arguments and its adapter is here; sft.py has what SFTTrainer needs while it trains.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedModel

from hfdist.errors import ConfigError
from hfdist.models.adapter import wrap_model
from hfdist.models.probing import keeps_documents_apart
from hfdist.strategies.base import Strategy
from hfdist.trainer.hooks import is_of_trl, overrides, owner_of

logger = logging.getLogger(__name__)

_SFT = "trl.trainer.sft_trainer.SFTTrainer"
"""Module and name of TRL's class of supervised fine-tuning."""
_OF_CAUSAL_LMS = ("SFTTrainer", "DPOTrainer", "KTOTrainer")
"""Classes that load a causal language model, where the argument `model` is a name."""
_DEPENDENT = {
    "KTOTrainer": "its KL term is a mean over the rows that all processes run at once",
    "GRPOTrainer": "each process draws its own completions",
    "RLOOTrainer": "each process draws its own completions",
    "DistillationTrainer": "each process draws its own completions",
}
"""Classes whose numbers depend on the layout, and why."""
_WITH_REFERENCE = ("DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")
"""Classes whose loss compares the model with a reference model."""
_OF_ADAPTERS = ("SFTTrainer", "RewardTrainer", *_WITH_REFERENCE)
"""Classes that do nothing with `peft_config` but put an adapter into the model."""
_REFERENCE = "ref"
"""The name that TRL gives a copy of an adapter which it keeps as the reference."""
Arguments = dict[str, Any]
"""Arguments of a trainer's constructor, by name."""


def is_sft(kind: type) -> bool:
    """Whether a trainer's class computes the loss of TRL's SFTTrainer."""
    owner = owner_of(kind, "compute_loss")
    return f"{owner.__module__}.{owner.__qualname__}" == _SFT


def sums_over_targets(kind: type) -> bool:
    """Whether the loss of a trainer's class is known to be the sum of token losses, over the number of targets."""
    return owner_of(kind, "compute_loss") is transformers.Trainer or is_sft(kind)


def is_plain_prediction(kind: type) -> bool:
    """Whether an evaluation's step is known to give the loss of `compute_loss` and nothing else that counts."""
    return not overrides(kind, "prediction_step")


def trains_causal_lm(kind: type) -> bool:
    """Whether a name given as the model is known to mean a causal language model."""
    return any(is_of_trl(owner) and owner.__name__ in _OF_CAUSAL_LMS for owner in kind.__mro__)


def check_trl_arguments(kind: type, arguments: Arguments, strategy: Strategy) -> None:
    """Check the arguments of a constructor of TRL's, by name, before anything is built. Other trainers pass."""
    if arguments.get("peft_config") is not None:
        _check_takes_adapter(kind, arguments, strategy)
    if is_sft(kind) and strategy.topology.tensor > 1:
        what = "SFTTrainer multiplies by the whole weight of the model's head, of which each tensor rank has a part"
        where, found = "strategy.tensor", str(strategy.topology.tensor)
        raise ConfigError(what, where=where, found=found, allowed="1", hint="tensor=1 with sharding='fsdp2'")
    if is_sft(kind) and strategy.topology.pipeline > 1:
        _check_sft_in_pipeline(arguments, strategy)
    if getattr(arguments["args"], "precompute_ref_log_probs", False) and strategy.topology.world_size > 1:
        _check_is_on_disk(arguments)
    if getattr(arguments["args"], "use_adaptive_entropy", False):
        what = "a run that goes on from a checkpoint would begin again with the first coefficient of the entropy"
        hint = "use_adaptive_entropy=False, with entropy_coef"
        raise ConfigError(what, where="args.use_adaptive_entropy", found="True", allowed="False", hint=hint)
    name = _name_of_trl(kind)
    if name in _DEPENDENT and strategy.topology.rank == 0:
        logger.warning("%s: %s, so its numbers depend on the layout", name, _DEPENDENT[name])


def with_adapter(arguments: Arguments, kind: type, strategy: Strategy) -> Arguments:
    """Put the adapter of `peft_config` into the model, which is still whole, and take `peft_config` away.

    The adapter's weights are those that the class itself would draw. A class whose reference is the model with its
    adapter disabled gets PEFT's wrapper; the others get the model of its own class, which all layouts know.
    """
    peft_config, model = arguments.get("peft_config"), arguments["model"]
    if peft_config is not None:
        wrapped = wrap_model(model, peft_config, seed=arguments["args"].seed, layout=strategy)
        given = wrapped if _compares(kind, arguments["args"]) else model
        arguments = arguments | {"model": given, "peft_config": None}
    if hasattr(model, "peft_config") and _name_of_trl(kind) not in ("", "RewardTrainer"):
        _check_head(model)
    return arguments


def drop_reference_copy(model: Any) -> None:
    """Delete the copy of a new adapter that TRL keeps as the reference: without one, it disables the adapter.

    A class that is given `peft_config` makes no copy, but one that is given a wrapped model does.
    """
    if _REFERENCE in getattr(model, "peft_config", {}):
        model.delete_adapter(_REFERENCE)


def _check_takes_adapter(kind: type, arguments: Mapping[str, object], strategy: Strategy) -> None:
    """Refuse `peft_config` for a class that needs the adapter later, or otherwise, than this file can add it."""
    name = _name_of_trl(kind)
    if name not in _OF_ADAPTERS:
        what = "adapters must be in the model before it is distributed, and this class adds them afterwards"
        found, allowed = kind.__name__, f"a class on one of {', '.join(_OF_ADAPTERS)}"
        hint = "model = peft.inject_adapter_in_model(peft_config, model), and no peft_config"
        raise ConfigError(what, where="peft_config", found=found, allowed=allowed, hint=hint)
    if _compares(kind, arguments["args"]):
        _check_reference(name, arguments["peft_config"], strategy)
    template = getattr(arguments["args"], "chat_template_path", None)
    if template is not None and not str(template).endswith((".jinja", ".j2")):
        what = "tokens that come with a template must be in the model before its adapter is"
        hint = "model, tokenizer, _ = trl.clone_chat_template(model, tokenizer, PATH), and no chat_template_path"
        raise ConfigError(what, where="args.chat_template_path, peft_config", found=template, hint=hint)


def _compares(kind: type, args: Any) -> bool:
    """Whether the loss compares the model with a reference: the model without its adapter, if the class adds one."""
    name = _name_of_trl(kind)
    if name == "GRPOTrainer":
        # By default GRPO has no KL term, and so no reference.
        return args.beta != 0.0
    return name in _WITH_REFERENCE


def _check_reference(name: str, peft_config: object, strategy: Strategy) -> None:
    """Refuse a layout or an adapter with which the model without its adapter is not the reference."""
    # ZeRO-3 can copy sharded weights, because it gathers them first; FSDP2 cannot.
    if strategy.fractions.weights < 1 and not strategy.partitions_in_constructor:
        what = f"{name} copies the adapter as its reference, which it cannot once FSDP2 has sharded it"
        where, hint = "peft_config, strategy.sharding", "sharding='zero3', or 'zero2'"
        raise ConfigError(what, where=where, found="fsdp2", allowed="none, zero1, zero2, zero3", hint=hint)
    for field, allowed in (("init_lora_weights", (True, False, "gaussian", "orthogonal")), ("bias", ("none",))):
        value = getattr(peft_config, field, allowed[0])
        if value not in allowed:
            what = f"{name} disables the adapter for its reference, and this one changes the model's own weights too"
            where, hint = f"peft_config.{field}", f"{field}={allowed[0]!r}"
            raise ConfigError(what, where=where, found=value, allowed=", ".join(map(str, allowed)), hint=hint)


def _check_head(model: PreTrainedModel) -> None:
    """Refuse an adapter on the head of a model whose class does not call the head."""
    # PEFT is imported late: it need not be installed.
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        what = "the class multiplies by the weight of the model's head itself, so an adapter on the head is not trained"
        where, hint = "peft_config.target_modules", "target_modules='all-linear', which leaves the head out"
        raise ConfigError(what, where=where, found="the head", hint=hint)


def _name_of_trl(kind: type) -> str:
    """Give the name of the nearest class of TRL's that a class is or inherits from; empty: there is none."""
    return next((owner.__name__ for owner in kind.__mro__ if is_of_trl(owner)), "")


def _check_is_on_disk(arguments: Mapping[str, object]) -> None:
    """Refuse datasets in memory, where rank 0 leaves the reference's log-probabilities for the others on the disk."""
    for name in ("train_dataset", "eval_dataset"):
        given = arguments.get(name)
        datasets = list(given.values()) if isinstance(given, dict) else [given]
        for dataset in datasets:
            if dataset is not None and not getattr(dataset, "cache_files", True):
                raise ConfigError(
                    "rank 0 writes the reference's log-probabilities beside the dataset's files, and this one has none",
                    where=name,
                    found="a dataset in memory, with args.precompute_ref_log_probs=True",
                    hint="dataset.save_to_disk(folder), and datasets.load_from_disk(folder)",
                )


def _check_sft_in_pipeline(arguments: Arguments, strategy: Strategy) -> None:
    """Refuse what SFTTrainer does around a whole forward, and packed documents that stages would not keep apart."""
    args = arguments.get("args")
    around_forward = {
        "compute_loss_func": arguments.get("compute_loss_func"),
        "args.label_smoothing_factor": getattr(args, "label_smoothing_factor", None),
        "args.activation_offloading": getattr(args, "activation_offloading", None),
    }
    for name, value in around_forward.items():
        if value:
            what = "SFTTrainer does this around a forward of the whole model, of which each process has a part"
            hint = "without it, or a strategy without a pipeline"
            raise ConfigError(what, where=name, found=getattr(value, "__name__", value), hint=hint)
    if not (getattr(args, "padding_free", False) or getattr(args, "packing", False)):
        return
    attention = arguments["model"].config._attn_implementation or ""
    if "flash" in attention and strategy.batch.micro_batch_size > 1:
        what = "flash kernels keep packed documents apart in batches of one sequence only"
        where, hint = "make_strategy(micro_batch_size)", "micro_batch_size=1, or attn_implementation='sdpa'"
        raise ConfigError(what, where=where, found=strategy.batch.micro_batch_size, allowed="1", hint=hint)
    if keeps_documents_apart(arguments["model"]) is False:
        what = f"{type(arguments['model']).__name__} sees through from one packed document to the next"
        hint = "packing=False, or a strategy without a pipeline"
        raise ConfigError(what, where="args.packing, args.padding_free", found="True", hint=hint)
