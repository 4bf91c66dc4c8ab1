"""The generators as the ranks see them: prompts are sent to them, and their answers awaited and trained on.

    step s       the policy's version s is written      prompts of the steps up to s + max_staleness go to generators
                 the answers to the prompts of step s, of versions s - max_staleness to s, are awaited and trained on

An answer is used once: a line of the ledger names it. Lines of steps after a checkpoint are set aside at a resume.
"""

from __future__ import annotations

import atexit
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

from hfdist.collectives import gather_json, on_all_ranks, on_rank_zero
from hfdist.config.model import TokenizerConfig
from hfdist.config.run import RunConfig
from hfdist.config.task import NO_SERVER
from hfdist.data.documents.examples import Example
from hfdist.data.documents.first_examples import are_chats
from hfdist.environments.registry import load_environment
from hfdist.errors import PeerError
from hfdist.messages.message import Message
from hfdist.processes.child_python import module
from hfdist.strategies.engine import Batch
from hfdist.topology import Topology
from hfdist.trainer.evaluation.evaluators import is_out_of_patience
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.step.step_lines import StepLines
from hfdist.trainer.training import Training
from hfdist.tune.answer import Answer
from hfdist.tune.generators.answer_check import AnswerCheck
from hfdist.tune.generators.answers import ReadAnswer, read_answers, write_answers
from hfdist.tune.generators.broker import Broker
from hfdist.tune.generators.dispatcher import Dispatcher
from hfdist.tune.generators.lookahead import Lookahead
from hfdist.tune.generators.messages import Link, pack, unpack
from hfdist.tune.generators.open_gates import Gates, connect_rank
from hfdist.tune.generators.policy_files import PolicyFiles
from hfdist.tune.generators.processes import Processes
from hfdist.tune.generators.served_files import TOKENIZER
from hfdist.tune.generators.settings import Settings
from hfdist.tune.generators.sockets import make_folder, open_broker
from hfdist.watch.heartbeat import GENERATING

_Answers = dict[int, dict[str, Any]]
"""Completions of each prompt, their log-probabilities and the policy's version, by the prompt's number."""


