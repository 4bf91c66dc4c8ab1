"""An island that exchanges weights with the others after each round of steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from transformers import TrainerControl, TrainerState

from hfdist.checkpoint.piece import Piece
from hfdist.config.islands import IslandMethod, IslandsConfig
from hfdist.config.plain_values import plain
from hfdist.data import Cursor
from hfdist.islands.data_share import DataShare
from hfdist.islands.outer import OuterOptimizer
from hfdist.islands.proximal import ProximalTerm
from hfdist.islands.rounds import Rounds
from hfdist.trainer.checkpointing.checkpointer import Checkpointer
from hfdist.trainer.island.callback import IslandCallback
from hfdist.trainer.training import Training
from hfdist.watch.heartbeat import MEETING


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
        own = ("index", "address", "port", "timeout_seconds", "staleness", "server_shards", "method", "count", "codec")
        job = self._job(self._outer.layout, *(name for name in plain(self._config) if name not in own))
        stream, keeper, share = self._training.stream, self._checkpointer, None
        if stream is not None and stream.shares is not None:
            data_size = self._training.strategy.topology.data
            share = DataShare(stream, data_size, self._cursor, keeper.data.write_ledger)
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
        # The checkpoint may be that of another island by now, which has exchanged.
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
                    # The last checkpoint counts what this island had read before; the ledger does not any more.
                    control.should_save |= self._training.args.save_strategy != "no"
            if not self._rounds.rests or state.global_step >= state.max_steps:
                break
            self._begin(self._outer.step, rests=True)
        if self._proximal is not None:
            self._proximal.begin_round()

    def _cursor(self) -> Cursor:
        cursor = self._checkpointer.data.merged_cursor()
        assert cursor is not None
        return cursor

    def _state(self, state: TrainerState) -> dict[str, object]:
        """What another island needs besides tensors to go on as this one."""
        keeper = self._checkpointer
        cursor = None if self._data_share is None else self._cursor().to_json()
        return {**keeper.progress_state(), "step": state.global_step, "cursor": cursor}
