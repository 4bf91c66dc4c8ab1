"""Runs with generators that are killed at a named moment and go on; `python -m` writes tables of docs/generators.md.

The generators of one table are the run's own; those of the other come as from other machines, and play episodes.
Nothing of the run is replaced: its methods are wrapped, as in `fault_points`.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.table import markdown, write_section
from hfdist.config.run import RunConfig
from hfdist.launch.address import LOOPBACK
from hfdist.messages.door import SECRET
from hfdist.records import RunFolder, read_lines
from hfdist.tune.generators.broker import Broker
from hfdist.tune.generators.processes import Processes
from proofs import fault_points
from proofs.kills import BOUND
from recipes.tune import main
from tests.distributed import policy_runs, remote_generators
from tests.distributed.preference_runs import make_config
from tests.distributed.processes import LONGEST_SECONDS, Life, assert_gone
from tests.distributed.runs import weights
from tests.distributed.trl_runs import difference
from tests.imports import import_all

STEPS, SAVE_EVERY = 6, 2
STALENESS = (0, 1)
ANSWERING_SECONDS = 0.005
"""From the sending of a prompt until its generator is in the middle of the answer, or near it."""
NOT = "**not** "


class Moment(Enum):
    """Of the generators; those of the training are in `fault_points`."""

    policy = "half of a policy is written"
    prompt = "a generator has a prompt"
    answer = "a generator has answered"
    restart = "a generator that was killed starts again"


class Victim(Enum):
    """Who is killed."""

    rank = "the rank"
    generator = "that generator"
    generators = "all generators"
    everyone = "every process"


@dataclass(frozen=True)
class Case:
    """Whom to kill, and when."""

    moment: Moment | remote_generators.Moment | fault_points.Moment
    victim: Victim
    step: int
    """Of a generator's moment the policy's version; of the training's the step, which makes the version."""

    @property
    def title(self) -> str:
        """The moment and its step."""
        if isinstance(self.moment, fault_points.Moment):
            return f"{self.moment.title}, step {self.step}"
        return f"{self.moment.value}, version {self.step}"

    @property
    def is_survived(self) -> bool:
        """Whether the run itself goes on."""
        return self.victim in (Victim.generator, Victim.generators)


CASES = (
    Case(Moment.prompt, Victim.rank, 0),
    Case(Moment.prompt, Victim.generators, 0),
    Case(Moment.restart, Victim.generator, 1),
    Case(Moment.policy, Victim.rank, 3),
    Case(Moment.prompt, Victim.rank, 3),
    Case(Moment.prompt, Victim.generator, 3),
    Case(Moment.answer, Victim.generator, 3),
    Case(fault_points.Moment.backward, Victim.generators, 3),
    Case(fault_points.Moment.before_step, Victim.rank, 4),
    Case(fault_points.Moment.weights, Victim.rank, 4),
    Case(fault_points.Moment.rename, Victim.everyone, 4),
)
REMOTE_CASES = (
    *(Case(moment, Victim.generator, 1) for moment in remote_generators.Moment),
    Case(Moment.prompt, Victim.rank, 3),
    Case(Moment.answer, Victim.rank, 3),
    Case(fault_points.Moment.before_step, Victim.rank, 4),
    Case(fault_points.Moment.weights, Victim.rank, 4),
)
ACTING = (
    *("task.environment=guess", "task.rewards={environment: 1.0}", "task.max_turns=3", "task.max_new_tokens=16"),
    "data.sequence_length=32",
)


@dataclass(frozen=True)
class Table:
    """Runs with the same generators."""

    section: str
    """Of the page."""
    cases: tuple[Case, ...]
    is_remote: bool
    """Whether its generators come as from other machines, and play episodes."""

    def overrides(self) -> tuple[str, ...]:
        """Of a run that is killed."""
        if not self.is_remote:
            return ("task.generators=2",)
        return *ACTING, f"task.generators_port={remote_generators.free_port()}", f"task.generators_host={LOOPBACK}"

    def whole(self) -> tuple[str, ...]:
        """Of a run that nobody kills, whose weights are those of `task.max_staleness=0`."""
        return ACTING if self.is_remote else (*self.overrides(), "task.max_staleness=0")


