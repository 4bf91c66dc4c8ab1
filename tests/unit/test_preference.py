"""What an evaluation of pairs asks of its held-out set."""

import weakref
from types import SimpleNamespace

import torch

from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig, TaskName
from hfdist.data.marks import reject_labels
from hfdist.tune.preference import Preferences


class Held(dict):
    """A batch whose end can be seen."""


def one_pair():
    """A pair of a chosen answer of three tokens and a rejected one of one."""
    labels = torch.tensor([[IGNORED, 3, 4, 5, IGNORED, 6]])
    labels[:, 4:] = reject_labels(labels[:, 4:])
    return Held(labels=labels, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1]]))


def test_tokens_are_counted_and_no_held_out_batch_is_kept():
    objective = Preferences(TaskConfig(name=TaskName.dpo, nll_weight=1.0), None)
    objective._training = SimpleNamespace(args=SimpleNamespace(device="cpu"))
    made, alive = [], []

    def batches():
        for _ in range(5):
            alive.append(sum(one() is not None for one in made))
            batch = one_pair()
            made.append(weakref.ref(batch))
            yield batch
            del batch

    objective.begin_evaluation(batches(), None)
    assert objective._pairs_per_token.item() == torch.tensor(1 / 3).item()
    assert len(made) == 5
    assert max(alive) <= 1


def test_without_a_loss_of_tokens_no_held_out_batch_is_read():
    batches = iter([one_pair()])
    Preferences(TaskConfig(name=TaskName.dpo), None).begin_evaluation(batches, None)
    assert len([*batches]) == 1
