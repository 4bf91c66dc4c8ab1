"""A Trainer that is an island: after each round, or each step, it goes on from what all have learned."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

from hfdist.checkpoint.piece import Piece
from hfdist.config.islands import IslandMethod, IslandsConfig
from hfdist.config.optimizer import OptimizerConfig
from hfdist.config.schema import plain
from hfdist.data import Cursor
from hfdist.data.cache import digest_of
from hfdist.errors import CheckpointError, PeerError, first_line
from hfdist.islands.data_share import DataShare
from hfdist.islands.outer import OuterOptimizer
from hfdist.islands.parameter_client import GradientRecorder, ParameterClient
from hfdist.islands.proximal import ProximalTerm
from hfdist.islands.rounds import Rounds
from hfdist.messages.message import Message
from hfdist.trainer.checkpointing.checkpointer import Checkpointer
from hfdist.trainer.training import Training
from hfdist.watch.diagnosis import MEETING


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer:
    """Settings by which a parameter server steps its optimizer."""

    config: OptimizerConfig
    max_grad_norm: float


def make_island(
    training: Training, checkpointer: Checkpointer, config: IslandsConfig, server: ServerOptimizer | None
) -> IslandCallback:
    """Make the callback of an island by its method; `server`: settings of a parameter server, if there is one."""
    if config.method is not IslandMethod.parameter_server:
        return RoundIsland(training, checkpointer, config)
    assert server is not None
    return ParameterIsland(training, checkpointer, config, server)


class IslandCallback(TrainerCallback):
    """Lets one Trainer train with other islands. All ranks call its methods together."""

    def __init__(self, training: Training, checkpointer: Checkpointer, config: IslandsConfig) -> None:
        self._training, self._checkpointer, self._config = training, checkpointer, config

    @abstractmethod
    def begin(self) -> None:
        """Make the state of a training that begins, before a checkpoint is read into its pieces."""

    @abstractmethod
    def pieces(self, of_engine: Iterable[Piece]) -> Iterable[Piece]:
        """List what a checkpoint holds of this rank."""

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Give what the next training line says."""

    def before_save(self) -> None:
        """Make the pieces ready for a checkpoint."""
        return

    def _go_on_from(self, found: Mapping[str, object], state: TrainerState, control: TrainerControl) -> None:
        """Go on where another island is; PeerError: what it says of that cannot be."""
        given = Message(found)
        try:
            step = given.integer("step", most=state.max_steps)
            given.integer("schedule_steps", most=state.max_steps)
            self._checkpointer.load_progress(found)
        except (KeyError, TypeError, ValueError, AttributeError, CheckpointError) as error:
            what, hint = "the state of another island cannot be used", "the same command goes on from its checkpoint"
            raise PeerError(what, where="islands.index", found=first_line(error), hint=hint) from error
        state.global_step = step
        control.should_training_stop |= state.global_step >= state.max_steps
        self._training.restart_figures()

    def _targets_of_step(self) -> float:
        """Count the targets of the step that has ended; 1 if they are not counted."""
        number = self._training.num_targets
        return 1.0 if number is None else float(number)

    def _job(self, layout: str, *keys: str) -> dict[str, object]:
        """Give the settings that all islands must have alike, by key; `keys`: further keys of `islands`."""
        training, values = self._training, plain(self._config)
        stream, strategy = training.stream, training.strategy
        job = {f"islands.{key}": values[key] for key in ("method", "count", "codec", *keys)} | {
            "strategy": strategy.topology.describe(),
            "strategy.sharding": strategy.config.sharding.value,
            "train.max_steps": training.state.max_steps,
            "model, or what of it is trained": layout,
        }
        if self._config.method is IslandMethod.federated:
            # Clients have data and batches of their own.
            tokenizer = cast(PreTrainedTokenizerBase, training.trainer.processing_class)
            return job | {"model.tokenizer": digest_of(sorted(tokenizer.get_vocab().items()))}
        data = None if stream is None else stream.identity
        return job | {"train.global_batch_size": strategy.batch.global_batch_size, "data": data}


