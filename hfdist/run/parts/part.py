"""A part: what a run does or reports beside the training itself. `PARTS` has all of them in their order."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto

from transformers import TrainerCallback

from hfdist.config.run import RunConfig
from hfdist.run.state import RunState
from hfdist.topology import Topology

logger = logging.getLogger(__name__)


class Joins(Enum):
    """The moment at which callbacks join those of the Trainer.

    A recipe of your own may add others between the last two.
    """

    constructor = auto()
    """Given to the Trainer, before its own; there is no Trainer yet."""
    built = auto()
    """Once the Trainer is built."""
    training = auto()
    """At the beginning of the training: `run.start` is known."""


class Part:
    """Does nothing: a part overrides what it needs. An object of it belongs to one run; all ranks have it."""

    joins = Joins.built

    def check(self, config: RunConfig, topology: Topology) -> None:
        """Raise a ConfigError on what the config names and nobody has; before anything is built."""

    def open(self, run: RunState) -> None:
        """Open what the part writes to, on rank 0; model and data are known to be right, and no rank waits."""

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Make the callbacks of the part, and set what other parts read of them."""
        return ()

    def during(self, run: RunState) -> AbstractContextManager[object]:
        """Give what is entered before the training and left after `finish`, also when an error ends the run."""
        return nullcontext()

    def stop(self, run: RunState) -> None:
        """Do on rank 0 what a run that a signal has stopped must not leave undone, while the other ranks wait."""

    def finish(self, run: RunState) -> None:
        """Do on rank 0 what follows on the export, while the other ranks wait."""


@contextmanager
def warning_of_failure(what: str) -> Iterator[None]:
    """Log an error in place of raising it: the model is trained, and what fails now must not fail the run."""
    try:
        yield
    except Exception as error:
        logger.warning("no %s: %s: %s", what, type(error).__name__, error)
