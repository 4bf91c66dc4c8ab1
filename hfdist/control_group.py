"""All ranks, for small values of the host beside the training: ranks tell their machine's leader, leaders each other.

    ranks 0 1 2 3   machine A      1. the ranks of each machine tell its first one, the leader
          |                        2. the leaders tell each other
    ranks 4 5 6 7   machine B      3. each leader tells its machine

A group of gloo connects each two of its ranks at once. Were it one of all ranks, a process would have as many
connections as there are ranks, for each thread that speaks. So only the ranks of a machine have such a group. Others
connect when they first send each other something.
"""

from __future__ import annotations

import json
import os
import platform
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hfdist.collectives import broadcast_text, device_of, gather_texts, rank, swap_texts, world_size
from hfdist.launch.gloo_interface import VARIABLE

T = TypeVar("T")

ON_DEMAND = "gloo_on_demand"
"""The backend of groups whose ranks connect when they first send each other something."""

_machines: dict[dist.ProcessGroup, list[list[int]]] = {}
_control_groups: dict[dist.ProcessGroup, ControlGroup] = {}
"""The control group of the thread that trains, by the default group."""


def control_group() -> ControlGroup | None:
    """Give the group in which the thread that trains speaks; None: there is one process.

    The first call is a collective, which makes the group. A thread beside it makes a group of its own.
    """
    if world_size() == 1:
        return None
    default = _default_group()
    if default not in _control_groups:
        _control_groups[default] = ControlGroup()
    return _control_groups[default]


def machines() -> list[list[int]]:
    """Give the ranks of each machine, in the order of first ranks. The first call is a collective.

    Machines whose hosts have one name count as one: it has more connections, and all is as right.
    """
    if world_size() == 1:
        return [[0]]
    default = _default_group()
    if default not in _machines:
        by_host: dict[bytes, list[int]] = {}
        for number, host in enumerate(gather_texts(platform.node().encode(), None)):
            by_host.setdefault(host, []).append(number)
        _machines[default] = list(by_host.values())
    return _machines[default]


def exchange_json(values: Sequence[object]) -> list[Any]:
    """Give what each rank has for this one, in order of rank: `values` are JSON, one for each rank. A collective.

    What a rank sends and gets grows with its own values alone, and what a machine's leader does with its machine's.
    """
    group = control_group()
    texts = [json.dumps(value).encode() for value in values]
    return [json.loads(text) for text in (texts if group is None else group.swap(texts))]


