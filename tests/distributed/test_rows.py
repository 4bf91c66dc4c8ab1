"""Rows of a user's own data in training and evaluation: the same in each step, in every layout."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

import hfdist
from hfdist.collectives import gather_json
from hfdist.config.strategy import Sharding
from hfdist.errors import DataError
from hfdist.testing import run_ranks
from tests.distributed.trainers import make_arguments, make_model, make_strategy, make_trainer, on_ranks, uneven_items

pytestmark = pytest.mark.distributed

LAYOUTS = {"ddp": {"micro_batch_size": 2}, "pipeline": {"micro_batch_size": 2, "pipeline": 2},
           "fsdp2": {"sharding": Sharding.fsdp2}}  # fmt: skip
STREAM_STEPS = 4
"""Of 11 rows, 8 a step: two passes."""


class Stream(IterableDataset):
    """Rows in an order that it draws anew in each pass, from the generator that all share."""

    def __init__(self, num_rows, seeds=lambda: None):
        self.num_rows, self.seeds = num_rows, seeds

    def __iter__(self):
        rows, generator = uneven_items(self.num_rows), None
        if (seed := self.seeds()) is not None:
            generator = torch.Generator().manual_seed(seed)
        for number in torch.randperm(len(rows), generator=generator).tolist():
            yield rows[number]


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def on_a_stream(folder, **layout):
    trainer = make_trainer(folder, make_strategy(**layout), train_dataset=Stream(11), eval_dataset=Stream(5))
    trainer.train()
    return [*losses(trainer), trainer.evaluate()["eval_loss"]]


class OwnLoader(hfdist.Trainer):
    """Gives micro batches of two rows without a length, and a list of batches for evaluation."""

    def get_train_dataloader(self):
        return DataLoader(Stream(5, seeds=lambda: 1), batch_size=2)

    def get_eval_dataloader(self, eval_dataset=None):
        return list(DataLoader(uneven_items(5), batch_size=2))


class Lengths(list):
    """Rows of different lengths; notes which are read."""

    def __init__(self):
        super().__init__(
            {k: v[: 4 + number % 7] for k, v in row.items()} for number, row in enumerate(uneven_items(20))
        )


def padded(read):
    def collate(rows):
        read.extend(float(row["input_ids"].float().mean()) for row in rows)
        longest = max(len(row["input_ids"]) for row in rows)

        def pad(row, name, value):
            return torch.cat([row[name], torch.full((longest - len(row[name]),), value)])

        return {name: torch.stack([pad(row, name, value) for row in rows])
                for name, value in {"input_ids": 0, "labels": -100}.items()}  # fmt: skip

    return collate


def grouped_by_length(folder, **layout):
    read: list[float] = []
    arguments = {"train_sampling_strategy": "group_by_length", "max_steps": 6}
    strategy = make_strategy(**layout)
    named = {"train_dataset": Lengths(), "eval_dataset": None, "data_collator": padded(read)}
    torch.manual_seed(strategy.topology.rank)
    make_trainer(folder, strategy, arguments=arguments, **named).train()
    torch.distributed.barrier()
    return read


def in_each_layout(folder):
    found = {}
    for name, layout in LAYOUTS.items():
        found[name] = on_a_stream(folder, **layout)
    own = make_trainer(folder, make_strategy(micro_batch_size=2, pipeline=2), kind=OwnLoader)
    found["own loss"] = own.evaluate()["eval_loss"]
    for name in ("ddp", "pipeline"):
        read = grouped_by_length(folder, **LAYOUTS[name])
        ranks = gather_json(read)
        found[f"grouped {name}"] = ranks if name == "ddp" else ranks[0]
    return found


def in_one_process(folder):
    own = make_trainer(folder, make_strategy(micro_batch_size=2), kind=OwnLoader)
    own.train()
    return {
        "stream": on_a_stream(folder, micro_batch_size=1),
        "own": losses(own),
        "own loss": own_loss_of_the_original(folder),
        "grouped": grouped_by_length(folder, micro_batch_size=4),
    }


def own_loss_of_the_original(folder):
    trainer = make_trainer(folder, make_strategy(micro_batch_size=2), eval_dataset=uneven_items(5))
    return trainer.evaluate()["eval_loss"]


def test_a_step_has_the_same_rows_in_each_layout(tmp_path):
    expected = run_ranks(in_one_process, 1, tmp_path)[0]
    assert len(expected["stream"]) == STREAM_STEPS + 1
    # Three micro batches of two, two and one rows are one step, as the pass has no more.
    assert len(expected["own"]) == 4
    found = run_ranks(in_each_layout, 2, tmp_path)[0]
    for name in LAYOUTS:
        assert found[name] == pytest.approx(expected["stream"], rel=1e-5), name
    assert found["own loss"] == pytest.approx(expected["own loss"], rel=1e-5)
    everything = sorted(float(row["input_ids"].float().mean()) for row in Lengths())
    epochs = [expected["grouped"][:20], expected["grouped"][20:40]]
    assert [sorted(epoch) for epoch in epochs] == [everything] * 2
    assert epochs[0] != epochs[1]
    assert found["grouped pipeline"][:40] == expected["grouped"][:40]
    first, second = found["grouped ddp"]
    assert sorted(first[:8] + second[:8]) == sorted(expected["grouped"][:16])


@on_ranks(2)
def test_rows_that_cannot_be_dealt_end_in_a_message(tmp_path):
    for rows, message in ((Stream(0), "a pass over the training data gave no step, after step 0"),
                          (Stream(9, seeds=torch.distributed.get_rank), "the ranks read different rows")):  # fmt: skip
        trainer = make_trainer(tmp_path, make_strategy(micro_batch_size=2), train_dataset=rows)
        with pytest.raises(DataError, match=message):
            trainer.train()


class Plain(Trainer):
    """As a script has it that prepares its own loader."""

    def get_eval_dataloader(self, eval_dataset=None):
        return self.accelerator.prepare(DataLoader(uneven_items(5), batch_size=2))


@on_ranks(1)
def test_workers_of_evaluations_are_those_of_the_arguments(tmp_path):
    workers = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True}
    ours = make_trainer(tmp_path, arguments=workers)
    given = make_arguments(tmp_path, **workers)
    theirs = Trainer(make_model(), given, eval_dataset=uneven_items(6))
    for name in ("num_workers", "prefetch_factor", "persistent_workers"):
        assert getattr(ours.get_eval_dataloader(), name) == getattr(theirs.get_eval_dataloader(), name), name
    # Workers that persist read the data that is asked for.
    first, other = ours.evaluate()["eval_loss"], ours.evaluate(uneven_items(9)[6:])["eval_loss"]
    assert first != other
    assert ours.evaluate()["eval_loss"] == first
    kind = type("Mixed", (hfdist.DistributedTrainerMixin, Plain), {})
    assert make_trainer(tmp_path, kind=kind).evaluate()["eval_tokens"] > 0