TABLES = (Table("kills", CASES, is_remote=False), Table("remote-kills", REMOTE_CASES, is_remote=True))


@dataclass(frozen=True)
class Example:
    """What all runs begin with."""

    model: Path
    sums: Path

    def config(self, run_dir: Path, *more: str) -> RunConfig:
        """Of a run that saves every two steps, and keeps one checkpoint."""
        own = (f"train.max_steps={STEPS}", f"checkpoint.every={SAVE_EVERY}")
        fixed = ("task=grpo", *policy_runs.COMMON, "train.eval_every=null", "checkpoint.keep=1")
        cache = f"data.cache_dir={self.sums.parent / 'cache'}"
        return make_config(run_dir, self.model, self.sums, *fixed, *own, cache, *more)


def run_case(folder: Path, case: Case, config: RunConfig) -> tuple[Path, int | None]:
    """Kill a run once, and start it again if it has ended. With a port, two generators come as from other machines.

    Returns:
        Its folder, and the step that it went on from; None: it has not ended.

    Raises:
        AssertionError: the moment never came, the run failed, or something is left behind.
    """
    port = config.task.generators_port
    if port is None:
        return _run_case(folder, case, config)
    moment = case.moment if isinstance(case.moment, remote_generators.Moment) else None
    others = remote_generators.start_pair(port, folder, moment)
    try:
        found = _run_case(folder, case, config)
        for process in others:
            process.join(LONGEST_SECONDS)
        # They outlive the run's own process, and end with the training.
        assert [process.exitcode for process in others] == [0 if moment is None else -signal.SIGKILL, 0]
    finally:
        for process in others:
            process.kill()
            process.join()
    return found


def _run_case(folder: Path, case: Case, config: RunConfig) -> tuple[Path, int | None]:
    run_dir, struck = config.run.folder.path, folder / "struck"
    life = Life(config, 1, folder / "killed.log", partial(_run_until, case=case, struck=struck))
    life.end(LONGEST_SECONDS)
    said = life.log.read_text()
    assert struck.exists(), f"the moment never came:\n{said}"
    assert life.has_finished == case.is_survived, said
    # Generators see by themselves that their run has ended.
    assert_gone([life.group])
    if case.is_survived:
        # One that has not said who it is has no prompts.
        assert "its prompts go to others" in said or case.moment is remote_generators.Moment.hello
        return run_dir, None
    again = Life(config, 1, folder / "again.log", main.__wrapped__)
    again.join()
    assert_gone([again.group])
    found = re.search(r"resuming from .*/step-(\d+)$", again.log.read_text(), flags=re.MULTILINE)
    return run_dir, int(found[1]) if found else 0


def _run_until(config: RunConfig, *, case: Case, struck: Path) -> None:
    strike = partial(_strike, case.victim, struck)
    if isinstance(case.moment, fault_points.Moment):
        fault_points.Watch(case.moment, case.step, strike)
    elif isinstance(case.moment, Moment):
        _watch(case.moment, case.step, strike)
    main.__wrapped__(config)


def _strike(victim: Victim, struck: Path, generator: str = "") -> None:
    if struck.exists():
        return
    struck.touch()
    match victim:
        case Victim.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        case Victim.everyone:
            os.killpg(0, signal.SIGKILL)
        case Victim.generator:
            _generators()[generator].kill()
        case Victim.generators:
            for process in _generators().values():
                process.kill()


def _generators() -> dict[str, psutil.Process]:
    """Those of this rank, by name."""
    children = {child: child.cmdline() for child in psutil.Process().children()}
    return {words[-2]: child for child, words in children.items() if "hfdist.tune.generators" in words}


