"""A tracker's own run, which goes on where a run of hfdist does: TensorBoard, Weights & Biases, Trackio, MLflow.

`trackers.json` in the run folder has each tracker's name of its run, and the last step of each figure that was sent. A
tracker keeps its files in the run folder, unless its own variables of the environment say otherwise.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import (
    MLflowCallback,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
)

from hfdist.atomic_write import remove_unfinished, write_atomically
from hfdist.config.composition.config_text import to_values, to_yaml
from hfdist.config.plain_values import flatten
from hfdist.config.run import RunConfig
from hfdist.records import RunFolder, read_lines

PROJECT = "hfdist"
"""The project, or experiment, where neither `report.project` nor the trackers' variables name one."""

if TYPE_CHECKING:
    # For mypy: the class after the mixin is a callback.
    _Callback = TrainerCallback
else:
    _Callback = object


class TensorBoardRun(TensorBoardCallback):
    """Writes into `tensorboard/`; its reader drops what was written of steps that are done again."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self._config = config
        self.logging_dir = self.logging_dir or str(config.run.folder.tensorboard.absolute())

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: object) -> None:
        """Open the writer, and write the config."""
        self.on_rollback(state)
        super().on_train_begin(args, state, control, **kwargs)
        if self.tb_writer is not None:
            self.tb_writer.add_text("config", f"```yaml\n{to_yaml(self._config)}\n```")

    def on_rollback(self, state: TrainerState) -> None:
        """Go on after the present step, in a new file of events."""
        if not state.is_world_process_zero:
            return
        if self.tb_writer is not None:
            self.tb_writer.close()
        # TensorBoard's reader drops what older files have from this step on; step 0 is the evaluation at the start.
        first = state.global_step + 1 if state.global_step > 0 else 0
        self.tb_writer = self._SummaryWriter(log_dir=self.logging_dir, purge_step=first)


class _ContinuedRun(_Callback):
    """A tracker that takes nothing back: it is sent no figure of a step that is done again."""

    tracker: ClassVar[str]

    def __init__(self, config: RunConfig) -> None:
        self._config, self._folder = config, RunFolder(config.run.folder.path.absolute())
        self._run: str | None = None
        """The tracker's run, as the tracker names it; None: a new one begins."""
        self._sent: dict[str, int] = {}
        """Last step of each figure that was sent before the run came to the present step by a resume or a rollback."""
        self._seen: dict[str, int] = {}
        """Last step of each figure that has been sent by now, or stands in metrics.jsonl."""
        super().__init__()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *rest: Any, **named: Any) -> None:
        """Open the tracker's run. Must come before what moves lines of later steps out of metrics.jsonl."""
        if state.is_world_process_zero:
            self._find_earlier_run()
        super().on_train_begin(args, state, *rest, **named)
        self.on_rollback(state)

    def _find_earlier_run(self) -> None:
        """Read which run of the tracker an earlier start wrote into, and which figures it may have sent."""
        known = _read(self._folder.trackers).get(self.tracker)
        if known is None:
            return
        self._run, self._seen = known["run"], known["sent"]
        for line in read_lines(self._folder.metrics):
            self._see(line, int(line.get("step", -1)))

    def on_rollback(self, state: TrainerState) -> None:
        """Write down the last step of each figure that was sent, as steps will be done again."""
        if state.is_world_process_zero:
            self._sent = dict(self._seen)
            _write(self._folder.trackers, self.tracker, {"run": self._run, "sent": self._sent})

    def on_log(self, args: TrainingArguments, state: TrainerState, *rest: Any, **named: Any) -> None:
        """Send the figures that are new."""
        step, logs = state.global_step, named.pop("logs", None) or {}
        new = {key: value for key, value in logs.items() if step > self._sent.get(key, -1)}
        self._see(new, step)
        if new:
            super().on_log(args, state, *rest, logs=new, **named)

    def _see(self, logs: Mapping[str, object], step: int) -> None:
        self._seen |= {key: step for key in logs if step > self._seen.get(key, -1)}


_WANDB_VARIABLES = {
    "project": "WANDB_PROJECT",
    "name": "WANDB_NAME",
    "id": "WANDB_RUN_ID",
    "resume": "WANDB_RESUME",
    "dir": "WANDB_DIR",
}
"""Arguments of `wandb.init`, and the variable of the environment that says the same."""


