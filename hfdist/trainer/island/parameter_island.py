"""An island that sends gradients to a parameter server, and takes weights from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from transformers import TrainerControl, TrainerState

from hfdist.checkpoint.piece import Piece
from hfdist.config.islands import IslandsConfig
from hfdist.config.optimizer import OptimizerConfig
from hfdist.config.plain_values import plain
from hfdist.islands.parameter_client import GradientRecorder, ParameterClient
from hfdist.trainer.checkpointing.checkpointer import Checkpointer
from hfdist.trainer.island.callback import IslandCallback
from hfdist.trainer.training import Training
from hfdist.watch.heartbeat import MEETING


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer:
    """Settings by which a parameter server steps its optimizer."""

    config: OptimizerConfig
    max_grad_norm: float
    """Norm to which the server clips gradients; 0: it clips none."""


class ParameterIsland(IslandCallback):
    """An island that sends its gradients to a parameter server after each step, and takes weights from it."""

    def __init__(
        self, training: Training, checkpointer: Checkpointer, config: IslandsConfig, server: ServerOptimizer
    ) -> None:
        super().__init__(training, checkpointer, config)
        self._server = server
        self._client: ParameterClient | None = None

    def begin(self) -> None:
        """Make the client of the parameter server."""
        self._client = ParameterClient(self._config, self._server.config, self._training.engine.pieces)

    def pieces(self, of_engine: Iterable[Piece]) -> Iterable[Piece]:
        """Give the engine's pieces with the state of the server's optimizer, in place of gradients."""
        return of_engine if self._client is None else self._client.pieces(of_engine)

    def figures(self) -> dict[str, float]:
        """Give the figures of the exchanges since the last training line."""
        return {} if self._client is None else self._client.figures()

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Connect to the server, and take its weights; a server without weights takes those of this island."""
        assert self._client is not None
        server = self._server
        # The warm-up in steps: the server has the schedule, and knows neither tokens nor the length of a run.
        warmup = {"warmup_steps": self._training.args.get_warmup_steps(state.max_steps), "warmup_tokens": None}
        job = self._job(self._client.layout, "staleness", "server_shards") | {
            "optimizer": plain(replace(server.config, **warmup, warmup_fraction=None)),
            "train.max_grad_norm": server.max_grad_norm,
        }
        with self._training.waiting(MEETING):
            found = self._client.connect(job, state.global_step, self._checkpointer.progress_state())
            self._training.engine.after_load()
        if found["step"] != state.global_step:
            self._go_on_from(found["state"] | {"step": found["step"]}, state, control)

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Send the gradients of the step, and take the server's weights."""
        assert self._client is not None
        progress = self._checkpointer.progress_state()
        with self._training.waiting(MEETING):
            found = self._client.exchange(state.global_step, self._recorder(), self._targets_of_step(), progress)
            self._training.engine.after_load()
        if found is not None:
            self._go_on_from(found["state"] | {"step": found["step"]}, state, control)

    def before_save(self) -> None:
        """Fetch the state of the server's optimizer for the checkpoint."""
        assert self._client is not None
        with self._training.waiting(MEETING):
            self._client.fetch()
            self._training.engine.after_load()

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Leave the others."""
        assert self._client is not None
        self._client.leave()

    def _recorder(self) -> GradientRecorder:
        """Give the optimizer that records gradients in place of a step, from under the wrappers around it."""
        inner: Any = self._training.optimizer
        while not isinstance(inner, GradientRecorder):
            inner = inner.optimizer
        return inner
