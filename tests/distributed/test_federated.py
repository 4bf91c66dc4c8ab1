"""Federated islands: clients with data of their own."""

import pytest

from hfdist.records import RunFolder, read_lines
from tests.distributed.island_runs import Island, difference, overrides_of, served
from tests.distributed.runs import losses, pretrain, weights
from tests.marks import many

pytestmark = pytest.mark.distributed

EVERY = 4
COMMON = ("optimizer.schedule=constant", "optimizer.warmup_steps=0", "train.micro_batch_size=2", "data.packing=concat",
          "data.sequence_length=32", "optimizer.eps=1e-5", f"train.max_steps={EVERY}")  # fmt: skip
CLIENTS = (("data.seed=1", "train.global_batch_size=8"), ("data.seed=2", "train.global_batch_size=4"))
"""Each with its order of the data; the second has half of the tokens."""


def run_clients(folder, *overrides, clients=CLIENTS, num_ranks=1):
    """Run clients to their end; gives their run folders."""
    with served() as address:
        islands = [
            Island(
                folder / f"client-{index}",
                num_ranks,
                *overrides_of(address, index, len(clients), "islands=federated", *COMMON, *own, *overrides),
            )
            for index, own in enumerate(clients)
        ]
        failures = [found for island in islands if (found := island.wait()) is not None]
        for island in islands:
            island.kill()
    assert not failures, failures[0]
    return [island.folder for island in islands]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, imported, reads_little):
    """The weights with which all begin, and those that each client learns in a round on its own."""
    folder = tmp_path_factory.mktemp("alone")
    runs = [pretrain(folder / f"{place}", 1, *COMMON, *own) for place, own in enumerate(CLIENTS)]
    still = pretrain(folder / "still", 1, *COMMON, "optimizer.lr=1e-30", "optimizer.weight_decay=0")
    return [weights(run) for run in (still, *runs)]


def mean_of(alone):
    """Weighted by tokens."""
    _, first, second = alone
    return {name: (2 * first[name] + second[name]) / 3 for name in first}


@pytest.mark.parametrize(("num_ranks", "layout"), [many(1, "single"), (2, "fsdp2")])
def test_a_round_is_the_mean_of_what_clients_learn_weighted_by_tokens(tmp_path, alone, num_ranks, layout):
    folders = run_clients(tmp_path, f"strategy={layout}", f"islands.every={EVERY}", num_ranks=num_ranks)
    assert difference(weights(folders[0]), mean_of(alone)) < (1e-6 if layout == "single" else 1e-5)
    assert difference(weights(folders[0]), weights(folders[1])) == 0
    assert difference(alone[1], alone[2]) > 1e-3


@pytest.mark.many  # its formula is in tests/unit/islands/test_outer.py
def test_fedadam_steps_along_the_mean(tmp_path, alone):
    rule = ("islands.outer_optimizer=adam", "islands.outer_lr=0.01", "islands.outer_momentum=0.9")
    folders = run_clients(tmp_path, f"islands.every={EVERY}", *rule)
    wanted = {}
    for name, mean in mean_of(alone).items():
        change = alone[0][name] - mean
        wanted[name] = alone[0][name] - 0.01 * 0.1 * change / ((0.01 * change**2).sqrt() + 1e-3)
    assert difference(weights(folders[0]), wanted) < 1e-6


def test_fedprox_holds_the_weights_to_the_begin_of_the_round(tmp_path, alone):
    # Each step goes the whole way back.
    folders = run_clients(tmp_path, "islands.every=2", "optimizer.lr=0.001", "islands.proximal=1000")
    assert difference(weights(folders[0]), alone[0]) < 1e-7


@pytest.mark.many
def test_fedprox_holds_them_a_little(tmp_path, alone):
    free, held = (
        run_clients(tmp_path / f"{strength}", f"islands.every={EVERY}", f"islands.proximal={strength}")[0]
        for strength in (0, 50)
    )
    assert difference(weights(held), alone[0]) < 0.9 * difference(weights(free), alone[0])


def test_a_share_of_the_clients_trains_in_each_round_and_all_end_alike(tmp_path):
    clients = [(f"data.seed={seed}", "train.global_batch_size=4") for seed in range(3)]
    keys = ("train.max_steps=12", "islands.every=2", "islands.participation=0.5", "checkpoint=none")
    folders = run_clients(tmp_path, *keys, clients=clients)
    for folder in folders[1:]:
        assert difference(weights(folder), weights(folders[0])) == 0
    lines = [line for folder in folders for line in read_lines(RunFolder(folder).metrics)]
    assert {line["islands/members"] for line in lines if "islands/members" in line} == {2}
    # Two of three in each of six rounds of two steps; the last may have ended a round that all saw.
    assert sum(len(losses(folder)) for folder in folders) == 2 * 12
