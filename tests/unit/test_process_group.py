"""Ranks that start again meet each other, and not what an earlier start has left in the store."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

from hfdist.testing import run_ranks
from hfdist.trainer.fault_tolerance.process_group import agree_on_start, start_group_under_torchrun


def start(port, world_size):
    """Let the ranks of one start agree, each with its own connection, and give what each got."""
    tokens = {}

    def agree(rank):
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        tokens[rank] = agree_on_start(store, rank, world_size)

    threads = [threading.Thread(target=agree, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return tokens


def test_each_start_has_a_token_of_its_own():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = start(server.port, 4), start(server.port, 3)
    assert sorted(first) == [0, 1, 2, 3]
    assert sorted(second) == [0, 1, 2]
    assert len(set(first.values())) == len(set(second.values())) == 1
    assert set(first.values()) != set(second.values())


def test_a_start_that_was_ended_while_it_asked_is_not_in_the_way():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("asks-2", "a name that nobody has any more")
    third = start(server.port, 3)
    assert sorted(third) == [0, 1, 2]
    assert len(set(third.values())) == 1


def started_with(port, timeout_seconds):
    """The seconds that a collective of the group may take."""
    place = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    start_group_under_torchrun(timeout_seconds=timeout_seconds)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()


@pytest.mark.parametrize(("asked", "given"), [(None, 1800), (7200, 7200)])
def test_the_group_has_the_timeout_that_was_asked_for(asked, given):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(started_with, 1, server.port, asked, group=False) == [given]
