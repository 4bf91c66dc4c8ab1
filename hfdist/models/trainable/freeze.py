"""Which parameters are trained, by patterns of their names."""

from __future__ import annotations

import difflib
import fnmatch
import logging
import re
from collections import defaultdict
from collections.abc import Sequence

from torch import nn

from hfdist.errors import ConfigError

logger = logging.getLogger(__name__)


def freeze_by_name(model: nn.Module, *, freeze: Sequence[str], train_only: Sequence[str]) -> None:
    """Leave those parameters trainable that `train_only` names and `freeze` does not, of those that are; in place.

    Args:
        model: whole, or cut by ZeRO-3.
        freeze: shell-style patterns of whole names; `*` also stands for dots.
        train_only: likewise; empty: all.

    Raises:
        ConfigError: a pattern that no parameter matches, or nothing that is left to train.
    """
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    chosen = _matches(names, train_only, "train.train_only")
    frozen = _matches(names, freeze, "train.freeze")
    for parameter in names:
        if parameter in frozen or (train_only and parameter not in chosen):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in names):
        raise ConfigError(
            "nothing is left to train",
            where="train.freeze, train.train_only",
            found=f"freeze={list(freeze)}, train_only={list(train_only)}",
            hint="train.freeze=[] train.train_only=[]",
        )


def _matches(names: dict[nn.Parameter, list[str]], patterns: Sequence[str], key: str) -> dict[nn.Parameter, list[str]]:
    """Parameters of which any name matches. A tied one has several, and is one thing under all of them."""
    found: dict[nn.Parameter, list[str]] = {}
    for pattern in patterns:
        matching = {p: own for p, own in names.items() if fnmatch.filter(own, pattern)}
        if not matching:
            raise _no_match([name for own in names.values() for name in own], pattern, key)
        found |= matching
    for own in found.values():
        others = [name for name in own if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        if others:
            logger.info("%s: %s is the same weight as %s, so it goes along", key, ", ".join(others), own[0])
    return found


def _no_match(names: list[str], pattern: str, key: str) -> ConfigError:
    # Blocks have the same names but for their numbers.
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    if any(name.startswith(f"{pattern}.") for name in names):
        near = [f"{pattern}.*"]
    else:
        near = difflib.get_close_matches(re.sub(r"\.\d+\.", ".*.", pattern), kinds, n=1, cutoff=0.4)
    return ConfigError(
        "no parameter has such a name",
        where=key,
        found=pattern,
        allowed=f"shell-style patterns of names such as {', '.join(kinds[:4])}",
        hint=f"{key}=['{near[0]}']" if near else None,
    )