class RoundIsland(IslandCallback):
    """An island that exchanges weights with the others after each round of steps."""

    def __init__(self, training: Training, checkpointer: Checkpointer, config: IslandsConfig) -> None:
        super().__init__(training, checkpointer, config)
        self._outer: OuterOptimizer | None = None
        self._rounds: Rounds | None = None
        self._proximal: ProximalTerm | None = None
        self._data_share: DataShare | None = None
        """This island's share of the data; None: each island has data of its own."""
        self._saves = False
        """Whether it saves after the next step."""
        self._lr = 0.0
        self._num_targets = 0.0
        """Number of targets since the last exchange."""

    def begin(self) -> None:
        """Make the outer optimizer."""
        self._outer = OuterOptimizer(self._training.engine.pieces, self._config)
        if self._config.proximal > 0:
            self._proximal = ProximalTerm(self._outer.owned, self._config.proximal)

    def pieces(self, of_engine: Iterable[Piece]) -> Iterable[Piece]:
        """Add the outer state."""
        return itertools.chain(of_engine, () if self._outer is None else self._outer.pieces())

    def figures(self) -> dict[str, float]:
        """Give what the next training line says."""
        return {} if self._rounds is None else self._rounds.figures()

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Meet the others, to begin together or where they are."""
        assert self._outer is not None
        self._outer.begin(state.global_step)
        own = ("index", "address", "port", "timeout_seconds", "staleness", "method", "count", "codec")
        job = self._job(self._outer.layout, *(name for name in plain(self._config) if name not in own))
        stream, keeper, share = self._training.stream, self._checkpointer, None
        if stream is not None and stream.shares is not None:
            data_size = self._training.strategy.topology.data
            share = DataShare(stream, data_size, self._cursor, keeper.write_ledger)
        self._data_share = share
        self._rounds = Rounds(self._config, job, self._outer, lambda: list(keeper.pieces()), share)
        self._begin(self._outer.step)
        self._end(state, control)
        self._saves |= control.should_save

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Keep the learning rate of the step: after the step the schedule has the next one."""
        self._lr = float(self._training.schedule.get_last_lr()[0])

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Begin an exchange, or end one, if it is time; after the last step exchange all."""
        assert self._outer is not None
        assert self._rounds is not None
        config, rounds = self._config, self._rounds
        self._num_targets += self._targets_of_step()
        if self._proximal is not None:
            self._proximal.step(self._lr)
            self._training.engine.after_load()
        control.should_save |= self._saves
        self._saves = False
        # A checkpoint has no exchange that is under way.
        is_saved = control.should_save or self._checkpointer.replicates_at(state.global_step)
        is_due = rounds.is_open and state.global_step >= rounds.open_step + config.overlap
        if rounds.is_open and (is_due or is_saved or state.global_step >= state.max_steps):
            self._end(state, control)
        # It may be that of another island by now, which has exchanged.
        step = state.global_step
        if step <= self._outer.step:
            return
        if step >= state.max_steps:
            self._begin(step)
            self._end(state, control)
        elif step % config.exchange_every == 0:
            self._begin(step, step // config.exchange_every % config.fragments)
            if config.overlap == 0 or is_saved or rounds.deals:
                self._end(state, control)

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Leave the others."""
        if self._rounds is not None:
            self._rounds.leave()
            self._rounds = None

    def _begin(self, step: int, fragment: int | None = None, *, rests: bool = False) -> None:
        assert self._rounds is not None
        weight = self._num_targets if self._config.method is IslandMethod.federated else 1.0
        with self._training.waiting(MEETING):
            self._rounds.begin(step, fragment, weight=weight, rests=rests)
        self._num_targets = 0.0

    def _end(self, state: TrainerState, control: TrainerControl) -> None:
        assert self._rounds is not None
        assert self._outer is not None
        while True:
            with self._training.waiting(MEETING):
                found = self._rounds.end(lambda: self._state(state))
                self._training.engine.after_load()
            if found is not None:
                self._go_on_from(found, state, control)
                if self._data_share is not None:
                    self._data_share.go_on_as(found["cursor"])
                    # Its last checkpoint counts what it had read before, and its ledger does not any more.
                    control.should_save |= self._training.args.save_strategy != "no"
            if not self._rounds.rests or state.global_step >= state.max_steps:
                break
            self._begin(self._outer.step, rests=True)
        if self._proximal is not None:
            self._proximal.begin_round()

    def _cursor(self) -> Cursor:
        cursor = self._checkpointer.merged_cursor()
        assert cursor is not None
        return cursor

    def _state(self, state: TrainerState) -> dict[str, object]:
        """What another island needs besides tensors to go on as this one."""
        keeper = self._checkpointer
        cursor = None if self._data_share is None else self._cursor().to_json()
        return {**keeper.progress_state(), "step": state.global_step, "cursor": cursor}


class ParameterIsland(IslandCallback):
    """An island that sends its gradients to a parameter server after each step, and takes weights from it."""

    def __init__(
        self, training: Training, checkpointer: Checkpointer, config: IslandsConfig, server: ServerOptimizer
    ) -> None:
        super().__init__(training, checkpointer, config)
        self._server = server
        self._client: ParameterClient | None = None

    def begin(self) -> None:
        """Make the client."""
        self._client = ParameterClient(self._config, self._server.config, self._training.engine.pieces)

    def pieces(self, of_engine: Iterable[Piece]) -> Iterable[Piece]:
        """Have the server's state in place of gradients."""
        return of_engine if self._client is None else self._client.pieces(of_engine)

    def figures(self) -> dict[str, float]:
        """Give what the next training line says."""
        return {} if self._client is None else self._client.figures()

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Take the weights of the server, or bring it the own ones."""
        assert self._client is not None
        server = self._server
        # The server has the schedule, and neither the size of a batch nor what the warm-up was written as.
        warmup = {"warmup_steps": self._training.args.get_warmup_steps(state.max_steps), "warmup_tokens": None}
        job = self._job(self._client.layout, "staleness") | {
            "optimizer": plain(replace(server.config, **warmup, warmup_fraction=None)),
            "train.max_grad_norm": server.max_grad_norm,
        }
        with self._training.waiting(MEETING):
            found = self._client.connect(job, state.global_step, self._checkpointer.progress_state())
            self._training.engine.after_load()
        if found["step"] != state.global_step:
            self._go_on_from(found["state"] | {"step": found["step"]}, state, control)

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Push, and take weights."""
        assert self._client is not None
        progress = self._checkpointer.progress_state()
        with self._training.waiting(MEETING):
            found = self._client.exchange(state.global_step, self._recorder(), self._targets_of_step(), progress)
            self._training.engine.after_load()
        if found is not None:
            self._go_on_from(found["state"] | {"step": found["step"]}, state, control)

    def before_save(self) -> None:
        """Fetch what the server's optimizer keeps."""
        assert self._client is not None
        with self._training.waiting(MEETING):
            self._client.fetch()
            self._training.engine.after_load()

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Leave the others."""
        assert self._client is not None
        self._client.leave()

    def _recorder(self) -> GradientRecorder:
        inner: Any = self._training.optimizer
        while not isinstance(inner, GradientRecorder):
            inner = inner.optimizer
        return inner