class ControlGroup:
    """All ranks, as one thread of each hears them. Making it is a collective, and so is all but `pairs`.

    What is begun goes on beside that thread up to the leaders; the rest is done where one waits for it, or speaks next.
    All ranks wait and speak in one order.

    Args:
        timeout: the longest wait for another rank; None: that of the default group.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.machines = machines()
        timeout = timeout or _timeout_of_default()
        self._later: deque[Callable[[], None]] = deque()
        """What is left to do of all that was begun, in order."""
        with _without_bound_device():
            self._make_groups(timeout)
        if len(self.machines) > 1:
            # Now, as all are there: gloo waits for ever to connect with one that has ended since (torch 2.13).
            self.begin_largest([0])()
            self.gather(b"")

    def _make_groups(self, timeout: timedelta) -> None:
        # All ranks name all groups, also those that others are in: torch counts the calls.
        groups = [dist.new_group(ranks, backend="gloo", timeout=timeout) for ranks in self.machines]
        self._machine = next(group for ranks, group in zip(self.machines, groups, strict=True) if rank() in ranks)
        self._leaders: dist.ProcessGroup | None = None
        """The first rank of each machine, on these; None: on the others, and where there is one machine."""
        self.pairs: dist.ProcessGroup = self._machine
        """All ranks, for what one sends to another with `dist.isend`."""
        if len(self.machines) > 1:
            first = [ranks[0] for ranks in self.machines]
            leaders = dist.new_group(first, backend=ON_DEMAND, timeout=timeout)
            self._leaders = leaders if rank() in first else None
            self.pairs = dist.new_group(backend=ON_DEMAND, timeout=timeout)

    def gather(self, text: bytes) -> list[bytes]:
        """Give the texts of all ranks, in order of rank."""
        self._settle()
        return self._gather(text)

    def _gather(self, text: bytes) -> list[bytes]:
        texts = gather_texts(text, self._machine)
        if len(self.machines) == 1:
            return texts
        whole = b""
        if self._leaders is not None:
            whole = _join(gather_texts(_join(texts), self._leaders))
        of_machines = map(_split, _split(broadcast_text(whole, self._machine)))
        by_rank = {
            number: one
            for ranks, of_machine in zip(self.machines, of_machines, strict=True)
            for number, one in zip(ranks, of_machine, strict=True)
        }
        return [by_rank[number] for number in range(len(by_rank))]

    def broadcast(self, text: bytes) -> bytes:
        """Give all ranks the text of rank 0."""
        self._settle()
        if self._leaders is not None:
            text = broadcast_text(text, self._leaders)
        return broadcast_text(text, self._machine)

    def swap(self, texts: Sequence[bytes]) -> list[bytes]:
        """Give what each rank has for this one, in order of rank; `texts`: one for each rank.

        A leader carries the texts from and to its whole machine. With ranks 0, 1 on a machine and 2, 3 on another:

            rank 1    0>  1>  2>  3>       its texts, to its leader
            rank 0    0>2 0>3 | 1>2 1>3    what it sends to the leader of 2 and 3: each rank's texts for these
            rank 2    0>3 1>3 2>3 3>3      what it gives rank 3, in the order of the senders
        """
        self._settle()
        if len(self.machines) == 1:
            return swap_texts(texts, self._machine)
        on_machine = next(ranks for ranks in self.machines if rank() in ranks)
        nothing = [b""] * len(on_machine)
        from_machine = swap_texts([_join(texts), *nothing[1:]], self._machine)
        to_machine = nothing
        if self._leaders is not None:
            senders_here = [_split(of_sender) for of_sender in from_machine]
            sent = [_join(_texts_for(ranks, senders_here)) for ranks in self.machines]
            by_sender = dict[int, list[bytes]]()
            for ranks, of_machine in zip(self.machines, swap_texts(sent, self._leaders), strict=True):
                by_sender |= zip(ranks, map(_split, _split(of_machine)), strict=True)
            senders = [by_sender[sender] for sender in sorted(by_sender)]
            to_machine = [_join([of_sender[index] for of_sender in senders]) for index in range(len(on_machine))]
        return _split(swap_texts(to_machine, self._machine)[0])

    def begin_largest(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begin to find the largest of all ranks at each place of `values`; what is returned waits, and gives them."""
        found = torch.tensor(values, dtype=torch.int64)
        largest, own = dist.ReduceOp.MAX, self._machine

        def reduce() -> Callable[[], None]:
            work = dist.reduce(found, group_dst=0, op=largest, group=own, async_op=True)
            return partial(self._end_reduce, found, _waiting(work))

        return self._begin(lambda: dist.all_reduce(found, op=largest, group=own, async_op=True), reduce, found.tolist)

    def begin_gather(self, own: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Begin to gather a tensor of each rank, all of one shape; what is returned waits, and gives them by rank."""
        by_rank = [torch.empty_like(own) for _ in range(world_size())]

        def gather() -> None:
            for tensor, content in zip(by_rank, self._gather(own.numpy().tobytes()), strict=True):
                tensor.copy_(torch.frombuffer(bytearray(content), dtype=own.dtype).view(own.shape))

        def all_gather() -> dist.Work | None:
            return dist.all_gather(by_rank, own, group=self._machine, async_op=True)

        return self._begin(all_gather, lambda: gather, lambda: by_rank)

    def _begin(
        self,
        on_one: Callable[[], dist.Work | None],
        on_several: Callable[[], Callable[[], None]],
        found: Callable[[], T],
    ) -> Callable[[], T]:
        """Begin, as it is done on one machine, or on several; what is returned waits, and gives what was `found`.

        On several, the steps that `on_several` returns are left for later: a thread that comes back from gloo while the
        interpreter ends would abort it.
        """
        wait = self._settle
        if len(self.machines) == 1:
            wait = _waiting(on_one())
        else:
            self._later.append(on_several())

        def result() -> T:
            wait()
            return found()

        return result

    def _settle(self) -> None:
        """Do what is left of all that was begun. What has failed stays, and fails again for who waits for it."""
        while self._later:
            self._later[0]()
            self._later.popleft()

    def _end_reduce(self, values: torch.Tensor, wait_for_machine: Callable[[], None]) -> None:
        wait_for_machine()
        if self._leaders is not None:
            _find_largest(values, self._leaders)
        dist.broadcast(values, group_src=0, group=self._machine)


def _waiting(work: dist.Work | None) -> Callable[[], None]:
    assert work is not None  # this rank is in the group

    def wait() -> None:
        work.wait()

    return wait


def _default_group() -> dist.ProcessGroup:
    default = dist.group.WORLD
    assert default is not None  # it is initialized
    return default


def _timeout_of_default() -> timedelta:
    """Give the longest wait of the default group, which is `ddp_timeout`: torch gives new groups its own constant."""
    # There is no public way to it.
    return _default_group()._get_backend(device_of(None)).options._timeout


@contextmanager
def _without_bound_device() -> Iterator[None]:
    """Let new groups of the host have nothing of NCCL, though a device is bound to the default group.

    DeepSpeed binds one. Then torch 2.13 splits NCCL's communicator on all ranks that are not in a new group, and on
    none that is in it: they would wait for each other.
    """
    default = _default_group()
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


def _find_largest(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Put the largest of all ranks of a group in place of `values`, in log2(ranks) exchanges; a ring has 2 x ranks.

    After each one a rank knows the largest of twice as many. What comes in twice changes nothing.
    """
    size, own, distance = dist.get_world_size(group), dist.get_rank(group), 1
    while distance < size:
        heard = torch.empty_like(values)
        sent = dist.isend(values, group=group, group_dst=(own + distance) % size)
        came = dist.irecv(heard, group=group, group_src=(own - distance) % size)
        for work in (sent, came):
            assert work is not None  # this rank is in the group
            work.wait()
        torch.maximum(values, heard, out=values)
        distance *= 2


def _texts_for(ranks: Sequence[int], by_sender: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Give what each sender has for these ranks, joined; a sender has a text for every rank."""
    return [_join([of_sender[to] for to in ranks]) for of_sender in by_sender]


def _join(texts: Sequence[bytes]) -> bytes:
    """Give texts as one, from which `_split` makes them again."""
    return struct.pack(f"<{len(texts) + 1}q", len(texts), *map(len, texts)) + b"".join(texts)


def _split(joined: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<q", joined)
    begin = 8 * (count + 1)
    lengths = struct.unpack_from(f"<{count}q", joined, 8)
    return [joined[start:stop] for start, stop in pairwise(accumulate(lengths, initial=begin))]


def _connect_on_demand(store: object, own: int, size: int, timeout: timedelta) -> object:
    """Make a group of gloo without its mesh of connections.

    Torch has no public way to it but TORCH_GLOO_LAZY_INIT, which is for all groups of a process, those of the training
    included. Interfaces are chosen as torch does it for other groups.
    """
    gloo: Any = dist.ProcessGroupGloo  # its options are private, and not in torch's stubs
    options = gloo._Options()
    names = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    devices = [gloo.create_device(interface=name, lazy_init=True) for name in names]
    options._devices = devices or [gloo.create_default_device(lazy_init=True)]
    options._timeout = timeout
    return gloo(store, own, size, options)


dist.Backend.register_backend(ON_DEMAND, _connect_on_demand, devices="cpu")