def _watch(moment: Moment, version: int, strike: Callable[..., None]) -> None:
    send, take, start, pwrite = Broker._send, Broker._take_answers, Processes._start, os.pwrite
    killed: list[str] = []

    def send_and_look(broker: Broker, receiver: bytes, message: dict[str, Any]) -> None:
        send(broker, receiver, message)
        if not receiver.startswith(b"generator") or message.get("version") != version:
            return
        time.sleep(ANSWERING_SECONDS)
        if moment is Moment.prompt:
            strike(receiver.decode())
        elif moment is Moment.restart and not killed:
            killed.append(receiver.decode())
            _generators()[killed[0]].kill()

    def look_and_take(broker: Broker, generator: str, message: dict[str, Any], rollback: int) -> None:
        if moment is Moment.answer and message.get("version") == version:
            strike(generator)
        take(broker, generator, message, rollback)

    def start_and_look(processes: Processes, index: int) -> None:
        start(processes, index)
        if moment is Moment.restart and killed:
            strike(processes._name(index))

    def write_in_halves(descriptor: int, data: Any, offset: int) -> int:
        if moment is Moment.policy and f"/policy/0-{version}/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            pwrite(descriptor, data[: len(data) // 2], offset)
            strike()
        return pwrite(descriptor, data, offset)

    Broker._send, Broker._take_answers = send_and_look, look_and_take
    Processes._start, os.pwrite = start_and_look, write_in_halves


def _describe(run_dir: Path, resumed: int | None, reference: Path | None) -> str:
    """The cell of a run; `reference` is the one whose weights it must have."""
    trained = [line["step"] for line in read_lines(RunFolder(run_dir).metrics) if "loss" in line]
    is_whole = policy_runs.trained_prompts(run_dir) == policy_runs.each_once(STEPS)
    is_whole = is_whole and trained == list(range(1, STEPS + 1))
    came = "goes on" if resumed is None else f"from {resumed or 'none'}"
    cell = f"{came}, {'' if is_whole else NOT}each once"
    if reference is None:
        return cell
    is_equal = difference(weights(run_dir), weights(reference)) < BOUND
    return f"{cell}, {'' if is_equal else NOT}equal"


def _cell(folder: Path, case: Case, config: RunConfig, whole: Path) -> str:
    try:
        run_dir, resumed = run_case(folder, case, config)
    except AssertionError as error:
        sys.stderr.write(f"{error}\n")
        return NOT + str(error).splitlines()[0]
    return _describe(run_dir, resumed, None if config.task.max_staleness else whole)


def write_table(page: Path, table: Table) -> bool:
    """Run all cases, write the table, and tell whether each run became what it must be."""
    begin, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        example = Example(policy_runs.write_model(folder / "model"), policy_runs.write_sums(folder / "sums.jsonl"))
        whole = folder / "whole"
        Life(example.config(whole, *table.whole()), 1, folder / "whole.log", main.__wrapped__).join()
        for number, case in enumerate(table.cases):
            cells = []
            for age in STALENESS:
                own = folder / f"{number}-{age}"
                own.mkdir()
                config = example.config(own / "run", *table.overrides(), f"task.max_staleness={age}")
                cells.append(_cell(own, case, config, whole))
            rows.append([case.title, case.victim.value, *cells])
            sys.stderr.write(f"{rows[-1]}\n")
    num_right = sum(NOT not in cell for row in rows for cell in row[2:])
    num_runs = len(STALENESS) * len(table.cases)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    said = (
        f"{num_right} of {num_runs} runs came to the right end, in {(time.monotonic() - begin) / 60:.0f} minutes. "
        f"Written by `make faults` with {versions}, Python {platform.python_version()}.\n\n"
    )
    header = ["moment", "killed", *(f"`task.max_staleness={age}`" for age in STALENESS)]
    write_section(page, table.section, said + markdown(header, rows))
    return num_right == num_runs


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # Of the run and of those that come as from other machines.
    os.environ[SECRET] = "of people"
    import_all()
    sections = sys.argv[2:] or [table.section for table in TABLES]
    asked = [table for table in TABLES if table.section in sections]
    are_right = [write_table(Path(sys.argv[1]), table) for table in asked]
    sys.exit(not all(are_right))
