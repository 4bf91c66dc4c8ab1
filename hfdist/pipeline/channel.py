"""The way from one stage to the next: activations are sent to another rank, or handed over on one.

Sends that are under way are held, with their tensors, until they are done.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from queue import Queue

import torch
import torch.distributed as dist

from hfdist.collectives import device_of
from hfdist.pipeline.stage_io import Activations, Header, unpack


class Sends:
    """The sends of one rank.

    Args:
        tells: whether the backend's work says that it is done. That of gloo does so only to who waits for it, so a
            thread waits.
    """

    def __init__(self, *, tells: bool) -> None:
        self._under_way: deque[dist.Work] = deque()
        self._waiting: Queue[dist.Work | None] | None = None
        self._errors: list[Exception] = []
        if not tells:
            self._waiting = Queue()
            # A daemon: a process whose peer is gone must be able to end.
            thread = threading.Thread(target=_wait_for_each, args=(self._waiting, self._errors), daemon=True)
            thread.start()
            weakref.finalize(self, self._waiting.put, None)

    def add(self, work: dist.Work) -> None:
        """Hold one until it is done; let go of those that are done."""
        if self._waiting is not None:
            self._waiting.put(work)
            return
        self._under_way.append(work)
        while self._under_way and self._under_way[0].is_completed():
            self._under_way.popleft()

    def wait(self) -> None:
        """Wait for all; raise what one of them has raised."""
        if self._waiting is not None:
            self._waiting.join()
            if self._errors:
                raise self._errors.pop()
        while self._under_way:
            self._under_way.popleft().wait()


class P2PChannel:
    """Sends activations from stage to stage together with their description, where shapes are not yet known.

    Stages on one rank hand over directly.

    Args:
        rank_of_stage: the rank of each stage within `group`.
        group: the ranks of one pipeline.
        device: where the stages take what they receive.
    """

    def __init__(self, rank_of_stage: tuple[int, ...], group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank_of_stage = rank_of_stage
        self.group = group
        self.device = device
        # The model may still be on the host while the network only takes what is on a GPU.
        self._network_device = device if device.type == "cuda" else device_of(group)
        self._own_rank = dist.get_rank(group)
        self.receives_early = dist.get_backend(group) == "gloo"
        """Whether a receive that waits holds up nothing else."""
        self._handed_over: dict[int, deque[Activations | None]] = defaultdict(deque)
        self._sends = Sends(tells=dist.get_backend(group) != "gloo")

    def send(self, stage: int, activations: Activations | None) -> None:
        """Send to `stage`, without waiting. None says that there is none: an earlier stage failed."""
        header, tensors = (None, ()) if activations is None else unpack(activations)
        if self.rank_of_stage[stage] == self._own_rank:
            detached = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            self._handed_over[stage].append(None if header is None else header.pack(tuple(detached)))
            return
        peer = self.rank_of_stage[stage]
        text = ("" if header is None else header.to_json()).encode()
        length = torch.tensor([len(text)], dtype=torch.int64)
        payload = torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)
        for tensor in (length, payload, *tensors):
            self.start_send(peer, tensor.detach().to(self._network_device))

    def start_send(self, peer: int, tensor: torch.Tensor) -> None:
        """Send a tensor alone to another rank, without waiting."""
        work = dist.isend(tensor.contiguous(), group=self.group, group_dst=peer)
        assert work is not None  # this rank is in the group
        self._sends.add(work)

    def receive(self, stage: int) -> Activations | None:
        """Wait for what was sent to `stage`. Tensors that a gradient flows back through are leaves that want one."""
        if self.rank_of_stage[stage - 1] == self._own_rank:
            return self._handed_over[stage].popleft()
        peer = self.rank_of_stage[stage - 1]
        length = self._receive_tensor(peer, (1,), torch.int64)
        payload = self._receive_tensor(peer, (max(1, int(length)),), torch.uint8)
        if int(length) == 0:
            return None
        header = Header.from_json(payload.cpu().numpy().tobytes().decode())
        tensors = (self._receive_tensor(peer, m.shape, m.dtype).requires_grad_(m.requires_grad) for m in header.metas)
        return header.pack(tuple(tensors))

    def broadcast_from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give all ranks what the rank of the last stage has; others give one of its shape and type. A collective."""
        buffer = tensor.to(self._network_device, copy=True)
        dist.broadcast(buffer, group=self.group, group_src=self.rank_of_stage[-1])
        return buffer.to(tensor.device)

    def flush(self) -> None:
        """Wait until everything is sent."""
        self._sends.wait()

    def _receive_tensor(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._network_device)
        dist.recv(tensor, group=self.group, group_src=peer)
        return tensor.to(self.device)


def _wait_for_each(works: Queue[dist.Work | None], errors: list[Exception]) -> None:
    while (work := works.get()) is not None:
        try:
            work.wait()
        except Exception as error:  # of the backend: any
            errors.append(error)
        finally:
            del work
            works.task_done()
