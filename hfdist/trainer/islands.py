"""A Trainer that is an island: behind each round it meets the others, and goes on from what all have learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from hfdist.checkpoint.piece import Piece
from hfdist.config.islands import IslandsConfig
from hfdist.islands.outer import OuterOptimizer
from hfdist.watch.callback import watches_among
from hfdist.watch.diagnosis import MEETING

if TYPE_CHECKING:
    from hfdist.islands.rounds import Rounds


class Islands(TrainerCallback):
    """Leads one Trainer through the rounds. All ranks call its methods together."""

    def __init__(self, trainer: Any, config: IslandsConfig) -> None:
        self._trainer, self._config = trainer, config
        self._outer: OuterOptimizer | None = None
        self._rounds: Rounds | None = None

    def begin(self) -> None:
        """Make the outer optimizer of a training that begins, before a checkpoint is read into its pieces."""
        config = self._config
        self._outer = OuterOptimizer(self._trainer.engine.pieces, lr=config.outer_lr, momentum=config.outer_momentum)

    def pieces(self) -> Iterator[Piece]:
        """List the outer state of this rank."""
        return iter(()) if self._outer is None else self._outer.pieces()

    def figures(self) -> dict[str, float]:
        """Give what the next training line says."""
        return {} if self._rounds is None else self._rounds.figures()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Meet the others, to begin together or where they are."""
        # It needs a package that other runs do without.
        from hfdist.islands.rounds import Rounds

        assert self._outer is not None
        self._outer.begin(state.global_step)
        trainer = self._trainer
        self._rounds = Rounds(self._config, self._job(), self._outer, lambda: list(trainer.checkpointer.pieces()))
        self._meet(self._outer.step, state, control)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Meet the others behind a round, and behind the last step."""
        assert self._outer is not None
        is_last = state.global_step >= state.max_steps > self._outer.step
        if state.global_step % self._config.every == 0 or is_last:
            self._meet(state.global_step, state, control)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the others."""
        if self._rounds is not None:
            self._rounds.leave()
            self._rounds = None

    def _meet(self, step: int, state: TrainerState, control: TrainerControl) -> None:
        assert self._rounds is not None
        trainer = self._trainer
        watches = watches_among(trainer.callback_handler.callbacks)
        before = [watch.progress.exempt for watch in watches]
        for watch in watches:
            watch.progress.exempt = MEETING
        with trainer.throughput.paused():
            found = self._rounds.meet(step, lambda: trainer.checkpointer.progress_state() | {"step": state.global_step})
            trainer.engine.after_load()
        for watch, exempt in zip(watches, before, strict=True):
            watch.progress.exempt = exempt
        if found is not None:
            trainer.checkpointer.load_progress(found)
            state.global_step = int(found["step"])
            control.should_training_stop |= state.global_step >= state.max_steps
            trainer.restart_figures()

    def _job(self) -> dict[str, Any]:
        """What all islands must have alike, by key."""
        trainer, config, outer = self._trainer, self._config, self._outer
        assert outer is not None
        stream, strategy = trainer.token_stream, trainer.strategy
        return {
            "islands.count": config.count,
            "islands.every": config.every,
            "islands.outer_lr": config.outer_lr,
            "islands.outer_momentum": config.outer_momentum,
            "islands.codec": config.codec.value,
            "strategy": strategy.topology.describe(),
            "strategy.sharding": strategy.config.sharding.value,
            "train.max_steps": trainer.state.max_steps,
            "train.global_batch_size": strategy.batch.global_batch_size,
            "data": None if stream is None else stream.identity,
            "model, or what of it is trained": outer.layout,
        }
