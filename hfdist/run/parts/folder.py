"""The folder of a run: its lock and its record, and what an earlier run has left in it."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Sequence
from functools import partial

from transformers import TrainerCallback, TrainerControl, TrainerState

from hfdist.atomic_write import write_atomically
from hfdist.collectives import on_rank_zero
from hfdist.config.composition.config_text import to_yaml
from hfdist.config.run import RunConfig
from hfdist.records import RunRecorder
from hfdist.records.lines import set_aside
from hfdist.records.run_lock import RunLock
from hfdist.run.data import writing
from hfdist.run.parts.part import Joins, Part
from hfdist.run.state import RunState


class FolderPart(Part):
    """Opens the folder, and clears it of an earlier run once this one is sure to begin."""

    joins = Joins.training

    def open(self, run: RunState) -> None:
        """Lock it, and begin the record of this start.

        Raises:
            ConfigError: a folder that cannot be written or that another run is using.
        """
        config, folder = run.config, run.config.run.folder.path
        with writing("run.dir", config.run.dir):
            folder.mkdir(parents=True, exist_ok=True)
            # The process holds the lock until it ends, for whatever reason.
            atexit.register(RunLock(folder).release)
        layout = run.topology.degrees | {"sharding": config.strategy.sharding.value}
        run.recorder = RunRecorder(folder, layout, run.topology.world_size)

    def callbacks(self, run: RunState) -> Sequence[TrainerCallback]:
        """Put its callback before all others, also those of the Trainer: they open files that it moves away."""
        config, goes_on = run.config, run.start.goes_on
        if not goes_on:
            # Left by another run in this folder.
            for kept in (config.run.folder.reference, config.run.folder.teacher):
                on_rank_zero(partial(shutil.rmtree, kept, ignore_errors=True))
        run.trainer.callback_handler.callbacks.insert(0, Beginning(config, goes_on=goes_on))
        return ()


class Beginning(TrainerCallback):
    """Writes the config after the checkpoint is read, so that a refused start leaves the config of the folder's run.

    If the run does not continue an earlier start in the folder, this moves all lines of that start away.
    """

    def __init__(self, config: RunConfig, *, goes_on: bool) -> None:
        self._config, self._goes_on = config, goes_on

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Call on all ranks."""
        on_rank_zero(self._begin)

    def _begin(self) -> None:
        folder = self._config.run.folder
        write_atomically(folder.config, to_yaml(self._config).encode())
        if not self._goes_on:
            for path in (folder.metrics, folder.ranks, folder.samples, folder.rollouts):
                set_aside(path)
            # Trackers begin a new run, too.
            folder.trackers.unlink(missing_ok=True)
