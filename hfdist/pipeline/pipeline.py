"""A pipeline as one rank sees it: whole steps through a schedule, and forwards alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from hfdist.config.pipeline import Schedule
from hfdist.data.packing.sequence import IGNORED
from hfdist.errors import ConfigError
from hfdist.pipeline.runtime import Runtime, Stage
from hfdist.pipeline.schedule import plan, receive_early
from hfdist.pipeline.stage_io import Header, P2PChannel, unpack
from hfdist.pipeline.stage_module import StageModule, preserve_state
from hfdist.pipeline.timeline import Recorder

Batch = dict[str, torch.Tensor]


class Pipeline:
    """This rank's stages, under a schedule.

    Args:
        modules: this rank's stages, by index.
        schedule: what happens when.
        channel: to the ranks of the pipeline.
        num_microbatches: of one step.
        recorder: takes the times of what is done.
        splits_backward: whether weight gradients may run apart from input gradients.
    """

    def __init__(
        self,
        modules: Mapping[int, StageModule],
        schedule: Schedule,
        channel: P2PChannel,
        *,
        num_microbatches: int,
        recorder: Recorder,
        splits_backward: bool,
    ) -> None:
        self.modules = dict(sorted(modules.items()))
        self._channel = channel
        self._recorder = recorder
        self._splits_backward = splits_backward
        self._headers: dict[tuple[str, ...], dict[int, Header]] = {}
        own = plan(schedule, channel.rank_of_stage, num_microbatches)[dist.get_rank(channel.group)]
        # Two computations earlier make a step 1 to 3 % shorter, and more of them gain nothing (benchmarks/pipeline.py).
        self._instructions = receive_early(own, 2) if dist.get_backend(channel.group) == "gloo" else own

    def forward_backward(
        self, microbatches: Sequence[Batch], loss: Callable[[PreTrainedModel, Batch], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run one step's forwards and backwards; gradients are added to those of the parameters.

        Args:
            microbatches: as many as the schedule was made for; shapes may differ.
            loss: calls the model on one of them; the step's loss is the sum over all.

        Returns:
            The losses, in order, on the rank of the last stage; elsewhere an empty list.
        """
        calls = [partial(_call, loss, batch) for batch in microbatches]
        headers = [self._headers_for(batch, call) for batch, call in zip(microbatches, calls, strict=True)]
        stages = {
            index: Stage(
                module,
                index,
                calls,
                [known.get(index) for known in headers],
                recorder=self._recorder,
                splits_backward=self._splits_backward,
            )
            for index, module in self.modules.items()
        }
        return Runtime(stages, self._channel, self._recorder).run(self._instructions)

    def forward(self, microbatches: Sequence[Batch], call: Callable[[PreTrainedModel, Batch], Any]) -> list[Any]:
        """Run forwards only, for any number of micro batches; values on the rank of the last stage."""
        # One micro batch goes through all of a rank's stages before the next does: on NCCL, where a send may wait for
        # its receive, ranks with several stages would otherwise wait for each other.
        values = [value for batch in microbatches for value in self._run_stages(partial(_call, call, batch))[0]]
        self._channel.flush()
        return values

    def _headers_for(self, batch: Batch, call: Callable[[PreTrainedModel], Any]) -> dict[int, Header]:
        """Give what this rank's stages receive for a micro batch of this shape, by stage.

        All ranks see the same batch, so they agree. A shape that is new costs a forward of one micro batch.
        """
        signature = tuple(f"{name} {_describe(batch[name])}" for name in sorted(batch))
        if signature not in self._headers:
            with preserve_state(next(iter(self.modules.values())).model):
                _, self._headers[signature] = self._run_stages(call, runs_last_stage=False)
            self._channel.flush()
        return self._headers[signature]

    def _run_stages(
        self, call: Callable[[PreTrainedModel], Any], *, runs_last_stage: bool = True
    ) -> tuple[list[Any], dict[int, Header]]:
        """Run the forward of one micro batch. Give its value, on the rank of the last stage, and what stages received.

        All ranks of a pipeline call this. A rank without the value gives an empty list.
        """
        values: list[Any] = []
        headers: dict[int, Header] = {}
        for index, module in self.modules.items():
            incoming = None if module.is_first else self._channel.receive(index)
            if incoming is not None:
                headers[index] = unpack(incoming)[0]
            if not module.is_last:
                self._channel.send(index + 1, module.run(call, incoming))
            elif runs_last_stage:
                values.append(module.run(call, incoming))
        return values, headers


def _describe(value: Any) -> str:
    """Equal for values that give tensors of equal shapes."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _call(function: Callable[[PreTrainedModel, Batch], Any], batch: Batch, model: PreTrainedModel) -> Any:
    return function(model, batch)


def split_batch(batch: dict[str, Any], num_microbatches: int) -> list[dict[str, Any]]:
    """Split a data rank's batch of a step along its first dimension, the same on every rank of its pipeline.

    A batch that does not divide, such as the last one of a dataset, is filled up with copies of its first row that
    have no target: a loss that is a sum over targets does not see them.

    Args:
        batch: tensors whose first dimension is the sequences; numbers, and tensors whose first dimension is 1 so that
            they stand for all sequences, go to every micro batch.
        num_microbatches: how many.

    Raises:
        ConfigError: a tensor that is not split by sequences, such as the bounds of documents in a row without padding.
    """
    num_rows = len(batch["input_ids"])
    size = -(-num_rows // num_microbatches)
    missing = size * num_microbatches - num_rows
    parts: dict[str, Any] = {}
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) == 1 < num_rows:
            parts[name] = [value] * num_microbatches
            continue
        _check_has_rows(name, value, num_rows)
        filler = value[:1].expand(missing, *value.shape[1:])
        if name == "labels" or name == "shift_labels":
            filler = torch.full_like(filler, IGNORED)
        parts[name] = list(torch.cat([value, filler]).split(size)) if missing else list(value.split(size))
    return [{name: values[index] for name, values in parts.items()} for index in range(num_microbatches)]


def _check_has_rows(name: str, value: torch.Tensor, num_rows: int) -> None:
    is_of_tokens = name.startswith("cu_seq_lens") or (name == "position_ids" and value.ndim > 2)
    if len(value) != num_rows or is_of_tokens:
        raise ConfigError(
            "a pipeline splits a batch into micro batches by its sequences, and this tensor has none",
            where=f"batch['{name}']",
            found=f"shape {tuple(value.shape)}, with {num_rows} sequences",
            allowed=f"tensors of shape [{num_rows}, ...]",
            hint="another data_collator",
        )
