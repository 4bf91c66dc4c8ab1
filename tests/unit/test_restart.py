"""Ranks that start again meet each other, and not what an earlier start has left in the store."""

import threading

import torch.distributed as dist

from hfdist.trainer.restart import agree_on_start


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
