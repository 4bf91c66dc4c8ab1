"""What is where in a run's folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

_LEDGER_FILE = re.compile(r"(lane|files)-[\w.-]{1,200}(?<!\.tmp)", re.ASCII)


class RunFolder:
    """The folder of a run, and the paths in it: not all of them are there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / "run.lock"
        self.config = path / "config.yaml"
        self.record = path / "run.json"
        """How the last start stands, or how it ended; docs/records.md has this and the next three."""
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.ranks = path / "ranks.jsonl"
        self.marks = (self.config, self.record, self.metrics)
        """Files of which one makes a folder a run's."""
        self.plan = path / "plan.json"
        """What the run was planned to need; docs/plan.md."""
        self.grade = path / "grade.json"
        """How the plan compares with what was measured."""
        self.ledger = path / "ledger"
        """Folder with what was read of the data."""
        self.awaited_records = path / "records.awaited"
        """While a checkpoint comes from the mirror and its records after it: the name of the newest one before."""
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.adapter = path / "adapter"
        self.loss_picture = path / "loss.png"
        self.lm_eval = path / "lm_eval.json"
        self.samples = path / "samples.jsonl"
        """Continued prompts of each evaluation."""
        self.rollouts = path / "rollouts.jsonl"
        """Some answers of each logged step, with their rewards."""
        self.rollouts_ledger = path / "rollouts-ledger.jsonl"
        """Each prompt that was trained on answers of generators."""
        self.generators = path / "generators"
        """Folder with the policy, and with what generators print."""
        self.reference = path / "reference"
        """Folder with log-probabilities of the reference."""
        self.teacher = path / "teacher"
        """Folder with the likeliest tokens of the teacher."""
        self.timeline = path / "timeline.json"
        """A step of a pipeline as a Chrome trace."""
        self.watch = path / "watch"
        """Folder with a folder for each verdict, and for each request."""
        self.trackers = path / "trackers.json"
        """Which runs of trackers are this one."""
        self.tensorboard = path / "tensorboard"
        self.trackio = path / "trackio"
        self.mlflow = path / "mlruns"
        self.proof = path / "prove"
        """Folder of the runs that `hfdist prove` compares."""
        self.index = path / "index"
        """Folder of the indexes of `hfdist index`, one for each source."""
        self.tokens = path / "tokens"
        """Folder of the token files of `hfdist pretokenize`."""
        self.step_lines = (self.metrics, self.ranks, self.samples, self.rollouts, self.rollouts_ledger)
        """Files with lines of steps."""

    def records(self) -> dict[str, Path]:
        """Give the files that an audit or a report needs besides checkpoints, by their places in the folder."""
        ledger = self.ledger.iterdir() if self.ledger.is_dir() else ()
        paths = [self.record, self.events, *self.step_lines]
        paths += (path for path in ledger if _LEDGER_FILE.fullmatch(path.name))
        return {path.relative_to(self.path).as_posix(): path for path in paths if path.is_file()}

    def is_record(self, name: str) -> bool:
        """Whether a place in the folder is one that `records` may give."""
        folder, _, file_name = name.rpartition("/")
        if folder == self.ledger.name:
            return _LEDGER_FILE.fullmatch(file_name) is not None
        return name in {path.name for path in (self.record, self.events, *self.step_lines)}


IN_RUN = RunFolder(Path())
"""The same paths, as they are from the folder."""


def is_run_folder(text: str) -> bool:
    """Whether a word of a command line is the folder of a run."""
    # `os` says no to a word that can be no path; pathlib raises.
    return os.path.isfile(RunFolder(Path(text)).config)
