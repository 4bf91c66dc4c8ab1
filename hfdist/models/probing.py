"""How a model behaves, tried on a small model of its class, or on the model itself."""

from __future__ import annotations

import copy
import re

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


def make_of_config(config: PreTrainedConfig, head: Head) -> PreTrainedModel:
    """Make a model of a small config with random weights, whole and on the CPU; `head`: what it gives at its end.

    It seeds torch's generator of the CPU, as `small_model` does, so that all ranks make the same. Callers set it back.
    """
    _seed()
    own, config = head_class(head, config), copy.deepcopy(config)
    if type(config) not in own.by_config:
        # The class is code of a repository that the user trusts; its config is of that code, too.
        remote: PreTrainedModel = own.auto.from_config(config, trust_remote_code=True)
        return remote.float().eval()
    model_class = own.by_config[type(config)]
    if isinstance(model_class, tuple | list):
        # Where a type has several classes, the first is the usual one.
        model_class = model_class[0]
    if model_class.config_class is type(config.get_text_config()):
        # This class takes the text part of a model for text and images.
        config = config.get_text_config()
    # The constructor makes it, since `from_config` would partition it under ZeRO-3.
    model: PreTrainedModel = model_class(config)
    return model.float().eval()


def _seed() -> None:
    # torch.manual_seed would seed GPUs, too, which are not set back.
    torch.default_generator.manual_seed(0)


def small_model(model: PreTrainedModel) -> PreTrainedModel:
    """Make a small model of the same class, whole and on the CPU; see `make_of_config`."""
    _seed()
    example = image_example(model)
    # The tokens of an example keep their numbers.
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


def run_small(model: PreTrainedModel) -> tuple[float, torch.Tensor]:
    """Loss and all gradients of a few tokens, of which some are no targets."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(min(vocab_size, 100), (2, 16), generator=generator)
    labels = tokens.clone()
    labels[0, 4:7] = -100
    model.zero_grad()
    loss = probe_loss(model, {"input_ids": tokens, "labels": labels})
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat(gradients)


def probe_loss(model: PreTrainedModel, batch: dict[str, torch.Tensor], **more: object) -> torch.Tensor:
    """Give the model's own loss of tokens; of another model a number that each of its outputs moves in its own way.

    Args:
        model: on the device of the batch.
        batch: with `labels`, which such another model is not given.
        more: what else the model is given.
    """
    if has_token_loss(model):
        loss: torch.Tensor = model(**batch, **more).loss
        return loss
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    return loss_of_states(model(**inputs, **more)[0])


def loss_of_states(states: torch.Tensor) -> torch.Tensor:
    """Give a number that each element moves in its own way; `states` may have any shape."""
    generator = torch.Generator().manual_seed(1)
    # Squares: a sum that may be near 0 could not be compared.
    return (states + torch.randn(states.shape, generator=generator).to(states)).square().mean()


_FIRST, _SECOND = 6, 5
"""Tokens of the two documents."""


@torch.no_grad()
def keeps_documents_apart(model: PreTrainedModel) -> bool | None:
    """Change the first of two packed documents, and see whether the second one's logits move.

    transformers masks across documents where positions restart, but only in models whose attention is masked by
    positions: recurrent models, and some with positions of their own, see through.

    Args:
        model: whole, on the CPU.

    Returns:
        None where the question cannot be asked: a kernel needs a GPU, or the model takes no positions.
    """
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.arange(1, 1 + _FIRST + _SECOND).remainder(vocab_size)[None]
    changed = ids.clone()
    changed[:, :_FIRST] = (changed[:, :_FIRST] + vocab_size // 2) % vocab_size
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None]
    was_training = model.training
    model.eval()
    reader = token_reader(model)
    try:
        # A model with a cache does not look at positions that restart.
        with without_cache(model.config):
            before, after = (reader(input_ids=own, position_ids=positions)[0][:, _FIRST:] for own in (ids, changed))
    except Exception:  # whatever a model raises that takes no positions, or has kernels for GPUs alone
        return None
    finally:
        model.train(was_training)
    return torch.allclose(before, after, rtol=1e-3, atol=1e-4 * float(before.abs().max()))


@unset_fake_temporarily()
def class_keeps_documents_apart(model: PreTrainedModel) -> bool | None:
    """Ask `keeps_documents_apart` of a small model of the same class: of this one a rank may have a part.

    Returns:
        None also where it cannot be made small.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            small = small_model(model)
        except Exception:  # whatever a model raises that cannot be made small
            return None
        return keeps_documents_apart(small)


@unset_fake_temporarily()
def unused_parameters(model: PreTrainedModel) -> frozenset[str] | None:
    """Run a small model of the same class on a few tokens, here and alone: all ranks find the same.

    Returns:
        The kinds of names (`kind_of_name`) of which no gradient reaches some parameter; None: it cannot be tried.
    """
    if reads_images(model):
        # The same is trained in each step, and what is never reached is frozen.
        return frozenset()
    with torch.random.fork_rng(devices=[]):
        try:
            small = small_with_adapters(model)
            run_small(small)
        except Exception:  # whatever a model raises that cannot be made small, or has another kind of loss
            return None
    return frozenset(kind_of_name(name) for name, p in small.named_parameters() if p.requires_grad and p.grad is None)


def kind_of_name(name: str) -> str:
    """Give a name without its numbers: one for all blocks."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def uses_all_parameters(model: PreTrainedModel) -> bool:
    """Whether `unused_parameters` is known to be empty."""
    return unused_parameters(model) == frozenset()
