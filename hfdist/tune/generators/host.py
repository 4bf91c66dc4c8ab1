"""Rank 0's part of the generators: their processes on its machine, the broker, and the gates for other machines."""

from __future__ import annotations

import atexit
import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from hfdist.config.model import TokenizerConfig
from hfdist.config.task import NO_SERVER
from hfdist.processes.child_python import module
from hfdist.tune.generators.answer_check import AnswerCheck
from hfdist.tune.generators.broker import Broker
from hfdist.tune.generators.dispatcher import Dispatcher
from hfdist.tune.generators.open_gates import Gates
from hfdist.tune.generators.policy_files import PolicyFiles
from hfdist.tune.generators.processes import Processes
from hfdist.tune.generators.served_files import TOKENIZER
from hfdist.tune.generators.settings import Settings
from hfdist.tune.generators.sockets import make_folder, open_broker


class _Totals(NamedTuple):
    """What generators have done up to a moment."""

    seconds: float
    """The moment, on the clock `time.monotonic`."""
    num_tokens: int
    num_thrown_away: int
    """Number of prompts whose answers were not used."""


class Host:
    """Starts the processes at once, and opens the broker and the gates with `open`.

    Args:
        settings: settings of the generators.
        tokenizer: tokenizer of the model.
        files: versions of the policy; what an earlier start has left of them is removed.
        logs: folder for what the processes print.
        num_ranks: number of ranks of the run; generators use the GPUs after theirs.
    """

    def __init__(
        self, settings: Settings, tokenizer: PreTrainedTokenizerBase, files: PolicyFiles, logs: Path, *, num_ranks: int
    ) -> None:
        self._settings, self._files = settings, files
        self._broker: Broker | None = None
        self._gates: Gates | None = None
        self._read = _Totals(time.monotonic(), 0, 0)
        """What had been done at the last call of `figures`."""
        self.sockets = make_folder()
        """Folder of the broker's socket."""
        atexit.register(shutil.rmtree, self.sockets, ignore_errors=True)
        shutil.rmtree(files.folder, ignore_errors=True)
        logs.mkdir(parents=True, exist_ok=True)
        config, task = settings.config, settings.config.task
        if task.environment is not None:
            # The data's template, or a tokenizer that was trained on the data, is in no file of the model's.
            tokenizer.save_pretrained(self.sockets / TOKENIZER)
            words = TokenizerConfig(name=str(self.sockets / TOKENIZER))
            self._settings = replace(settings, config=replace(config, model=replace(config.model, tokenizer=words)))
        path = self.sockets / "settings.json"
        self._settings.write(path)
        self._processes = Processes(
            # A server has a process that speaks with it.
            task.generators + len(task.server_addresses),
            module(__package__, str(path), str(files.folder), str(num_ranks)),
            logs,
            are_all=task.generators_port is None,
            without="task.generators=0" if task.server is None else NO_SERVER,
        )

    def open(self) -> list[object]:
        """Open the broker and the gates; give `Gates.way_for_ranks`, as JSON."""
        task, limits = self._settings.config.task, self._settings.limits
        self._gates = Gates(self._settings, self.sockets, self._files)
        self._broker = Broker(
            open_broker(self.sockets),
            self._processes,
            self._files,
            dispatcher=Dispatcher(max_staleness=task.max_staleness, answer_seconds=task.answer_seconds),
            most_prompts=self._most_prompts,
            check=AnswerCheck(
                num_generations=task.num_generations,
                max_new_tokens=limits.max_new_tokens,
                vocabulary=self._settings.vocabulary,
                max_turns=None if task.environment is None else task.max_turns,
            ),
            invitation=self._gates.invitation,
        )
        return self._gates.way_for_ranks

    @property
    def _most_prompts(self) -> int:
        """The most prompts that one gets at once: a generator as many as a rank, a server its share of the step."""
        train, num_servers = self._settings.config.train, len(self._settings.config.task.server_addresses)
        if num_servers == 0:
            return train.micro_batch_size
        return math.ceil(train.global_batch_size / num_servers)

    def figures(self) -> dict[str, float]:
        """Give what generators have done since the last call."""
        if self._broker is None:
            return {}
        before = self._read
        now = self._read = _Totals(time.monotonic(), self._broker.num_tokens, self._broker.num_thrown_away)
        # Two calls may come within one tick of the clock.
        seconds = max(now.seconds - before.seconds, 1e-9)
        return {
            "generator_tokens_per_second": (now.num_tokens - before.num_tokens) / seconds,
            "answers_thrown_away": now.num_thrown_away - before.num_thrown_away,
        }

    def end(self, *, is_end: bool) -> None:
        """End gates, broker and processes; `is_end`: generators of other machines hear that the training has ended."""
        if self._gates is not None:
            self._gates.close(is_end=is_end)
        if self._broker is not None:
            self._broker.stop()
        self._processes.end()
        shutil.rmtree(self._files.folder, ignore_errors=True)
