"""An island that exchanges weights with the others after each round of steps.

With `exchange_every` 4 and `overlap` 2, an exchange runs beside the two steps after its begin:

    after step    4     5     6     7     8     9     10
                  begin       end         begin       end
"""

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

_NOT_COMPARED = (
    "index",
    "address",
    "port",
    "timeout_seconds",
    "staleness",
    "server_shards",
    "method",
    "count",
    "codec",
)
"""Keys of `islands` that may differ between islands, are of the other method, or are compared anyway."""


class RoundIsland(IslandCallback):
    """The callback of an island that trains for a round of steps by itself, and then meets the others."""

    def __init__(self, training: Training, checkpointer: Checkpointer, config: IslandsConfig) -> None:
        super().__init__(training, checkpointer, config)
        self._outer: OuterOptimizer | None = None
        self._rounds: Rounds | None = None
        self._proximal: ProximalTerm | None = None
        self._data_share: DataShare | None = None
        """This island's share of the data; None: each island has data of its own."""
        self._saves = False
        """Whether a checkpoint is due after the next step, as a meeting has changed what the last one says."""
        self._lr = 0.0
        """Learning rate of the present step."""
        self._num_targets = 0.0
        """Number of targets since the last exchange."""

    def begin(self) -> None:
        """Make the outer optimizer, and the term that holds weights near those of the last exchange."""
        self._outer = OuterOptimizer(self._training.engine.pieces, self._config)
        if self._config.proximal > 0:
            self._proximal = ProximalTerm(self._outer.owned, self._config.proximal)

    def pieces(self, of_engine: Iterable[Piece]) -> Iterable[Piece]:
        """Give the engine's pieces, and after them those of the outer optimizer."""
        return of_engine if self._outer is None else itertools.chain(of_engine, self._outer.pieces())

    def figures(self) -> dict[str, float]:
        """Give the figures of the rounds since the last training line."""
        return {} if self._rounds is None else self._rounds.figures()

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Meet the others, to begin together or where they are."""
        assert self._outer is not None
        self._outer.begin(state.global_step)
        compared = [name for name in plain(self._config) if name not in _NOT_COMPARED]
        job = self._job(self._outer.layout, *compared)
        stream, keeper = self._training.stream, self._checkpointer
        self._data_share = None
        if stream is not None and stream.shares is not None:
            data_size = self._training.strategy.topology.data
            self._data_share = DataShare(stream, data_size, self._cursor, keeper.data.write_ledger)
        self._rounds = Rounds(self._config, job, self._outer, lambda: list(keeper.pieces()), self._data_share)
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
        # An exchange that is under way ends before a save: a checkpoint cannot hold it.
        is_saved = control.should_save or self._checkpointer.replicates_at(state.global_step)
        if rounds.is_open:
            is_due = state.global_step >= rounds.open_step + config.overlap
            if is_due or is_saved or state.global_step >= state.max_steps:
                self._end(state, control)
        # The checkpoint may be that of another island by now, which has exchanged.
        step = state.global_step
        if step <= self._outer.step:
            return
        if step >= state.max_steps:
            self._begin(step)
            self._end(state, control)
        elif step % config.exchange_every == 0:
            num_exchanges = step // config.exchange_every
            self._begin(step, num_exchanges % config.fragments)
            if config.overlap == 0 or is_saved or rounds.deals:
                self._end(state, control)

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Leave the others."""
        if self._rounds is not None:
            self._rounds.leave()
            self._rounds = None

    def _begin(self, step: int, fragment: int | None = None, *, rests: bool = False) -> None:
        """Begin an exchange.

        Args:
            step: the step after which it begins.
            fragment: number of the part of the model that is exchanged; None: the whole model.
            rests: whether this island has not trained, and waits for what the others learn.
        """
        assert self._rounds is not None
        weight = self._num_targets if self._config.method is IslandMethod.federated else 1.0
        with self._training.waiting(MEETING):
            self._rounds.begin(step, fragment, weight=weight, rests=rests)
        self._num_targets = 0.0

    def _end(self, state: TrainerState, control: TrainerControl) -> None:
        """End the exchange that is under way, and those after it for as long as this island rests."""
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
        """Give this island's place in the data."""
        cursor = self._checkpointer.data.merged_cursor()
        assert cursor is not None
        return cursor

    def _state(self, state: TrainerState) -> dict[str, object]:
        """Give all but tensors that another island needs to go on as this one, as JSON."""
        keeper = self._checkpointer
        cursor = None if self._data_share is None else self._cursor().to_json()
        return {**keeper.progress_state(), "step": state.global_step, "cursor": cursor}
