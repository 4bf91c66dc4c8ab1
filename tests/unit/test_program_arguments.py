"""What transformers' Trainer takes from a program, a Trainer with a strategy takes as well."""

from functools import partial

import pytest
import transformers
from torch import nn
from transformers import TrainingArguments

from hfdist.strategies.base import Strategy
from hfdist.strategies.from_python import strategy_by_name
from hfdist.trainer.whole_model import find_model


def make(trial, size):
    assert trial is None
    return nn.Linear(size, size)


@pytest.mark.parametrize("model_init", [partial(make, size=2), partial(make, None, 2), lambda trial: make(trial, 2)])
def test_a_function_that_makes_the_model_may_be_bound_in_part(tmp_path, model_init):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    arguments = {"model_init": model_init, "args": args}
    assert find_model(transformers.Trainer, arguments, strategy_by_name("single", args)).in_features == 2


@pytest.mark.parametrize("max_grad_norm", [0.0, None, -1.0, 0.5])
def test_a_strategy_by_its_name_takes_arguments_that_clip_nothing(tmp_path, max_grad_norm):
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_grad_norm=max_grad_norm)
    assert isinstance(strategy_by_name("single", args), Strategy)
