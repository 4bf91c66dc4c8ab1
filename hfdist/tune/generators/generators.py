"""The generators as the ranks see them: prompts are sent to them, and their answers awaited and trained on.

    step s       the policy's version s is written      prompts of the steps up to s + max_staleness go to generators
                 the answers to the prompts of step s, of versions s - max_staleness to s, are awaited and trained on

An answer is used once: a line of the ledger names it. Lines of steps after a checkpoint are set aside at a resume.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

from hfdist.collectives import gather_json, on_all_ranks, on_rank_zero
from hfdist.config.run import RunConfig
from hfdist.data.documents.examples import Example
from hfdist.data.documents.first_examples import are_chats
from hfdist.environments.registry import load_environment
from hfdist.errors import PeerError
from hfdist.messages.message import Message
from hfdist.strategies.engine import Batch
from hfdist.topology import Topology
from hfdist.trainer.evaluation.evaluators import is_out_of_patience
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.step.step_lines import StepLines
from hfdist.trainer.training import Training
from hfdist.tune.answer import Answer
from hfdist.tune.generators.answers import ReadAnswer, read_answers, write_answers
from hfdist.tune.generators.host import Host
from hfdist.tune.generators.lookahead import Lookahead
from hfdist.tune.generators.messages import Link, pack, unpack
from hfdist.tune.generators.open_gates import connect_rank
from hfdist.tune.generators.policy_files import PolicyFiles
from hfdist.tune.generators.settings import Settings
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
    _limits: GenerationLimits
    _ahead: Lookahead
    _sockets: Path
    """Folder of the broker's socket, on rank 0's machine."""
    _rollback: int
    """How often the run has gone back."""
    _step: int
    """The last step; -1: there was none."""
    _published: int
    """The version that was published last; -1: none."""
    _asked: set[int]
    """Numbers of the prompts that generators have got."""

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
        self._host: Host | None = None
        """Broker and processes on rank 0, while a training runs; None elsewhere."""
        self._link: Link | None = None
        """This rank's connection to the broker; None before the first step."""
        # Since `figures` was called last:
        self._staleness: list[int] = []
        """Steps by which each answer was old."""
        self._wait_seconds = 0.0

    def begin(self, training: Training, limits: GenerationLimits) -> None:
        """Start the processes of this machine. A collective."""
        # What a training that has failed may have left.
        self._end(is_end=False)
        self._training, self._topology, self._limits = training, training.strategy.topology, limits
        self._rollback, self._step, self._published, self._asked = 0, -1, -1, set()
        assert training.stream is not None
        self._ahead = Lookahead(training.stream, data_rank=self._topology.data_rank, data_size=self._topology.data)
        self._sockets = Path(on_rank_zero(self._start))

    def _start(self) -> str:
        vocabulary = cast(PreTrainedModel, self._training.model).config.get_text_config().vocab_size
        settings = Settings(config=self._config, vocabulary=vocabulary, limits=self._limits)
        if self._task.environment is not None:
            assert self._training.stream is not None
            chats = bool(are_chats(self._training.stream.corpus))
            settings = replace(settings, are_chats=chats, tools=list(load_environment(self._task).tools))
        num_ranks = self._topology.world_size
        self._host = Host(settings, self._tokenizer, self._files, self._folder, num_ranks=num_ranks)
        return str(self._host.sockets)

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """End the generators."""
        self._end(is_end=state.global_step >= state.max_steps or is_out_of_patience(state, self._config.evaluate))

    def _end(self, *, is_end: bool) -> None:
        if self._host is not None:
            self._host.end(is_end=is_end)
        if self._link is not None:
            self._link.close()
        self._host = self._link = None

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
            # The run has gone back, perhaps to the step that failed. Answers since then are by weights that are gone.
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
        return {number: read_answers(Message(given), self._limits.end_ids) for number, given in answers.items()}

    def _publish(self, step: int) -> None:
        """Let generators read the weights, if that is due. A collective."""
        if step == self._published or (self._published >= 0 and step % self._task.sync_every != 0):
            return
        with self._training.paused():
            model = cast(PreTrainedModel, self._training.model)
            is_whole = self._task.server is not None
            self._files.write(self._rollback, step, model, self._training.engine, is_whole=is_whole)
        self._published = step
        if self._link is None:
            self._connect()
        if self._topology.is_main:
            self._send(kind="publish", version=step)

    def _connect(self) -> None:
        """Connect this rank to the broker, which opens. A collective.

        Not before the first step: the loader's workers are forks of a process that must have no thread yet.
        """
        # On rank 0 alone, which has the host.
        way = on_rank_zero(lambda: cast(Host, self._host).open())

        def connect() -> None:
            self._link = connect_rank(self._topology.rank, self._sockets, way)

        on_all_ranks(connect)

    def _exchange(
        self, numbers: Sequence[int], examples: Sequence[Example], step: int, answers: _Answers
    ) -> list[list[int]]:
        """Ask for answers and wait for them, on one rank of each model replica; they go into `answers`.

        Gives the number of each prompt that was answered, and the version of the policy that answered it.
        """
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
        # A lane of the data that has ended gives prompts without tokens.
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
        with self._reaching_broker() as link:
            link.send(pack({"rollback": self._rollback, **message}))

    def _hear(self) -> bytes:
        with self._reaching_broker() as link:
            return link.recv()

    @contextmanager
    def _reaching_broker(self) -> Iterator[Link]:
        assert self._link is not None
        try:
            yield self._link
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
        staleness = self._staleness
        figures = {"answer_wait_seconds": self._wait_seconds}
        if staleness:
            figures |= {"staleness": sum(staleness) / len(staleness), "staleness_max": float(max(staleness))}
        self._staleness, self._wait_seconds = [], 0.0
        return figures | ({} if self._host is None else self._host.figures())
