"""A Trainer that is an island: behind each round it meets the others, and goes on from what all have learned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
        self._outer = OuterOptimizer(
            self._trainer.engine.pieces,
            lr=config.outer_lr,
            momentum=config.outer_momentum,
            fragments=config.fragments,
            mix=config.mix,
        )

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
        self._begin(self._outer.step)
        self._end(state, control)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begin an exchange, or end one, if it is time; behind the last step exchange all."""
        assert self._outer is not None
        assert self._rounds is not None
        config, rounds = self._config, self._rounds
        # A checkpoint has no exchange that is under way.
        is_saved = control.should_save or self._trainer.checkpointer.replicates_at(state.global_step)
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
            if config.overlap == 0 or is_saved:
                self._end(state, control)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the others."""
        if self._rounds is not None:
            self._rounds.leave()
            self._rounds = None

    def _begin(self, step: int, fragment: int | None = None) -> None:
        assert self._rounds is not None
        with self._waiting():
            self._rounds.begin(step, fragment)

    def _end(self, state: TrainerState, control: TrainerControl) -> None:
        assert self._rounds is not None
        trainer = self._trainer
        with self._waiting():
            found = self._rounds.end(lambda: trainer.checkpointer.progress_state() | {"step": state.global_step})
            trainer.engine.after_load()
        if found is not None:
            trainer.checkpointer.load_progress(found)
            state.global_step = int(found["step"])
            control.should_training_stop |= state.global_step >= state.max_steps
            trainer.restart_figures()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Meanwhile no rank shows progress, and nothing is trained."""
        trainer = self._trainer
        watches = watches_among(trainer.callback_handler.callbacks)
        before = [watch.progress.exempt for watch in watches]
        for watch in watches:
            watch.progress.exempt = MEETING
        with trainer.throughput.paused():
            yield
        for watch, exempt in zip(watches, before, strict=True):
            watch.progress.exempt = exempt

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
            "islands.fragments": config.fragments,
            "islands.overlap": config.overlap,
            "islands.mix": config.mix,
            "islands.codec": config.codec.value,
            "strategy": strategy.topology.describe(),
            "strategy.sharding": strategy.config.sharding.value,
            "train.max_steps": trainer.state.max_steps,
            "train.global_batch_size": strategy.batch.global_batch_size,
            "data": None if stream is None else stream.identity,
            "model, or what of it is trained": outer.layout,
        }
