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
    """The model by the name that the user gave, not a place on this machine: an adapter says what it belongs to."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()
    reads_images: bool | None = None
    """Whether a model of image and text reads images in this run; None: it is none, or nobody knows."""
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
        """Take the keys out of a config."""
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
            model: as its constructor left it.
            seed: seeds the adapter's first weights.
            layout: how the model is partitioned.

        Raises:
            ConfigError: what the model does not have, or nothing that is left to train.
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
        why, hint = "the data have no images, and only what images reach was to be trained", "rows with images, or "
        if self.reads_images:
            why, hint = "no gradient of images reaches what was to be trained", ""
        return _nothing_left(f": {why}", self.freeze, self.train_only, hint=f"{hint}train.train_only=[language]")

    @contextmanager
    def kept_in_float32(self, model: nn.Module) -> Iterator[None]:
        """Let a change of type pass by what an adapter trains: small updates vanish in half precision."""
        kept = []
        if self.adapter.is_used:
            kept = [(p, p.data.float()) for p in model.parameters() if p.requires_grad and p.is_floating_point()]
        yield
        for parameter, value in kept:
            parameter.data = value


def freeze_by_name(model: nn.Module, *, freeze: Sequence[str], train_only: Sequence[str]) -> None:
    """Leave those parameters trainable that `train_only` names and `freeze` does not, of those that are; in place.

    Args:
        model: whole or partitioned.
        freeze: shell-style patterns of whole names, `*` also stands for dots; or parts of a model of image and text.
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
    found = f"freeze={list(freeze)}, train_only={list(train_only)}"
    return ConfigError(f"nothing is left to train{why}", where="train.freeze, train.train_only", found=found, hint=hint)


def _matches(
    names: dict[nn.Parameter, list[str]], patterns: Sequence[str], key: str, parts: Mapping[str, list[str]]
) -> dict[nn.Parameter, list[str]]:
    """Find the parameters of which any name matches. A tied one has several names, and is one parameter for all."""
    found: dict[nn.Parameter, list[str]] = {}
    # The name of a part stands for those of its parameters.
    patterns = [name for pattern in patterns for name in parts.get(pattern) or [pattern]]
    for pattern in patterns:
        matching = {p: aliases for p, aliases in names.items() if fnmatch.filter(aliases, pattern)}
        if not matching:
            raise _no_match([name for aliases in names.values() for name in aliases], pattern, key)
        found |= matching
    for aliases in found.values():
        others = [name for name in aliases if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        if others:
            logger.info("%s: %s is the same weight as %s, so it goes along", key, ", ".join(others), aliases[0])
    return found


def _no_match(names: list[str], pattern: str, key: str) -> ConfigError:
    # Blocks have the same names but for their numbers.
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    if any(name.startswith(f"{pattern}.") for name in names):
        hint: str | None = f"{key}=['{pattern}.*']"
    else:
        hint = nearest(re.sub(r"\.\d+\.", ".*.", pattern), kinds, f"{key}=['{{}}']", cutoff=0.4)
    allowed = f"shell-style patterns of names such as {', '.join(kinds[:4])}"
    return ConfigError("no parameter has such a name", where=key, found=pattern, allowed=allowed, hint=hint)
