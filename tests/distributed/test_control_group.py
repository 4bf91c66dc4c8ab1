"""Ranks of several machines tell each other the same in small groups as in one, with few connections."""

import os
import platform
import random

import pytest
import torch
import torch.distributed as dist

from hfdist.collectives import gather_json, on_all_ranks, on_rank_zero, rank, world_size
from hfdist.control_group import ControlGroup, exchange_json, machines
from hfdist.errors import DataError
from hfdist.testing import run_ranks
from tests.marks import many

pytestmark = pytest.mark.distributed


def count_descriptors():
    return len(os.listdir("/proc/self/fd"))


def be_on(machine_of_rank):
    """Give this rank's host the name of its machine."""
    platform.node = lambda: f"machine-{machine_of_rank[rank()]}"


def speak(machine_of_rank):
    """Everything that a group carries, small and large; what each rank should hear is known by its number."""
    be_on(machine_of_rank)
    own, size, before = rank(), world_size(), count_descriptors()
    group = ControlGroup()
    wait, gathered = group.begin_largest([own, -own]), group.begin_gather(torch.tensor([[float(own)]] * 2))
    texts = ["x" * (3000 * (number % 3)) + str(number) for number in range(size)]
    # Begun before, and not awaited: the order is the same on all ranks.
    assert gather_json(texts[own], group) == texts
    assert [wait(), wait()] == [[size - 1, 0]] * 2
    assert torch.stack(gathered()).tolist() == [[[float(number)]] * 2 for number in range(size)]
    assert on_rank_zero(lambda: texts[2] if own == 0 else None, group) == texts[2]
    assert on_rank_zero(lambda: own, group) == 0

    def fail():
        if own == size - 1:
            raise DataError("it is bad", where="a file")

    with pytest.raises(DataError, match="it is bad"):
        on_all_ranks(fail, group)
    assert exchange_json([[own, to, "y" * (own * to)] for to in range(size)]) == [
        [sender, own, "y" * (sender * own)] for sender in range(size)
    ]
    made = count_descriptors() - before
    # In a circle, and to who comes late.
    for distance in (1, 2):
        heard = torch.zeros(1000)
        to, sender = (own + distance) % size, (own - distance) % size
        sent = torch.full((1000,), float(own))
        for work in (dist.isend(sent, to, group.pairs, distance), dist.irecv(heard, sender, group.pairs, distance)):
            work.wait()
        assert heard.eq(sender).all()
    return made, machines()


@pytest.mark.parametrize(
    "machine_of_rank",
    [
        pytest.param([0] * 3, id="one machine"),
        pytest.param([0, 0, 1, 1, 2, 2, 3, 3], id="four machines"),
        # Neither equal shares nor neighbours.
        pytest.param([0, 1, 0, 2, 1, 0], id="mixed"),
        many([0, 1, 2], id="a rank a machine"),
        many([number // 8 for number in range(64)], id="64 ranks"),
    ],
)
def test_all_ranks_hear_the_same_as_in_one_group(machine_of_rank):
    random.seed(0)
    spoken = run_ranks(speak, len(machine_of_rank), machine_of_rank)
    (found,) = {str(of_rank) for _, of_rank in spoken}
    expected = {}
    for number, machine in enumerate(machine_of_rank):
        expected.setdefault(machine, []).append(number)
    assert found == str(list(expected.values()))
