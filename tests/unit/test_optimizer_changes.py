"""`optimizer.changes` on optimizers of several kinds, and when a step is taken back."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState

from hfdist.config.optimizer import OptimizerChange, OptimizerConfig, OptimizerName
from hfdist.errors import ConfigError
from hfdist.optim.registry import find_optimizer, make_over
from hfdist.run.optimizer_changes import OptimizerChanges, check_changes


def settings(*changes, **others):
    return OptimizerConfig(
        lr=0.1, weight_decay=0.2, changes=[OptimizerChange(**change) for change in changes], **others
    )


def begin(optimizer, *changes, **others):
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    config = settings(*changes, **others)
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


def test_a_rate_that_is_a_tensor_stays_one():
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD(groups(), lr=rate)
    callback, _ = begin(optimizer, {"step": 1, "lr": 0.2})
    callback.on_step_begin(None, TrainerState(global_step=1), None)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("name", "key", "arguments"),
    [
        ("sgd", "beta1", {}),
        ("adagrad", "eps", {}),
        ("adafactor", "eps", {}),
        ("rmsprop", "eps", {"eps": 1e-4}),
        ("lion_8bit", "eps", {}),
        ("rmsprop_bnb", "beta1", {}),
    ],
)
def test_a_value_that_the_optimizer_does_not_take_is_refused(name, key, arguments):
    config = settings({"step": 1, key: 0.5}, name=OptimizerName(name), arguments=arguments)
    if config.name.package is not None:
        pytest.importorskip(config.name.package.module)
    with pytest.raises(ConfigError, match="no such value"):
        check_changes(config)


def test_muons_own_eps_stays():
    config = settings({"step": 2, "eps": 1e-6, "beta1": 0.8}, name=OptimizerName.muon)
    check_changes(config)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Embedding(4, 4))
    optimizer = make_over(find_optimizer(config, warmup_steps=0), model, ())
    of_muon, *of_adamw = optimizer.param_groups
    before = {name: value for name, value in of_muon.items() if name != "params"}
    callback = OptimizerChanges(config)
    callback.on_train_begin(None, TrainerState(), None, lr_scheduler=LambdaLR(optimizer, lambda step: 1.0))
    for step, (eps, beta1) in ((1, (1e-8, 0.9)), (2, (1e-6, 0.8))):
        callback.on_step_begin(None, TrainerState(global_step=step), None)
        assert {name: of_muon[name] for name in before} == before
        assert [(group["eps"], group["betas"]) for group in of_adamw] == [(eps, (beta1, 0.95))] * 2
