"""`optimizer.changes` trains as a run that is stopped there and goes on with other overrides, bit by bit."""

import pytest
import torch

from tests.distributed.runs import losses, pretrain, weights
from tests.marks import many

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("cache_dir", "short_library")]

BEGUN = ("optimizer.schedule=constant", "optimizer.warmup_steps=1", "checkpoint=default",
         "checkpoint.every=1", "checkpoint.allow_changes=true", "train.micro_batch_size=2")  # fmt: skip
LATER = {"lr": "3e-3", "weight_decay": "0.3", "beta2": "0.9", "eps": "1e-6"}


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        many(1, ("optimizer.name=muon",)),
        (2, ("strategy=zero1", "optimizer.base_width=32")),
        many(2, ("strategy=fsdp2", "train.precision=bf16")),
        many(2, ("strategy=pipeline", "optimizer.base_width=16")),
    ],
)
def test_changes_train_as_other_starts_with_other_overrides(tmp_path, processes, layout):
    """The one run stops at another step than those of its changes."""
    names = ", ".join(f"{key}: {value}" for key, value in LATER.items())
    changes = [f"optimizer.changes=[{{step: 2, {names}}}, {{step: 4, lr: 1e-3}}]"]
    later = [f"optimizer.{key}={value}" for key, value in LATER.items()]
    one, other, unchanged = (tmp_path / name for name in ("one", "other", "unchanged"))
    for last, overrides in ((3, changes), (5, changes)):
        pretrain(one, processes, *layout, *BEGUN, *overrides, f"train.max_steps={last}")
    for last, overrides in ((2, []), (4, later), (5, [*later, "optimizer.lr=1e-3"])):
        pretrain(other, processes, *layout, *BEGUN, *overrides, f"train.max_steps={last}")
    pretrain(unchanged, processes, *layout, *BEGUN, "train.max_steps=5")
    assert len(losses(one)) == 5
    assert losses(one) == losses(other)
    assert losses(one)[:3] == losses(unchanged)[:3]
    assert losses(one)[3:] != losses(unchanged)[3:]
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
