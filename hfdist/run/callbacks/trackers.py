"""The trackers of `report.to`: callbacks of transformers, of which none can fail a run."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from hfdist.config.run import RunConfig
from hfdist.errors import HfdistError, named_line, printable
from hfdist.records.recorder import LONGEST_TEXT
from hfdist.run.callbacks.tracker_runs import MLflowRun, TensorBoardRun, TrackioRun, WandbRun

logger = logging.getLogger(__name__)

_CONTINUED: Mapping[str, Callable[[RunConfig], TrainerCallback]] = {
    "tensorboard": TensorBoardRun,
    "wandb": WandbRun,
    "trackio": TrackioRun,
    "mlflow": MLflowRun,
}
"""Trackers in which a run that goes on does so, too; in the others each start is a run of its own."""


def _event(name: str) -> Callable[..., None]:
    """Make the method of an event that is passed on."""

    def on_event(self: Trackers, *positional: object, **named: object) -> None:
        self._pass_on(name, *positional, **named)

    return on_event


class Trackers(TrainerCallback):
    """Passes events on to the callback of each tracker. One that fails gets no more, and a line says so.

    Uploads at a push to the Hub are none of the events: a tracker uploads what its own variables say, and no more.
    """

    def __init__(self, config: RunConfig) -> None:
        self._callbacks: dict[str, TrainerCallback] = {}
        self._end: Callable[[], None] | None = None
        """Passes on the end of the training; None: it has not ended."""
        for name in config.report.to:
            with self._giving_up(name):
                make = _CONTINUED.get(name)
                if make is None:
                    [kind] = get_reporting_integration_callbacks([name])
                    self._callbacks[name] = kind()
                else:
                    self._callbacks[name] = make(config)

    on_init_end = _event("on_init_end")
    on_train_begin = _event("on_train_begin")
    on_step_end = _event("on_step_end")
    on_log = _event("on_log")
    on_evaluate = _event("on_evaluate")
    on_predict = _event("on_predict")
    on_save = _event("on_save")
    on_rollback = _event("on_rollback")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: object
    ) -> None:
        """Keep the event until the run ends: after the training the run still evaluates and reports."""
        self._end = partial(self._pass_on, "on_train_end", args, state, control, **named)

    def end(self, exit_code: int = 0) -> None:
        """End the trackers' runs: as finished if `exit_code` is 0, otherwise as failed."""
        if self._end is not None and exit_code == 0:
            self._end()
        self._pass_on("end_run", exit_code)

    def _pass_on(self, event: str, *positional: object, **named: object) -> None:
        # A copy of the list, as a tracker that fails is taken out of it.
        for name, callback in list(self._callbacks.items()):
            method = getattr(callback, event, None)
            # Some events are hfdist's own, and not each tracker has them.
            if method is not None:
                with self._giving_up(name):
                    method(*positional, **named)

    @contextmanager
    def _giving_up(self, name: str) -> Iterator[None]:
        """Turn any error of a tracker into a warning, and pass nothing on to it any more."""
        try:
            yield
        except Exception as error:
            self._callbacks.pop(name, None)
            what = printable(named_line(error), LONGEST_TEXT)
            logger.warning("no more reports to %s: %s", name, what)


@contextmanager
def ending_trackers(trainer: Trainer) -> Iterator[None]:
    """End the trackers' runs after the block.

    After an error they end with the process: a tracker may wait long for its server, and the error is told first.
    """
    every = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Trackers)]
    try:
        yield
    except BaseException as error:
        for trackers in every:
            atexit.register(trackers.end, error.exit_code if isinstance(error, HfdistError) else 1)
        raise
    for trackers in every:
        trackers.end()
