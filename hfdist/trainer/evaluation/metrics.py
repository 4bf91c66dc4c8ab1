"""Metrics of generated text, found by name among what installed packages offer; a config can only name one."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from hfdist.errors import ConfigError
from hfdist.plugins import load_plugin

GROUP = "hfdist.metrics"
"""Of entry points, in a package's pyproject.toml: `[project.entry-points."hfdist.metrics"]`."""
_RESERVED = re.compile(r"(.*_)?loss|perplexity|tokens|runtime|.*_per_second|model_preparation_time")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A held-out prompt that the model has continued."""

    prompt: str
    text: str
    """What the model wrote, without special tokens."""
    reference: str
    """What stands there in the data; like `text`, at most `evaluate.max_new_tokens` long."""


Metric = Callable[[Sequence[Generation]], float | Mapping[str, float]]
"""One figure, reported as `eval_<name>`, or several: `eval_<name>_<key>`. Called on rank 0."""


def exact_match(generations: Sequence[Generation]) -> float:
    """Share of the texts that are their references, but for space around them."""
    return sum(one.text.strip() == one.reference.strip() for one in generations) / len(generations)


def word_f1(generations: Sequence[Generation]) -> float:
    """Mean harmonic mean of precision and recall of words, in any order."""
    return sum(_f1(one.text.split(), one.reference.split()) for one in generations) / len(generations)


def _f1(words: list[str], wanted: list[str]) -> float:
    if not words or not wanted:
        return float(words == wanted)
    common = (Counter(words) & Counter(wanted)).total()
    return 2 * common / (len(words) + len(wanted))


# Known without entry points, which a checkout that is not installed anew does not have.
BUILT_IN: Mapping[str, Metric] = MappingProxyType({"exact_match": exact_match, "word_f1": word_f1})


def load_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Find metrics by name, and import the packages that offer them."""
    taken = next(filter(_RESERVED.fullmatch, names), None)
    if taken is not None:
        what = "a metric of this name would take the place of a figure that each evaluation has"
        raise ConfigError(what, where="evaluate.metrics", found=taken, hint="another name for its entry point")
    return {name: BUILT_IN[name] if name in BUILT_IN else _load(name) for name in names}


def _load(name: str) -> Metric:
    expected = "a function of a list of hfdist.Generation that gives a number, or numbers by name"
    key, hint = "evaluate.metrics", "evaluate.metrics=[{}]"
    metric: Metric = load_plugin(GROUP, name, kind="metric", expected=expected, where=key, hint=hint, built_in=BUILT_IN)
    return metric


def compute(name: str, metric: Metric, generations: Sequence[Generation]) -> dict[str, float]:
    """Give a metric's figures by full names, without touching the generators that training draws from.

    Whatever the metric raises comes out, and a TypeError or ValueError if it does not give numbers.
    """
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            value = metric(generations)
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(figure) for key, figure in value.items()}
    return {name: float(value)}
