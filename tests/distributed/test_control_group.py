"""Ranks of several machines tell each other the same in small groups as in one, with few connections."""

import os
import platform
import random
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hfdist.collectives import broadcast_text, gather_json, on_all_ranks, on_rank_zero, rank, world_size
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
    threads = threading.enumerate()
    wait, gathered = group.begin_largest([own, -own]), group.begin_gather(torch.tensor([[float(own)]] * 2))
    # One that came back from gloo at the end of the process would abort it.
    assert threading.enumerate() == threads
    texts = ["x" * (3000 * (number % 3)) + str(number) for number in range(size)]
    # Begun before, and not awaited: the order is the same on all ranks.
    assert gather_json(texts[own], group) == texts
    assert [wait(), wait()] == [[size - 1, 0]] * 2
    assert torch.stack(gathered()).tolist() == [[[float(number)]] * 2 for number in range(size)]
    assert on_rank_zero(lambda: texts[2] if own == 0 else None, group) == texts[2]
    assert on_rank_zero(lambda: own, group) == 0
    # Also where another rank has a longer text.
    assert broadcast_text(b"z" * 3000 * (1 + own), None) == b"z" * 3000

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


def speak_with_a_bound_device():
    """As DeepSpeed binds one: torch would look for a communicator of NCCL to split."""
    be_on([0, 1])
    dist.group.WORLD.bound_device_id = bound = torch.device("cuda", 0)
    group = ControlGroup()
    assert dist.group.WORLD.bound_device_id == bound
    return group.gather(b"%d" % rank())


def test_a_device_that_is_bound_to_the_default_group_is_nothing_to_groups_of_the_host():
    assert run_ranks(speak_with_a_bound_device, 2) == [[b"0", b"1"]] * 2


def lose_a_rank():
    be_on([0, 1])
    group = ControlGroup(timedelta(seconds=60))
    if rank() == 1:
        dist.destroy_process_group()
        return
    wait = group.begin_largest([1])
    for hear in (wait, wait, lambda: group.gather(b"")):
        with pytest.raises(RuntimeError, match=r"Connection closed by peer|Connection reset by peer|Broken pipe"):
            hear()


def test_what_failed_is_no_answer_to_who_asks_again():
    run_ranks(lose_a_rank, 2)


def find_timeouts():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(hours=3))
    groups = ControlGroup(), ControlGroup(timedelta(days=7))
    return [group.pairs._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_ranks_wait_as_long_as_in_the_default_group():
    assert run_ranks(find_timeouts, 1, group=False) == [[timedelta(hours=3), timedelta(days=7)]]
