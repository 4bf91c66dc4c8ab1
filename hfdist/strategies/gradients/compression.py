"""Gradients of DDP that travel in fewer bytes, by communication hooks; what is left out comes with a later step.

Parameters are compressed one by one, so that DDP's buckets, which change after the first step of each start, change no
number. PowerSGD is that of Vogels et al. 2019 (arXiv:1905.13727), of which torch's own hook keeps its state by bucket,
and aborts under gloo, where ranks start the collectives of several buckets in different orders.
"""

# Without `from __future__ import annotations`: DDP compares the annotations of a hook themselves.

import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from hfdist.checkpoint.piece import OPTIONAL, Piece
from hfdist.config.strategy import Compression, StrategyConfig
from hfdist.topology import Topology

RESIDUAL, FACTOR, STEPS = (f"{OPTIONAL}{name}" for name in ("unscaled_residual", "factor", "compressed_steps"))
"""Keys of pieces: what each rank has left out so far, PowerSGD's matrix of the last step, and steps so far."""

_Future = torch.futures.Future[torch.Tensor]


class GradientCompressor:
    """What this rank keeps from step to step, and the hook that uses it.

    Args:
        model: this rank's model; its trained parameters are whole.
        topology: the run's ranks.
        config: `strategy.compression` and its settings.
    """

    def __init__(self, model: nn.Module, topology: Topology, config: StrategyConfig) -> None:
        self._config = config
        self._rank, self._num_ranks = topology.rank, topology.world_size
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._names = {parameter: name for name, parameter in trained.items()}
        device = next(iter(trained.values())).device
        self._steps = torch.zeros(1, dtype=torch.int64)
        self.residuals: dict[str, torch.Tensor] = {}
        """What was left out of each gradient so far, before loss scaling, by the parameter's name: float32."""
        self.scaler: torch.amp.GradScaler | None = None
        """Scales the gradients that travel by a number that changes between steps; None: they are not scaled."""
        self._factors: dict[str, torch.Tensor] = {}
        """Factors of PowerSGD by the parameter's name, of shape [columns, rank]; the same on all ranks."""
        if config.defers_gradients:
            self.residuals = {
                name: torch.zeros(parameter.shape, dtype=torch.float32, device=device)
                for name, parameter in trained.items()
            }
        if config.compression is Compression.powersgd:
            random = torch.Generator().manual_seed(0)
            for name, parameter in trained.items():
                rows, columns = _matrix_shape(parameter)
                if (rows + columns) * config.compression_rank < rows * columns:
                    factor = torch.randn(columns, config.compression_rank, generator=random)
                    self._factors[name] = factor.to(device)

    def register(self, model: DistributedDataParallel) -> None:
        """Let the gradients of a model travel so; before its first backward."""
        hooks: dict[Compression, Callable[..., _Future]] = {
            Compression.fp16: _send_fp16,
            Compression.bf16: _send_bf16,
            Compression.powersgd: _send_factors,
            Compression.topk: _send_largest,
        }
        model.register_comm_hook(self, hooks[self._config.compression])

    def pieces(self) -> Iterator[Piece]:
        """List what a resume on as many ranks needs."""
        for name, residual in self.residuals.items():
            shape, start = (self._num_ranks, *residual.shape), self._rank * residual.numel()
            yield Piece(name=name, key=RESIDUAL, shape=shape, start=start, view=residual)
        for name, factor in self._factors.items():
            yield Piece(name=name, key=FACTOR, shape=tuple(factor.shape), start=0, view=factor)
        for name in list(self.residuals)[:1]:
            yield Piece(name=name, key=STEPS, shape=(1,), start=0, view=self._steps)

    def sends_all(self, *, ends_step: bool) -> bool:
        """Whether gradients travel whole in this step yet.

        Args:
            ends_step: whether this bucket is the last one of the step.
        """
        is_early = int(self._steps) < self._config.compression_warmup_steps
        self._steps += ends_step
        return is_early

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Average over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor.div_(self._num_ranks)

    def send_factors(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]  # not in torch's stubs
        """Put the average of two narrow matrices, multiplied, in the place of each gradient that is a matrix."""
        names = [self._names[parameter] for parameter in bucket.parameters()]
        gradients = dict(zip(names, bucket.gradients(), strict=True))
        scale = self._loss_scale
        totals = {
            name: gradients[name].add(self.residuals[name], alpha=scale).view(-1, len(self._factors[name]))
            for name in names
            if name in self._factors
        }
        wholes = [gradients[name] for name in names if name not in totals]
        lefts = [total @ self._factors[name] for name, total in totals.items()]
        *lefts, means = _unpack(self.mean(_pack([*lefts, *wholes])), [*lefts, _pack(wholes)])
        # Without this the factors would grow from step to step.
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [total.T @ left for total, left in zip(totals.values(), lefts, strict=True)]
        # Nothing is sent of a bucket without a matrix: what would be empty is on the CPU, and NCCL sends from a GPU.
        rights = _unpack(self.mean(_pack(rights)), rights) if rights else []
        for whole, mean in zip(wholes, _unpack(means, wholes), strict=True):
            whole.copy_(mean)
        for (name, total), left, right in zip(totals.items(), lefts, rights, strict=True):
            near = left @ right.T
            gradients[name].copy_(near.view_as(gradients[name]))
            # The same on all ranks, which leave the step out. What they keep would never be finite again.
            is_finite = torch.isfinite(near).all()
            residual = self.residuals[name]
            residual.copy_(torch.where(is_finite, (total - near).view_as(residual) / scale, residual))
            self._factors[name].copy_(torch.where(is_finite, right, self._factors[name]))

    def send_largest(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]  # as above
        """Put the average of the largest entries of each rank in the place of the gradients."""
        buffer, offset, scale = bucket.buffer(), 0, self._loss_scale
        residuals = [self.residuals[self._names[parameter]] for parameter in bucket.parameters()]
        totals, of_parameters = [], []
        for residual in residuals:
            total = buffer[offset : offset + residual.numel()].add(residual.view(-1), alpha=scale)
            count = max(1, int(self._config.compression_share * total.numel()))
            of_parameters.append(total.abs().topk(count, sorted=False).indices + offset)
            totals.append(total)
            offset += total.numel()
        total, indices = torch.cat(totals), torch.cat(of_parameters)
        values = total[indices]
        of_ranks = values.new_empty(self._num_ranks * len(values))
        indices_of_ranks = torch.empty(len(of_ranks), dtype=torch.int32, device=values.device)
        # Into views: the call with one tensor has another name before torch 2.13.
        dist.all_gather(list(of_ranks.chunk(self._num_ranks)), values)
        dist.all_gather(list(indices_of_ranks.chunk(self._num_ranks)), indices.int())
        # In order of rank: the sum is the same on all of them.
        summed = torch.zeros_like(total).index_add_(0, indices_of_ranks.long(), of_ranks.div_(self._num_ranks))
        buffer.copy_(summed)
        is_finite, left = torch.isfinite(summed).all(), total.index_fill_(0, indices, 0) / scale
        for residual, kept in zip(residuals, left.split([residual.numel() for residual in residuals]), strict=True):
            # After an overflow the residual of the step before stays, as in `send_factors`.
            residual.copy_(torch.where(is_finite, kept.view_as(residual), residual))


