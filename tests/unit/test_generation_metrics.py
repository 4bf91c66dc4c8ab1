"""Metrics by name, out of installed packages and never out of a config."""

import random

import numpy as np
import pytest
import torch

import hfdist
from hfdist.errors import ConfigError
from hfdist.trainer.evaluation.metrics import GROUP, compute, exact_match, load_metrics, word_f1
from tests.packages import install_package

SOURCE = """
import random, numpy, torch
def length(generations):
    random.random(), numpy.random.rand(), torch.rand(1)
    return {"characters": sum(len(one.text) for one in generations), "count": len(generations)}
def fails(generations):
    raise RuntimeError("no such thing")
NUMBER = 3
"""


def generations(*pairs):
    return [hfdist.Generation(prompt="p", text=text, reference=reference) for text, reference in pairs]


@pytest.fixture
def package(tmp_path, monkeypatch):
    return install_package(
        tmp_path, monkeypatch, "toymetrics", SOURCE, GROUP, length="length", number="NUMBER", gone="nothing"
    )


def test_the_built_in_ones():
    assert exact_match(generations((" a b\n", "a b"), ("a", "b"))) == 0.5
    assert word_f1(generations(("a b", "b a"), ("a", "b"), ("", ""), ("a a b", "a c"))) == (1 + 0 + 1 + 0.4) / 4


def test_a_metric_of_an_installed_package_is_found(package):
    metric = load_metrics(["exact_match", "length"])["length"]
    assert compute("length", metric, generations(("abc", ""))) == {"length_characters": 3.0, "length_count": 1.0}


def test_a_metric_does_not_touch_the_generators_of_the_training(package):
    metric = load_metrics(["length"])["length"]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    wanted = random.random(), np.random.rand(), torch.rand(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    compute("length", metric, generations(("a", "b")))
    assert (random.random(), np.random.rand(), torch.rand(1)) == wanted


@pytest.mark.parametrize(
    ("name", "what", "hint"),
    [
        ("exact_macth", "no installed package offers", "evaluate.metrics=[exact_match]"),
        ("lenght", "no installed package offers", "evaluate.metrics=[length]"),
        ("os.system", "no installed package offers", "entry point"),
        ("number", "is no function", ""),
        ("gone", "cannot be imported: AttributeError", ""),
    ],
)
def test_what_cannot_be_used_is_said(package, name, what, hint):
    with pytest.raises(ConfigError, match=what) as caught:
        load_metrics([name])
    assert caught.value.where == "evaluate.metrics"
    assert hint in str(caught.value.hint)


def test_two_packages_with_one_name_are_told_apart_by_nobody(package, tmp_path, monkeypatch):
    install_package(tmp_path / "other", monkeypatch, "othermetrics", SOURCE, GROUP, length="length")
    with pytest.raises(ConfigError, match="several installed packages") as caught:
        load_metrics(["length"])
    assert caught.value.found == "length: othermetrics:length, toymetrics:length"
