"""A schedule goes through JSON and comes back as it was."""

import json
from collections import Counter, defaultdict

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR

from hfdist.trainer.checkpointing.schedule_state import restore_schedule, schedule_state


class Drops(LRScheduler):
    """Keeps what a user's own schedule may: a dict with a default, with whole numbers as keys."""

    def __init__(self, optimizer):
        self.drops = defaultdict(lambda: 1.0, {2: 0.5})
        super().__init__(optimizer)

    def get_lr(self):
        return [group["lr"] * self.drops[self.last_epoch] for group in self.optimizer.param_groups]


def test_a_rate_that_is_a_tensor_is_set_in_place():
    def begin():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(1.0))
        return LambdaLR(optimizer, lambda step: 0.5**step)

    saved, resumed = begin(), begin()
    saved.optimizer.step()
    saved.step()
    rate = resumed.optimizer.param_groups[0]["lr"]
    restore_schedule(resumed, json.loads(json.dumps(schedule_state(saved))))
    assert resumed.optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5


@pytest.mark.parametrize(
    ("make", "kind"), [(Drops, defaultdict), (lambda optimizer: MultiStepLR(optimizer, [2, 2, 4]), Counter)]
)
def test_a_schedule_goes_on_after_json(make, kind):
    def begin():
        return make(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))

    whole, saved, resumed = begin(), begin(), begin()
    for schedule in (whole, saved):
        schedule.optimizer.step()
        schedule.step()
    restore_schedule(resumed, json.loads(json.dumps(schedule_state(saved))))
    assert kind in {type(value) for value in vars(resumed).values()}
    for _ in range(4):
        for schedule in (whole, resumed):
            schedule.optimizer.step()
            schedule.step()
        assert resumed.get_last_lr() == whole.get_last_lr()
        assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
