"""Latency, clocks and speeds of the link between two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from hfdist.tools.doctor.pairs import SIZES_MIB, Pair

_LATENCY_ROUNDS = 10
"""Small messages there and back, of which the quickest tells the latency."""
REPEATS = 3
"""Times that a message is sent; the quickest counts."""
_LONG_SECONDS = 0.1
"""A message of a MiB that takes so long is not repeated: the link is slow, and that is all there is to learn."""


def measure_pair(pair: Pair) -> None:
    """Measure latency, clocks and speeds on both ranks together; the first one keeps the figures."""
    device = device_of(pair.backend)
    own = dist.get_rank()
    trips = [_round_trip(own, device) for _ in range(_LATENCY_ROUNDS)]
    seconds, pair.offset_seconds = min(trips)
    pair.latency_seconds = seconds / 2
    repeats = REPEATS
    for mib in SIZES_MIB:
        tensor = torch.zeros(mib << 18, device=device)
        # Two messages, there and back.
        best = quickest(partial(_send_and_receive, own, tensor), repeats, device)
        pair.gbs[str(mib)] = 2 * tensor.nbytes / best / 1e9
        reduced = quickest(partial(dist.all_reduce, tensor), repeats, device)
        pair.all_reduce_gbs[str(mib)] = tensor.nbytes / reduced / 1e9
        agreed = torch.tensor([1 if best > _LONG_SECONDS else REPEATS], device=device)
        dist.broadcast(agreed, src=0)
        repeats = int(agreed)
    if own == 1:
        # Its clock begins to count before the other one sends.
        pair.gbs.clear()
        pair.all_reduce_gbs.clear()


def _round_trip(own: int, device: torch.device) -> tuple[float, float]:
    """Give the seconds of a small message there and back, and how far the second's clock is ahead, at their middle."""
    stamp = torch.zeros(1, dtype=torch.float64, device=device)
    sent = time.time()
    if own == 0:
        dist.send(stamp, 1)
        dist.recv(stamp, 1)
        received = time.time()
        return received - sent, offset_seconds(sent, float(stamp), received)
    dist.recv(stamp, 0)
    stamp.fill_(time.time())
    dist.send(stamp, 0)
    return 0.0, 0.0


def offset_seconds(sent: float, theirs: float, received: float) -> float:
    """Give how far the other clock is ahead, which was read between `sent` and `received` of this one."""
    return theirs - (sent + received) / 2


def _send_and_receive(own: int, tensor: torch.Tensor) -> None:
    for action in (dist.send, dist.recv) if own == 0 else (dist.recv, dist.send):
        action(tensor, 1 - own)


def quickest(action: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Give the seconds of the quickest of some repeats, each with all that it has started on the device."""
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
