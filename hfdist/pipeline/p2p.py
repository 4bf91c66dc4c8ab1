"""Sending activations from stage to stage together with their description, where shapes are not yet known."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hfdist.pipeline.stage_io import Activations, Header, TensorMeta, unpack
from hfdist.pipeline.stage_module import StageModule


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where tensors must live to travel through `group`."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class P2PChannel:
    """What the stages of one pipeline say to each other, in order. Stages on one rank hand over directly.

    Args:
        rank_of_stage: place in `group` of the rank that runs each stage.
        group: the ranks of one pipeline.
        device: where tensors live.
    """

    def __init__(self, rank_of_stage: tuple[int, ...], group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank_of_stage = rank_of_stage
        self.group = group
        self.device = device
        # The model may still be on the host while the network only takes what is on a GPU.
        self._network_device = device if device.type == "cuda" else device_of(group)
        self._own_rank = dist.get_rank(group)
        self._handed_over: dict[int, deque[Activations | None]] = defaultdict(deque)
        self._sending: list[tuple[dist.Work | None, torch.Tensor]] = []

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
            data = tensor.detach().to(self._network_device).contiguous()
            self._sending.append((dist.isend(data, group=self.group, group_dst=peer), data))

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
        return header.pack(tuple(self._receive_meta(peer, meta) for meta in header.metas))

    def flush(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self._sending:
            if work is not None:
                work.wait()
        self._sending.clear()

    def _receive_meta(self, peer: int, meta: TensorMeta) -> torch.Tensor:
        return self._receive_tensor(peer, meta.shape, meta.dtype).requires_grad_(meta.requires_grad)

    def _receive_tensor(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._network_device)
        dist.recv(tensor, group=self.group, group_src=peer)
        return tensor.to(self.device)


@dataclass
class Relayed:
    """What came of forwards through all stages, as this rank saw it."""

    values: list[Any]
    """On the rank of the last stage: the value of each call. Elsewhere empty."""
    headers: list[dict[int, Header]]
    """For each call: what each of this rank's stages received."""


def relay(
    views: Mapping[int, StageModule],
    calls: Sequence[Callable[[PreTrainedModel], Any]],
    link: P2PChannel,
    *,
    runs_last_stage: bool = True,
) -> Relayed:
    """Run forwards only, through all stages. Call on all ranks of a pipeline.

    One micro batch goes through all of a rank's stages before the next does: on NCCL, where a send may wait for its
    receive, ranks with several stages would otherwise wait for each other.

    Args:
        views: this rank's stages.
        calls: one for each micro batch: calls the model.
        link: to the neighbours.
        runs_last_stage: False where only what stages receive is of interest.
    """
    relayed = Relayed([], [{} for _ in calls])
    for call, headers in zip(calls, relayed.headers, strict=True):
        for stage, view in sorted(views.items()):
            incoming = None if view.is_first else link.receive(stage)
            if incoming is not None:
                headers[stage] = unpack(incoming)[0]
            if view.is_last and not runs_last_stage:
                continue
            value = view.run(call, incoming)
            if view.is_last:
                relayed.values.append(value)
            else:
                link.send(stage + 1, value)
    link.flush()
    return relayed
