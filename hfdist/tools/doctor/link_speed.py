"""The measurement of a link by its two ranks: its latency, how far their clocks differ, and its speeds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from hfdist.tools.doctor.pairs import SIZES_MIB, Pair

_LATENCY_ROUNDS = 10
"""Number of small messages there and back, of which the quickest tells the latency."""
REPEATS = 3
"""Number of times that a message is sent; the quickest counts."""
_LONG_SECONDS = 0.1
"""A message that takes longer is sent once from then on: the link is slow, and that is all there is to learn."""


class _RoundTrip(NamedTuple):
    """A small message there and back."""

    seconds: float
    offset_seconds: float
    """Seconds by which the second rank's clock is ahead, in the middle of the trip."""


def measure_pair(pair: Pair) -> None:
    """Measure a link on both of its ranks together, as the default group; the first rank's pair gets the figures."""
    device = device_of(pair.backend)
    own = dist.get_rank()
    # The quickest trip: the shorter it is, the less can be wrong with the clocks.
    quickest_trip = min(_round_trip(own, device) for _ in range(_LATENCY_ROUNDS))
    pair.offset_seconds = quickest_trip.offset_seconds
    pair.latency_seconds = quickest_trip.seconds / 2
    repeats = REPEATS
    for mib in SIZES_MIB:
        # A MiB has 2^18 numbers of 4 bytes.
        tensor = torch.zeros(mib << 18, device=device)
        # Two messages, there and back.
        best = quickest(partial(_send_and_receive, own, tensor), repeats, device)
        pair.gbs[str(mib)] = 2 * tensor.nbytes / best / 1e9
        reduced = quickest(partial(dist.all_reduce, tensor), repeats, device)
        pair.all_reduce_gbs[str(mib)] = tensor.nbytes / reduced / 1e9
        # Both ranks must repeat as often: the first one decides.
        agreed = torch.tensor([1 if best > _LONG_SECONDS else REPEATS], device=device)
        dist.broadcast(agreed, src=0)
        repeats = int(agreed)
    if own == 1:
        # The second rank waits first, and its times have that wait, too.
        pair.gbs.clear()
        pair.all_reduce_gbs.clear()


def _round_trip(own: int, device: torch.device) -> _RoundTrip:
    """Send a small message there and back, which brings the time of the second rank; it measures nothing itself."""
    stamp = torch.zeros(1, dtype=torch.float64, device=device)
    sent = time.time()
    if own == 0:
        dist.send(stamp, 1)
        dist.recv(stamp, 1)
        received = time.time()
        return _RoundTrip(received - sent, offset_seconds(sent, float(stamp), received))
    dist.recv(stamp, 0)
    stamp.fill_(time.time())
    dist.send(stamp, 0)
    return _RoundTrip(0.0, 0.0)


def offset_seconds(sent: float, theirs: float, received: float) -> float:
    """Give the seconds by which another clock is ahead of this one.

    Args:
        sent: time of this clock when a message left.
        theirs: time of the other clock when the message was there.
        received: time of this clock when the answer came.
    """
    return theirs - (sent + received) / 2


def _send_and_receive(own: int, tensor: torch.Tensor) -> None:
    """Send a tensor to the other rank and back: rank 0 sends first, rank 1 receives first."""
    other = 1 - own
    if own == 0:
        dist.send(tensor, other)
        dist.recv(tensor, other)
    else:
        dist.recv(tensor, other)
        dist.send(tensor, other)


def quickest(action: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Give the seconds of the quickest of some calls, each up to the end of what it has started on the device."""
    seconds = []
    for _ in range(repeats):
        begun = time.monotonic()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.monotonic() - begun)
    return min(seconds)


def device_of(backend: str) -> torch.device:
    """Give the device whose tensors a backend sends."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