def _matrix_shape(parameter: torch.Tensor) -> tuple[int, int]:
    rows = parameter.shape[0] if parameter.dim() > 1 else 1
    return rows, math.prod(parameter.shape) // max(1, rows)


def _pack(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def _unpack(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


# DDP takes functions alone as hooks, of one of these signatures.


def _send_fp16(state: GradientCompressor, bucket: dist.GradBucket) -> _Future:  # type: ignore[name-defined]  # as above
    return default_hooks.fp16_compress_hook(None, bucket)  # type: ignore[arg-type]  # None: all ranks


def _send_bf16(state: GradientCompressor, bucket: dist.GradBucket) -> _Future:  # type: ignore[name-defined]  # as above
    # A function of our own: torch's, given to DDP itself, is refused without NCCL, though gloo has this type by now.
    return default_hooks.bf16_compress_hook(None, bucket)  # type: ignore[arg-type]  # as above


def _send_factors(state: GradientCompressor, bucket: dist.GradBucket) -> _Future:  # type: ignore[name-defined]  # as above
    if state.sends_all(ends_step=bucket.is_last()):
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]  # as above
    state.send_factors(bucket)
    return _done(bucket.buffer())


def _send_largest(state: GradientCompressor, bucket: dist.GradBucket) -> _Future:  # type: ignore[name-defined]  # as above
    if state.sends_all(ends_step=bucket.is_last()):
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]  # as above
    state.send_largest(bucket)
    return _done(bucket.buffer())


def _done(buffer: torch.Tensor) -> _Future:
    done: _Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(buffer)
    return done
