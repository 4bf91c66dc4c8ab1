"""What a loss counts; rows of a user's dataset are sharded over data ranks, each once, and padding has no targets."""

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import default_data_collator

from hfdist.topology import Degrees, Topology
from hfdist.trainer.step.loss import Convention
from hfdist.trainer.step.sharded_dataloader import Blank, CountedRows, CountingCollator, ShardedBatches

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


def dealt(num_rows, micro_batch_size, data_size):
    batches = BatchSampler(SequentialSampler(range(num_rows)), micro_batch_size, drop_last=False)
    topologies = [Topology.of(Degrees(), rank=rank, world_size=data_size) for rank in range(data_size)]
    return [list(ShardedBatches(batches, topology)) for topology in topologies]


@pytest.mark.parametrize("num_rows", range(1, 14))
@pytest.mark.parametrize(("micro_batch_size", "data_size"), [(1, 1), (1, 2), (2, 3), (3, 2), (1, 4)])
def test_each_row_counts_once_and_in_its_step(num_rows, micro_batch_size, data_size):
    ranks = dealt(num_rows, micro_batch_size, data_size)
    assert len({len(batches) for batches in ranks}) == 1
    read = []
    for turn in zip(*ranks, strict=True):
        read += sorted(int(row) for batch in turn for row in batch if not isinstance(row, Blank))
        assert all(turn), "a rank without rows would leave the others waiting"
    # In order of steps: the rows of a global batch do not depend on the number of ranks.
    assert read == list(range(num_rows))


def collate_with_own_labels(rows):
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids.clone()}


def collate_into_one_row(rows):
    return {name: torch.tensor([[x for row in rows for x in row[name]]]) for name in ("input_ids", "labels")}


LABEL_NAMES = ("labels", "start_positions")


def test_what_fills_up_has_no_targets():
    rows = CountedRows([{"input_ids": [3, 4], "labels": [3, 4]}, {"input_ids": [5, 6], "labels": [5, 6]}])
    read = rows.__getitems__([1, Blank(0)])
    assert [counts for _, counts in read] == [True, False]
    assert CountingCollator(collate_with_own_labels, LABEL_NAMES)(read)["labels"].tolist() == [[5, 6], [-100, -100]]
    assert CountingCollator(collate_into_one_row, LABEL_NAMES)(read)["labels"].tolist() == [[5, 6, -100, -100]]
    assert CountingCollator(collate_into_one_row, LABEL_NAMES)([rows[0]])["labels"].tolist() == [[3, 4]]


def test_labels_of_any_kind_can_be_none():
    rows = CountedRows([{"labels": -100.0, "start_positions": 2}, {"labels": 1.5, "start_positions": 3}])
    batch = CountingCollator(default_data_collator, LABEL_NAMES)(rows.__getitems__([0, Blank(1)]))
    assert batch["labels"].isnan().tolist() == [False, True], "a number may be -100"
    assert batch["start_positions"].tolist() == [2, -100]
