"""Which parameters a run trains: all, an adapter, or those that patterns of names choose."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from hfdist.config.model import AdapterConfig, ModelConfig
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError, nearest
from hfdist.models.adapter import add_adapter
from hfdist.models.image_text import ImageBatch, may_read_images, names_of_parts, read_images, read_text_alone
from hfdist.models.partitioning import Partitioning
from hfdist.models.peft_config import reads_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainableParameters:
    """`adapter.*`, `train.freeze` and `train.train_only`, as `build_model` needs them."""

    base: ModelConfig = field(default_factory=ModelConfig)
    """The model under the name that the user gave, and not a folder of this machine: an adapter's files repeat it."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    freeze: tuple[str, ...] = ()
    """Patterns of names of parameters that are not trained."""
    train_only: tuple[str, ...] = ()
    """Patterns of names of the only parameters that are trained; empty: all are."""
    reads_images: bool | None = None
    """Whether a model of image and text reads images in this run; None: the config does not say."""
    has_values: bool = False
    """Whether the model gets a head of values, which is trained, too."""
    unreached: frozenset[str] = frozenset()
    """Names of parameters that images never reach, as `find_unreached` gives them."""
    example: ImageBatch | None = None
    """What the model's forward takes of a row with an image; None: rows have none, or this is a plan."""

    @classmethod
    def of(
        cls, config: RunConfig, *, unreached: frozenset[str] = frozenset(), example: ImageBatch | None = None
    ) -> TrainableParameters:
        """Take the keys out of a run's config; the other arguments are the fields of these names."""
        return cls(
            base=config.model,
            adapter=config.adapter,
            freeze=tuple(config.train.freeze),
            train_only=tuple(config.train.train_only),
            reads_images=config.data.images.used,
            has_values=config.task.name.traits.has_values,
            unreached=unreached,
            example=example,
        )

    @property
    def reads_weights(self) -> bool:
        """Whether the model's weights must have their final values and type when `choose` is called."""
        return reads_weights(self.adapter)

    def choose(self, model: PreTrainedModel, *, seed: int, layout: Partitioning) -> None:
        """Put the adapter in, and freeze what is not trained; in place, and before `layout.partition`.

        Args:
            model: the model as its constructor left it.
            seed: seeds the adapter's first weights.
            layout: how the model is partitioned.

        Raises:
            ConfigError: a layer or parameter is named that the model does not have, or nothing is left to train.
        """
        if self.adapter.is_used:
            add_adapter(model, self.adapter, self.base, seed=seed, layout=layout)
        freeze_by_name(model, freeze=self.freeze, train_only=self.train_only)
        if self.reads_images is not None and may_read_images(model.config):
            if self.reads_images:
                read_images(model, unreached=self.unreached, example=self.example)
            else:
                read_text_alone(model)
            if not any(parameter.requires_grad for parameter in model.parameters()):
                raise self._nothing_reached()

    def _nothing_reached(self) -> ConfigError:
        """Make the error about a run in which images decide that no parameter is trained."""
        hint = "train.train_only=[language]"
        if self.reads_images:
            why = "no gradient of images reaches what was to be trained"
        else:
            why, hint = (
                "the data have no images, and only what images reach was to be trained",
                f"rows with images, or {hint}",
            )
        return _nothing_left(f": {why}", self.freeze, self.train_only, hint=hint)

    @contextmanager
    def kept_in_float32(self, model: nn.Module) -> Iterator[None]:
        """Keep an adapter's trained weights in float32 while the model's type is changed in this context.

        Small updates vanish in half precision.
        """
        values: dict[nn.Parameter, torch.Tensor] = {}
        if self.adapter.is_used:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            values = {parameter: parameter.data.float() for parameter in trained if parameter.is_floating_point()}
        yield
        for parameter, value in values.items():
            parameter.data = value


def freeze_by_name(model: nn.Module, *, freeze: Sequence[str], train_only: Sequence[str]) -> None:
    """Freeze the parameters that `freeze` names, and those that `train_only` does not name; in place.

    Args:
        model: the model, whole or partitioned; parameters that are frozen already stay so.
        freeze: shell-style patterns of whole names, in which `*` also stands for dots; or names of the parts of a model
            of image and text.
        train_only: patterns of the same kind; empty: all parameters.

    Raises:
        ConfigError: a pattern that no parameter matches, or nothing that is left to train.
    """
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    is_in_parts = isinstance(model, PreTrainedModel) and may_read_images(model.config)
    parts = names_of_parts(cast(PreTrainedModel, model)) if is_in_parts and (freeze or train_only) else {}
    chosen = _matches(names, train_only, "train.train_only", parts)
    frozen = _matches(names, freeze, "train.freeze", parts)
    for parameter in names:
        if parameter in frozen or (train_only and parameter not in chosen):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names):
        raise _nothing_left("", freeze, train_only, hint="train.freeze=[] train.train_only=[]")


def _nothing_left(why: str, freeze: Sequence[str], train_only: Sequence[str], *, hint: str) -> ConfigError:
    """Make the error about a model without a trainable parameter; `why`: the end of its first sentence."""
    found = f"freeze={list(freeze)}, train_only={list(train_only)}"
    return ConfigError(f"nothing is left to train{why}", where="train.freeze, train.train_only", found=found, hint=hint)


def _matches(
    names: dict[nn.Parameter, list[str]], patterns: Sequence[str], key: str, parts: Mapping[str, list[str]]
) -> dict[nn.Parameter, list[str]]:
    """Find the parameters of which one name or more matches a pattern; a tied parameter has several names.

    Args:
        names: all names of each parameter.
        patterns: shell-style patterns, or names of parts.
        key: the config key that gives the patterns, for messages.
        parts: names of the parameters of each part of a model of image and text.

    Returns:
        The parameters with all their names.
    """
    found: dict[nn.Parameter, list[str]] = {}
    # The name of a part stands for the names of its parameters.
    patterns = [name for pattern in patterns for name in parts.get(pattern) or [pattern]]
    for pattern in patterns:
        matching = {parameter: aliases for parameter, aliases in names.items() if fnmatch.filter(aliases, pattern)}
        if not matching:
            raise _no_match([name for aliases in names.values() for name in aliases], pattern, key)
        found |= matching
    for aliases in found.values():
        others = [name for name in aliases if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        if others:
            logger.info("%s: %s is the same weight as %s, so it goes along", key, ", ".join(others), aliases[0])
    return found


def _no_match(names: list[str], pattern: str, key: str) -> ConfigError:
    """Make the error about a pattern that matches no name, with the nearest names as a hint."""
    # Blocks have the same names but for their numbers.
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    if any(name.startswith(f"{pattern}.") for name in names):
        hint: str | None = f"{key}=['{pattern}.*']"
    else:
        hint = nearest(re.sub(r"\.\d+\.", ".*.", pattern), kinds, f"{key}=['{{}}']", cutoff=0.4)
    allowed = f"shell-style patterns of names such as {', '.join(kinds[:4])}"
    return ConfigError("no parameter has such a name", where=key, found=pattern, allowed=allowed, hint=hint)