class WandbRun(_ContinuedRun, WandbCallback):
    """The run of a project of Weights & Biases."""

    tracker = "wandb"

    def __init__(self, config: RunConfig) -> None:
        # A process that is killed leaves only what is in its file; by itself wandb writes four times a minute.
        os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "1")
        super().__init__(config)

    def setup(self, args: TrainingArguments, state: TrainerState, model: object, **kwargs: object) -> None:
        """Begin the run or go on in it, unless the program has begun one."""
        if state.is_world_process_zero and self._wandb.run is None:
            self._run = self._run or secrets.token_hex(4)
            values = {
                "WANDB_PROJECT": PROJECT,
                "WANDB_NAME": self._config.run.name,
                "WANDB_RUN_ID": self._run,
                "WANDB_RESUME": "allow",
                "WANDB_DIR": str(self._folder.path),
            }
            # A variable that the user has set wins over ours; `report.project` wins over both.
            arguments = {key: values[name] for key, name in _WANDB_VARIABLES.items() if name not in os.environ}
            if self._config.report.project is not None:
                arguments["project"] = self._config.report.project
            self._wandb.init(**arguments)
            self._wandb.config.update(to_values(self._config), allow_val_change=True)
        super().setup(args, state, model, **kwargs)

    def end_run(self, exit_code: int) -> None:
        """End the tracker's run; the original leaves that to the end of the process."""
        self._wandb.finish(exit_code=exit_code)


class TrackioRun(_ContinuedRun, TrackioCallback):
    """The run of a project of Trackio, which knows a run by its shown name alone: so random letters end the name."""

    tracker = "trackio"

    def __init__(self, config: RunConfig) -> None:
        # trackio reads it when it is imported.
        os.environ.setdefault("TRACKIO_DIR", str(config.run.folder.trackio.absolute()))
        super().__init__(config)

    def setup(self, args: TrainingArguments, state: TrainerState, model: object, **kwargs: object) -> None:
        """Begin the run or go on in it."""
        self._run = self._run or f"{self._config.run.name}-{secrets.token_hex(2)}"
        args = copy.copy(args)
        args.run_name, args.project = self._run, self._config.report.project or PROJECT
        super().setup(args, state, model, **kwargs)
        if state.is_world_process_zero:
            self._trackio.config.update(to_values(self._config))


class MLflowRun(_ContinuedRun, MLflowCallback):
    """The run of an experiment of MLflow, whose server or folder gives it its name."""

    tracker = "mlflow"

    def __init__(self, config: RunConfig) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        super().__init__(config)

    def setup(self, args: TrainingArguments, state: TrainerState, model: object) -> None:
        """Begin the run or go on in it; a run's parameters are of its beginning, since MLflow lets none change."""
        # The arguments of transformers say the same as the config, and some change at each start.
        ours = {"MLFLOW_EXPERIMENT_NAME": PROJECT, "MLFLOW_MAX_LOG_PARAMS": "0"}
        if self._run is not None:
            ours["MLFLOW_RUN_ID"] = self._run
        values = {name: value for name, value in ours.items() if name not in os.environ}
        if self._config.report.project is not None:
            values["MLFLOW_EXPERIMENT_NAME"] = self._config.report.project
        # Only here: the next run of this process may have another name, and another folder.
        with _environment(values, "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID"):
            if "MLFLOW_TRACKING_URI" not in os.environ:
                # A folder needs neither a server nor the packages of a database.
                os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
                self._ml_flow.set_tracking_uri(self._folder.mlflow)
            super().setup(args, state, model)
        if not state.is_world_process_zero:
            return
        if self._run is None:
            leaves = {key: value for key, value in flatten(to_values(self._config), "") if key and _is_leaf(value)}
            self._ml_flow.log_params(leaves)
        self._run = self._ml_flow.active_run().info.run_id

    def end_run(self, exit_code: int) -> None:
        """End the tracker's run as failed at another exit code than 0; the original has ended it as finished."""
        if exit_code != 0:
            self._ml_flow.end_run("FAILED")


@contextmanager
def _environment(values: Mapping[str, str], *names: str) -> Iterator[None]:
    """Set variables of the environment within the block; after it, these and those of `names` are as they were."""
    before = {name: os.environ.get(name) for name in (*values, *names)}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            # mlflow takes MLFLOW_RUN_ID away itself.
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _is_leaf(value: object) -> bool:
    return not isinstance(value, (dict, list))


def _read(path: Path) -> dict[str, Any]:
    """Give what is known of each tracker's run; nothing where the file is missing or damaged: a new run begins."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _write(path: Path, tracker: str, known: Mapping[str, object]) -> None:
    """Put what is known of one tracker's run into the file, and leave the other trackers' as it was."""
    remove_unfinished(path)
    write_atomically(path, (json.dumps(_read(path) | {tracker: known}, indent=1) + "\n").encode())
