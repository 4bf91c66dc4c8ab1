"""`optimizer.changes` on optimizers of several kinds, and when a step is taken back."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState

from hfdist.config.optimizer import OptimizerChange, OptimizerConfig
from hfdist.errors import ConfigError
from hfdist.run.optimizer_changes import OptimizerChanges


def begin(optimizer, *changes):
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    config = OptimizerConfig(lr=0.1, weight_decay=0.2, changes=[OptimizerChange(**change) for change in changes])
    callback = OptimizerChanges(config)
    callback.on_train_begin(None, TrainerState(), None, lr_scheduler=scheduler)
    return callback, scheduler


def groups():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    # As hfdist makes them: nothing decays in the second, and the third has a rate of its own.
    return [
        {"params": weights[:1], "weight_decay": 0.2},
        {"params": weights[1:2], "weight_decay": 0.0},
        {"params": weights[2:], "lr": 0.3, "weight_decay": 0.2},
    ]


def test_each_group_gets_its_share_from_the_step_on():
    optimizer = torch.optim.AdamW(groups(), lr=0.1)
    callback, scheduler = begin(
        optimizer, {"step": 2, "lr": 0.2, "weight_decay": 0.4, "beta1": 0.5}, {"step": 4, "lr": 0.05}
    )
    for step, rates in enumerate([[0.1, 0.1, 0.3]] * 2 + [[0.2, 0.2, 0.6]] * 2 + [[0.05, 0.05, 0.15]]):
        callback.on_step_begin(None, TrainerState(global_step=step), None)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(rates)
        assert scheduler.get_last_lr() == pytest.approx(rates)
        scheduler.step()
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(rates)
    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.0, 0.4])
    assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.999)] * 3


def test_a_step_that_is_taken_back_changes_nothing():
    optimizer = torch.optim.AdamW(groups(), lr=0.1)
    callback, scheduler = begin(optimizer, {"step": 1, "lr": 0.2})
    before = scheduler.state_dict()
    for step in (0, 1):
        callback.on_step_begin(None, TrainerState(global_step=step), None)
    # As after gradients that are not finite.
    scheduler.load_state_dict({**before, "base_lrs": [0.1, 0.1, 0.3]})
    for group, rate in zip(optimizer.param_groups, (0.1, 0.1, 0.3), strict=True):
        group["lr"] = rate
    callback.on_step_begin(None, TrainerState(global_step=1), None)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.2, 0.6])
    callback.on_step_begin(None, TrainerState(global_step=0), None)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.1, 0.3])


def test_a_value_that_the_optimizer_does_not_have_is_told():
    with pytest.raises(ConfigError, match="no such value"):
        begin(torch.optim.SGD(groups(), lr=0.1), {"step": 1, "beta1": 0.5})
