"""What a loss counts, and what it is given to count."""

import torch

from hfdist.trainer.step.loss import Convention

LABELS = torch.tensor([[1, 2, -100, 4], [-100, -100, 5, 6]])


def convention(**fields):
    return Convention(**{"shifts": False, "divides": False, "label_names": ("labels", "start_positions")} | fields)


def test_targets_are_what_the_loss_compares_with():
    assert convention().weight({"labels": LABELS}) == 5
    assert convention(shifts=True).weight({"labels": LABELS}) == 4, "the first label of a row is no target"
    assert convention(shifts=True).weight({"labels": LABELS, "shift_labels": LABELS}) == 5
    assert convention(shifts=True).weight({"labels": torch.tensor([0, 2, 1])}) == 3, "of rows, not of tokens"
    assert convention().weight({"labels": torch.tensor([-100.0, torch.nan])}) == 1
    assert convention().weight({"start_positions": torch.tensor([3, -100])}) == 1
    assert convention().weight({"pixels": torch.zeros(3, 2)}) == 3, "without labels, rows"


def test_labels_that_the_model_does_not_shift_are_moved_for_it():
    moving = convention(moves=True)
    weight = moving.weight({"labels": LABELS})
    prepared = moving.prepared({"labels": LABELS}, weight)["labels"]
    assert weight == 4
    assert prepared.tolist() == [[2, -100, 4, -100], [-100, 5, 6, -100]]


def test_without_targets_there_is_a_mean_all_the_same():
    for labels in (torch.full((2, 3), -100), torch.full((2,), torch.nan)):
        batch = {"labels": labels, "input_ids": torch.ones(2, 3)}
        prepared = convention().prepared(batch, convention().weight(batch))
        assert (prepared["labels"] == 0).all()
        assert prepared["input_ids"] is batch["input_ids"]
