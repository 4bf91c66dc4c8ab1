"""How the benchmark of growth counts bytes: in two ways that agree, and as theory has it."""

import contextlib
import socket

import pytest
import torch
import torch.distributed as dist

from benchmarks.growth.theory import exponent
from benchmarks.growth.traffic import socket_bytes
from hfdist.sent_bytes import SentBytes
from hfdist.testing import run_ranks

NUM_ELEMENTS = 1 << 20


def count() -> dict[str, tuple[int, int]]:
    whole, share = torch.ones(NUM_ELEMENTS), torch.ones(NUM_ELEMENTS // dist.get_world_size())
    collectives = {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: dist.all_gather(list(whole.chunk(dist.get_world_size())), share),
    }
    counts = {}
    for kind, run in collectives.items():
        dist.barrier()
        before, mode = socket_bytes(), SentBytes()
        with mode:
            run()
        counts[kind] = mode.num_bytes.total(), socket_bytes() - before
    # A rank that ends closes its peers' sockets, and with a socket goes its count.
    dist.barrier()
    return counts


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_both_counts_are_those_of_a_ring(num_ranks):
    share = (num_ranks - 1) / num_ranks
    for counts in run_ranks(count, num_ranks):
        for kind, times in (("all-reduce", 2), ("all-gather", 1)):
            expected = times * share * 4 * NUM_ELEMENTS
            assert counts[kind] == (pytest.approx(expected), pytest.approx(expected, rel=0.01))


def test_bytes_that_wait_for_a_slow_reader_are_counted():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as writer:
        reader, _ = server.accept()
        with reader:
            before = socket_bytes()
            writer.setblocking(False)
            num_written = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    num_written += writer.send(bytes(1 << 16))
            assert socket_bytes() - before == num_written


def test_the_exponent_is_that_of_a_power():
    assert exponent({n: 3.0 * n**1.5 for n in (1, 2, 4, 8)}) == pytest.approx(1.5)