class Generators(TrainerCallback):
    """The generators of one Trainer. As a callback it ends them with the training.

    Args:
        config: config of the run.
        tokenizer: tokenizer of the model.
        read_examples: gives the prompts of rows that are read ahead, and with an environment what is known of them.
        seeds_of: gives a seed for each completion of a prompt, by the prompt's number.
    """

    # What `begin` sets.
    _training: Training
    _topology: Topology
    _ahead: Lookahead
    _settings: Settings
    _sockets: Path
    """Folder of the broker's socket, on rank 0's machine."""
    _processes: Processes
    """Processes of the generators, on rank 0."""
    # What the first step sets.
    _link: Link
    """This rank's connection to the broker."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        read_examples: Callable[[Batch], list[Example]],
        seeds_of: Callable[[int], list[int]],
    ) -> None:
        self._config, self._task, self._tokenizer = config, config.task, tokenizer
        self._read_examples, self._seeds_of = read_examples, seeds_of
        self.ledger = StepLines(config.run.folder.rollouts_ledger.absolute())
        self._folder = config.run.folder.generators.absolute()
        self._files = PolicyFiles(self._folder / "policy")
        self._broker: Broker | None = None
        """Broker on rank 0, from the first step on; None elsewhere."""
        self._gates: Gates | None = None
        """Where other machines reach it; None as above."""
        self._rollback, self._step, self._published = 0, -1, -1
        """How often the run has gone back; the last step; the version that was published last."""
        self._is_open = False
        """Whether this rank is connected to the broker."""
        self._asked: set[int] = set()
        """Numbers of the prompts that generators have got."""
        self._staleness: list[int] = []
        """Steps by which each answer was old, since the last reading."""
        self._wait_seconds = 0.0
        self._read_seconds, self._read_tokens, self._read_thrown_away = time.monotonic(), 0, 0

    def begin(self, training: Training, limits: GenerationLimits) -> None:
        """Start the processes of this machine. A collective."""
        self._training, self._topology = training, training.strategy.topology
        self._rollback, self._step, self._published = 0, -1, -1
        self._asked, self._is_open = set(), False
        assert training.stream is not None
        self._ahead = Lookahead(training.stream, data_rank=self._topology.data_rank, data_size=self._topology.data)
        vocabulary = cast(PreTrainedModel, training.model).config.get_text_config().vocab_size
        self._settings = Settings(config=self._config, vocabulary=vocabulary, limits=limits)
        if self._task.environment is not None:
            chats = bool(are_chats(training.stream.corpus))
            tools = list(load_environment(self._task).tools)
            self._settings = replace(self._settings, are_chats=chats, tools=tools)
        self._sockets = Path(on_rank_zero(self._start))

    def _start(self) -> str:
        sockets = make_folder()
        atexit.register(shutil.rmtree, sockets, ignore_errors=True)
        # What an earlier start has left, but for what its generators have printed.
        shutil.rmtree(self._files.folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._task.environment is not None:
            # The data's template, or a tokenizer that was trained on the data, is in no file of the model's.
            self._tokenizer.save_pretrained(sockets / TOKENIZER)
            own = replace(self._config.model, tokenizer=TokenizerConfig(name=str(sockets / TOKENIZER)))
            self._settings = replace(self._settings, config=replace(self._config, model=own))
        path = sockets / "settings.json"
        self._settings.write(path)
        # GPUs after those of ranks.
        command = module(__package__, str(path), str(self._files.folder), str(self._topology.world_size))
        are_all = self._task.generators_port is None
        # A server has a process that speaks with it.
        count = self._task.generators + len(self._task.server_addresses)
        without = "task.generators=0" if self._task.server is None else NO_SERVER
        self._processes = Processes(count, command, self._folder, are_all=are_all, without=without)
        return str(sockets)

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """End the generators."""
        if self._broker is not None and self._gates is not None:
            is_over = state.global_step >= state.max_steps or is_out_of_patience(state, self._config.evaluate)
            self._gates.close(is_end=is_over)
            self._broker.stop()
            # That of another training counts anew.
            self._broker, self._read_tokens, self._read_thrown_away = None, 0, 0
        elif self._topology.is_main:
            # A training that is over at its start.
            self._processes.end()
        if self._topology.is_main:
            shutil.rmtree(self._files.folder, ignore_errors=True)

    # ---- a step ----

    def answer(self, numbers: Sequence[int], examples: Sequence[Example]) -> dict[int, list[ReadAnswer]]:
        """Give the answers to the prompts of a step of this data rank, by their numbers. A collective.

        Args:
            numbers: numbers of the prompts in the run's data, ascending.
            examples: the prompts; those without tokens get answers without any.

        Raises:
            PeerError: no generator is left, or none answers; on all ranks alike.
        """
        step = self._training.state.global_step
        if step <= self._step:
            # The run has gone back, perhaps to the step that failed: what was answered since was by weights that are no
            # more.
            self._rollback, self._published, self._asked = self._rollback + 1, -1, set()
            self._ahead.restart()
        self._step = step
        self._publish(step)
        answers: _Answers = {}
        begin = time.monotonic()
        with self._training.waiting(GENERATING):
            used = on_all_ranks(lambda: self._exchange(numbers, examples, step, answers))
        self._wait_seconds += time.monotonic() - begin
        if self._topology.world_size > self._topology.data:
            # The ranks of a model replica train on the same.
            given = gather_json([self._topology.data_rank, list(answers.items())])
            own = next(items for rank, items in given if items and rank == self._topology.data_rank)
            answers = dict(own)
        self._write_down(step, sorted(line for of_rank in used for line in of_rank))
        ends = self._settings.limits.end_ids
        return {number: read_answers(Message(given), ends) for number, given in answers.items()}

    def _publish(self, step: int) -> None:
        """Let generators read the weights, if that is due. A collective."""
        if step == self._published or (self._published >= 0 and step % self._task.sync_every != 0):
            return
        with self._training.paused():
            model = cast(PreTrainedModel, self._training.model)
            is_whole = self._task.server is not None
            self._files.write(self._rollback, step, model, self._training.engine, is_whole=is_whole)
        self._published = step
        if not self._is_open:
            # Not before: the loader's workers are forks of a process that must have no thread yet.
            way = on_rank_zero(self._open)
            on_all_ranks(lambda: self._connect(way))
            self._is_open = True
        if self._topology.is_main:
            self._send(kind="publish", version=step)

    def _connect(self, way: list[object]) -> None:
        self._link = connect_rank(self._topology.rank, self._sockets, way)

    def _open(self) -> list[object]:
        """Open the broker and the gates; give the way to it from other machines, as JSON."""
        task, limits = self._task, self._settings.limits
        self._gates = Gates(self._settings, self._sockets, self._files)
        self._broker = Broker(
            open_broker(self._sockets),
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
        train, num_servers = self._config.train, len(self._task.server_addresses)
        return -(-train.global_batch_size // num_servers) if num_servers else train.micro_batch_size

    def _exchange(
        self, numbers: Sequence[int], examples: Sequence[Example], step: int, answers: _Answers
    ) -> list[list[int]]:
        """Ask and wait, on one rank of each model replica; give number and version of all that was answered."""
        if not self._topology.is_first_of_replica:
            return []
        own = dict(zip(numbers, examples, strict=True))
        asked = [number for number in numbers if own[number].prompt]
        wanted = [self._describe(number, step, own[number]) for number in asked]
        wanted += self._read_ahead(numbers, step)
        wanted = [one for one in wanted if one["number"] not in self._asked]
        self._asked = {number for number in self._asked if number >= numbers[0]} | {one["number"] for one in wanted}
        self._send(kind="want", prompts=wanted)
        first = numbers[0] - self._topology.data_rank
        self._send(kind="need", step=step, numbers=asked, first=first)
        while len(answers) < len(asked):
            message = unpack(self._hear())
            if "error" in message:
                raise PeerError(**message["error"])
            if message["rollback"] == self._rollback and message["number"] in own:
                answers[message["number"]] = message
        used = [[number, one["version"]] for number, one in answers.items()]
        # Of a lane that has ended.
        nothing = write_answers([Answer()] * self._task.num_generations)
        answers |= {number: nothing for number in numbers if not own[number].prompt}
        return used

    def _read_ahead(self, numbers: Sequence[int], step: int) -> list[dict[str, Any]]:
        per_step = len(numbers) * self._topology.data
        steps = min(self._task.max_staleness, self._training.state.max_steps - 1 - step)
        rows = self._ahead.read(numbers[-1], numbers[-1] + steps * per_step)
        return [
            self._describe(number, step + (number - numbers[0]) // per_step, example)
            for number, row in rows
            for example in self._read_examples(row)
        ]

    def _describe(self, number: int, step: int, example: Example) -> dict[str, Any]:
        prompt = {"number": number, "step": step, "tokens": example.prompt, "seeds": self._seeds_of(number)}
        if self._task.environment is None:
            return prompt
        # As a text: a row may hold more levels and larger numbers than a message may.
        return prompt | {"reference": example.reference, "columns": json.dumps(example.columns)}

    def _send(self, **message: object) -> None:
        with self._reaching_broker():
            self._link.send(pack({"rollback": self._rollback, **message}))

    def _hear(self) -> bytes:
        with self._reaching_broker():
            return self._link.recv()

    @contextmanager
    def _reaching_broker(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"rank {self._topology.rank} has lost the broker of the generators, on rank 0"
            raise PeerError(what, found=str(error)) from error

    def _write_down(self, step: int, used: Sequence[list[int]]) -> None:
        for group, (number, version) in enumerate(used):
            self.ledger.write({"step": step + 1, "number": number, "group": group, "version": version})
            self._staleness.append(step - version)

    # ---- figures ----

    def figures(self) -> dict[str, float]:
        """Give what has happened since the last call; some of it on rank 0 alone."""
        staleness, now = self._staleness, time.monotonic()
        figures = {"answer_wait_seconds": self._wait_seconds}
        if staleness:
            figures |= {"staleness": sum(staleness) / len(staleness), "staleness_max": float(max(staleness))}
        if self._broker is not None:
            tokens, thrown_away = self._broker.num_tokens, self._broker.num_thrown_away
            seconds = max(now - self._read_seconds, 1e-9)
            figures["generator_tokens_per_second"] = (tokens - self._read_tokens) / seconds
            figures["answers_thrown_away"] = thrown_away - self._read_thrown_away
            self._read_tokens, self._read_thrown_away = tokens, thrown_away
        self._staleness, self._wait_seconds, self._read_seconds = [], 0.0, now
        return figures
