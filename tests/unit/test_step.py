"""What a loss counts; rows of a user's dataset are sharded over data ranks, each once, and padding has no targets."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, get_worker_info
from transformers import default_data_collator

from hfdist.config.strategy import StrategyConfig
from hfdist.testing import run_ranks
from hfdist.trainer.engine_trainer import EngineTrainer
from hfdist.trainer.step.convention import Convention
from hfdist.trainer.step.global_batches import GlobalBatches, Share, fingerprint
from hfdist.trainer.step.same_draws import SameOrder
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


def _store_flos():
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(topology=SimpleNamespace(data=1)),
        args=SimpleNamespace(world_size=2, device=torch.device("cpu")),
        state=SimpleNamespace(total_flos=1.0),
        current_flos=2**24 + 1,
    )
    EngineTrainer.store_flos(trainer)
    return trainer.state.total_flos, trainer.current_flos


def test_operations_are_summed_as_they_are():
    """float32 has no number for so many, and both ranks hold parts of the same model."""
    assert run_ranks(_store_flos, 2) == [(2**24 + 2, 0)] * 2


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
    # The loss takes these in place of the others, and they are not moved again.
    moved = {"labels": LABELS, "shift_labels": torch.full((2, 4), -100)}
    for moves in (False, True):
        own = convention(moves=moves)
        assert (own.prepared(moved, own.weight(moved))["shift_labels"] == 0).all()


def dealt(num_rows, micro_batch_size, data_size):
    batches = BatchSampler(SequentialSampler(range(num_rows)), micro_batch_size, drop_last=False)
    topologies = [StrategyConfig().topology(data_size, rank=rank) for rank in range(data_size)]
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


class Shuffled(IterableDataset):
    """Rows in an order that it draws as users do, from generators that all share."""

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __iter__(self):
        worker = get_worker_info()
        mine = range(self.num_rows) if worker is None else range(worker.id, self.num_rows, worker.num_workers)
        rows = random.sample(list(mine), len(mine))
        for row in rows:
            yield rows[0] * 0 + row + int(np.random.rand() * 0) + int(torch.rand(()) * 0)


def micro_batches(num_rows, micro_batch_size, num_microbatches, num_ranks, *, again=False, num_workers=0, epoch=0):
    """Give the micro batches of each rank, as lists of rows and of rows that only fill up."""
    found = []
    for rank in range(num_ranks):
        torch.manual_seed(rank)
        random.seed(rank)
        counted = None if again else lambda rows: [row if counts else -1 for row, counts in rows]
        sizes = {"micro_batch_size": micro_batch_size, "num_microbatches": num_microbatches}
        share = Share(counted, list, **sizes, rank=rank, num_ranks=num_ranks)
        rows = DataLoader(Shuffled(num_rows), batch_size=micro_batch_size)
        batches = GlobalBatches(rows, share, seed=5, is_training=True, settings={"num_workers": num_workers})
        batches.set_epoch(epoch)
        before = torch.get_rng_state()
        found.append(list(batches))
        assert torch.equal(torch.get_rng_state(), before), "what training draws does not depend on the data"
    return found


def steps_of(ranks, num_microbatches):
    """Give the rows of each step, over all ranks and micro batches, without what only fills up."""
    assert len({len(own) for own in ranks}) == 1
    assert len(ranks[0]) % num_microbatches == 0
    firsts = range(0, len(ranks[0]), num_microbatches)
    parts = [[own[first : first + num_microbatches] for own in ranks] for first in firsts]
    return [[row for turn in zip(*part, strict=True) for own in turn for row in own if row >= 0] for part in parts]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_step_has_the_same_rows_of_an_iterable_in_every_layout(num_workers):
    expected = steps_of(micro_batches(11, 8, 1, 1, num_workers=num_workers), 1)
    assert sorted(row for step in expected for row in step) == list(range(11))
    for sizes in [(2, 2, 2), (1, 8, 1), (4, 1, 2)]:
        assert steps_of(micro_batches(11, *sizes, num_workers=num_workers), sizes[1]) == expected
    assert steps_of(micro_batches(11, 8, 1, 1, num_workers=num_workers, epoch=1), 1) != expected


def test_workers_that_stay_take_another_order_in_another_epoch():
    share = Share(None, list, micro_batch_size=8, num_microbatches=1, rank=0, num_ranks=1)
    kept = {"num_workers": 1, "persistent_workers": True}
    batches = GlobalBatches(DataLoader(Shuffled(8)), share, seed=5, is_training=True, settings=kept)
    orders = []
    for epoch in (0, 1, 0):
        batches.set_epoch(epoch)
        orders.append(list(batches))
    assert orders[0] == orders[2] != orders[1]


def test_losses_that_are_no_sums_read_rows_again_and_never_give_a_part_of_a_step():
    [whole], parts = micro_batches(5, 4, 1, 1, again=True), micro_batches(5, 1, 2, 2, again=True)
    assert [len(rows) for rows in whole] == [4, 4]
    assert steps_of(parts, 2) == whole


def test_rows_are_told_apart_by_all_that_they_hold():
    rows = [{"input_ids": torch.tensor([1, 2]), "text": "a"}, {"input_ids": np.array([1, 2]), "x": [1.0, True]}]
    assert fingerprint(rows) == fingerprint([dict(row) for row in rows])
    for number, name, value in ((0, "text", "b"), (1, "x", [1.0, False]), (0, "input_ids", torch.tensor([1, 3]))):
        other = [dict(row) for row in rows]
        other[number][name] = value
        assert fingerprint(other) != fingerprint(rows)


def test_an_order_that_a_sampler_draws_is_that_of_the_seed_and_the_epoch():
    class Drawing(SequentialSampler):
        def __iter__(self):
            return iter(torch.randperm(len(self)).tolist())

    orders = []
    for seed, epoch, drawn in ((1, 0, 0), (1, 0, 3), (1, 1, 3), (2, 0, 3)):
        torch.rand(drawn)
        sampler = SameOrder(Drawing(range(20)), seed)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[1]
    # A seed more is an epoch more, as with accelerate's sampler.
    assert orders[2] == orders[3] != orders[0]
