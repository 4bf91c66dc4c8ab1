"""What islands of all methods do: the interface that the Trainer calls, and going on where another island is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import cast

from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

from hfdist.checkpoint.piece import Piece
from hfdist.config.islands import IslandMethod, IslandsConfig
from hfdist.config.plain_values import plain
from hfdist.data.cache import digest_of
from hfdist.errors import CheckpointError, PeerError, first_line
from hfdist.messages.message import Message
from hfdist.trainer.checkpointing.checkpointer import Checkpointer
from hfdist.trainer.training import Training


class IslandCallback(TrainerCallback, ABC):
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
        message = Message(found)
        try:
            step = message.integer("step", most=state.max_steps)
            message.integer("schedule_steps", most=state.max_steps)
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
