"""What a rank of a pipeline has sent: held until it is sent, and no longer; a send that fails is told."""

import time
import weakref

import pytest
import torch
import torch.distributed as dist

from hfdist.pipeline.channel import Sends
from hfdist.testing import run_ranks

pytestmark = pytest.mark.distributed


def exchange():
    """On rank 0: whether the tensor is held before the other rank takes it, and once it has; nothing else on rank 1."""
    if dist.get_rank() == 1:
        dist.barrier()
        dist.recv(torch.empty(1_000_000), 0)
        dist.barrier()
        return None
    sends = Sends(tells=False)
    tensor = torch.ones(1_000_000)
    storage = weakref.ref(tensor.untyped_storage())
    sends.add(dist.isend(tensor, 1))
    del tensor
    is_held = storage() is not None
    dist.barrier()
    dist.barrier()
    end = time.monotonic() + 20
    while storage() is not None and time.monotonic() < end:
        time.sleep(0.01)
    is_gone = storage() is None
    sends.wait()
    return is_held, is_gone


def test_gloo_holds_a_tensor_until_the_other_rank_has_it():
    assert run_ranks(exchange, 2)[0] == (True, True)


class Failing:
    def wait(self):
        raise RuntimeError("the peer is gone")


def test_a_send_that_fails_is_told_by_who_waits():
    sends = Sends(tells=False)
    sends.add(Failing())
    with pytest.raises(RuntimeError, match="the peer is gone"):
        sends.wait()
    sends.wait()
