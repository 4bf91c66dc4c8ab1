"""Trials: questions about how a model behaves, answered by running a small model of its class on a few tokens."""

from __future__ import annotations

import copy
import re
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedConfig, PreTrainedModel

from hfdist.config.task import Head
from hfdist.models.adapter import inject_adapter
from hfdist.models.cache_use import without_cache
from hfdist.models.embeddings import has_token_loss, token_reader
from hfdist.models.heads import head_class
from hfdist.models.image_text import image_example, read_images, reads_images
from hfdist.models.shrink import shrink_to_try

_FIRST_TOKENS, _SECOND_TOKENS = 6, 5
"""Numbers of tokens of the two documents in the trial of packing."""


class SmallRun(NamedTuple):
    """What a forward and a backward of a small model give."""

    loss: float
    gradients: torch.Tensor
    """The gradients of all parameters that have one, end to end; shape [elements]."""


def make_of_config(config: PreTrainedConfig, head: Head) -> PreTrainedModel:
    """Make a model of a small config with random weights, whole and on the CPU.

    All ranks make the same one: it seeds torch's generator of the CPU, which the caller sets back.

    Args:
        config: the config of a small model; it is copied.
        head: what the model gives at its end.
    """
    _seed()
    classes, config = head_class(head, config), copy.deepcopy(config)
    if type(config) not in classes.by_config:
        # The config's class is code of a repository, which the user trusts: the model's class is, too.
        remote: PreTrainedModel = classes.auto.from_config(config, trust_remote_code=True)
        return remote.float().eval()
    model_class = classes.by_config[type(config)]
    if isinstance(model_class, tuple | list):
        # Where a type has several classes the first one is the usual one.
        model_class = model_class[0]
    if model_class.config_class is type(config.get_text_config()):
        # This class of a type for text and images takes the config of the text alone.
        config = config.get_text_config()
    # The constructor makes it, since `from_config` would partition it under ZeRO-3.
    model: PreTrainedModel = model_class(config)
    return model.float().eval()


def _seed() -> None:
    # torch.manual_seed would seed GPUs, too, which nobody sets back.
    torch.default_generator.manual_seed(0)


def small_model(model: PreTrainedModel) -> PreTrainedModel:
    """Make a small model of the same class, whole and on the CPU, with random weights.

    All ranks make the same one: it seeds torch's generator of the CPU, which the caller sets back.
    """
    _seed()
    example = image_example(model)
    # Where images are read, the tokens of the example keep their ids, so the vocabulary stays whole.
    config = shrink_to_try(model.config, keeps_tokens=example is not None)
    # The constructor makes it, since `from_config` would partition it under ZeRO-3.
    small = type(model)(copy.deepcopy(config)).float().eval()
    if example is not None:
        read_images(small, unreached=(), example=example)
    return small


def small_with_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Make a small model of the same class with the adapters that the model has."""
    small = small_model(model)
    for name, adapter in getattr(model, "peft_config", {}).items():
        inject_adapter(small, copy.deepcopy(adapter), name)
    return small


def run_small(model: PreTrainedModel) -> SmallRun:
    """Run a small model forward and backward on a few tokens, of which some are no targets."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(min(vocab_size, 100), (2, 16), generator=generator)
    labels = tokens.clone()
    labels[0, 4:7] = -100
    model.zero_grad()
    loss = probe_loss(model, {"input_ids": tokens, "labels": labels})
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return SmallRun(float(loss.detach()), torch.cat(gradients))


def probe_loss(model: PreTrainedModel, batch: dict[str, torch.Tensor], **more: object) -> torch.Tensor:
    """Give the model's own loss of tokens; where it has none, a number that each of its outputs moves differently.

    Args:
        model: a model on the device of the batch.
        batch: inputs and `labels`; a model without a loss of tokens is not given the labels.
        more: further inputs.
    """
    if has_token_loss(model):
        loss: torch.Tensor = model(**batch, **more).loss
        return loss
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    return loss_of_states(model(**inputs, **more)[0])


def loss_of_states(states: torch.Tensor) -> torch.Tensor:
    """Give a number that each element moves differently; `states` may have any shape."""
    generator = torch.Generator().manual_seed(1)
    # Squares, as a sum without them may be near 0, where relative differences say nothing.
    return (states + torch.randn(states.shape, generator=generator).to(states)).square().mean()


@torch.no_grad()
def keeps_documents_apart(model: PreTrainedModel) -> bool | None:
    """Whether the second of two packed documents has the same logits after the first one is changed.

    transformers finds documents by positions that restart, and masks attention between them. Recurrent models, and some
    that count positions by themselves, still see the document before.

    Args:
        model: the whole model, on the CPU.

    Returns:
        Whether it has; None where the question cannot be asked: a kernel needs a GPU, or the model takes no positions.
    """
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.arange(1, 1 + _FIRST_TOKENS + _SECOND_TOKENS).remainder(vocab_size)[None]
    changed = ids.clone()
    changed[:, :_FIRST_TOKENS] = (changed[:, :_FIRST_TOKENS] + vocab_size // 2) % vocab_size
    positions = torch.cat([torch.arange(_FIRST_TOKENS), torch.arange(_SECOND_TOKENS)])[None]
    was_training = model.training
    model.eval()
    reader = token_reader(model)
    try:
        # With a cache, transformers does not look for positions that restart.
        with without_cache(model.config):
            before = reader(input_ids=ids, position_ids=positions)[0][:, _FIRST_TOKENS:]
            after = reader(input_ids=changed, position_ids=positions)[0][:, _FIRST_TOKENS:]
    except Exception:  # whatever a model raises that takes no positions, or has kernels for GPUs alone
        return None
    finally:
        model.train(was_training)
    return torch.allclose(before, after, rtol=1e-3, atol=1e-4 * float(before.abs().max()))


@unset_fake_temporarily()
def class_keeps_documents_apart(model: PreTrainedModel) -> bool | None:
    """Ask `keeps_documents_apart` of a small model of the same class: a rank may hold only a part of the model itself.

    Returns:
        The answer of `keeps_documents_apart`; None also where no small model can be made.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            small = small_model(model)
        except Exception:  # whatever a model raises that cannot be made small
            return None
        return keeps_documents_apart(small)


@unset_fake_temporarily()
def unused_parameters(model: PreTrainedModel) -> frozenset[str] | None:
    """Find, with a small model of the same class, the parameters that no gradient reaches. All ranks find the same.

    Returns:
        Names of parameters in which `*` stands for the number of a block, as `kind_of_name` gives them: each name has
        a parameter without a gradient. None: no small model can be tried.
    """
    if reads_images(model):
        # What images and text never reach is frozen already, and all else gets a gradient in each step.
        return frozenset()
    with torch.random.fork_rng(devices=[]):
        try:
            small = small_with_adapters(model)
            run_small(small)
        except Exception:  # whatever a model raises that cannot be made small, or has another kind of loss
            return None
    return frozenset(kind_of_name(name) for name, p in small.named_parameters() if p.requires_grad and p.grad is None)


def kind_of_name(name: str) -> str:
    """Give a parameter's name with `*` in place of numbers, so that it is the same for all blocks."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def uses_all_parameters(model: PreTrainedModel) -> bool:
    """Whether `unused_parameters` is known to be empty."""
    return unused_parameters(model) == frozenset()
