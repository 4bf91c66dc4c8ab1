"""Runs that are killed or told to stop at a named moment, and go on, beside the same run that nobody disturbed."""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import time
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path

import psutil

from hfdist.config.composition.compose import compose_config
from hfdist.config.run import RunConfig
from hfdist.errors import HfdistError, PreemptedError
from hfdist.records import RunFolder, read_lines
from hfdist.topology import read_launcher
from proofs.fault_points import SAVE_EVERY, Moment, Place, Watch
from proofs.kills import newest_whole
from recipes.pretrain import main
from tests.distributed.processes import LONGEST_SECONDS, Life
from tests.distributed.runs import SMALL, eval_losses, losses

LAYOUTS = ("ddp", "zero2", "zero3", "pipeline")
NUM_RANKS = 2
MAX_STEPS = 3 * SAVE_EVERY
MOST_STARTS = 5
"""Until a run is over whose folder the ranks of a killed launcher may still use."""
REFUSED = "another run is using the folder"


class Victim(Enum):
    """Who is killed or told to stop."""

    rank = "a rank"
    everyone = "every process"
    launcher = "the launcher"


@dataclass(frozen=True)
class Case:
    """Whom to signal, and when."""

    layout: str
    moment: Moment
    victim: Victim
    step: int
    """The optimizer step that is done or saved then."""
    rank: int = 0
    """Who is signalled if it is one rank, and who sees the moment if all ranks come to it."""
    number: signal.Signals = signal.SIGKILL
    """Another one tells the run to stop."""

    @property
    def observer(self) -> int:
        """The rank that sees the moment, and strikes."""
        return 0 if self.moment.place in (Place.save, Place.export) else self.rank

    @property
    def most_whole(self) -> int:
        """Step of the newest checkpoint that there can be; 0: none."""
        return self.step // SAVE_EVERY * SAVE_EVERY

    @property
    def least_whole(self) -> int:
        """Step of the newest checkpoint that there must be: a save begins only once the one before is whole."""
        begun = self.most_whole
        if self.moment.place in (Place.end, Place.export) or self.moment in (Moment.rename, Moment.prune):
            return begun
        # An evaluation comes before the save of its step, while the one before may still be written.
        num_unfinished = 2 if self.moment is Moment.evaluation else 1
        return max(0, begun - num_unfinished * SAVE_EVERY)

    def __str__(self) -> str:
        return f"{self.layout}-{self.moment.name}-{self.step}-{self.victim.name}-{self.rank}-{self.number.name}"


@dataclass(frozen=True)
class Outcome:
    """What was found after the kill, and after the run went on."""

    whole: int | None
    """Step of the newest checkpoint that verified, 0: none; None: the ranks of a killed launcher were still at work."""
    resumed: int
    """Step from which the run went on; 0: from its beginning."""
    num_refused: int
    """Starts that found the folder in use."""
    is_equal: bool
    """Whether the run became the one that nobody killed, bit by bit."""
    seconds: float


@dataclass(frozen=True)
class Reference:
    """The run that nobody killed."""

    steps: list[int]
    """With a line in the metrics."""
    losses: list[float]
    eval_losses: list[float]
    weights: str
    """SHA-256."""
    ledger: dict[str, bytes]
    checkpoint_bytes: int = field(compare=False)
    """Of the last one; how long its figures are written is chance."""


def make_config(run_dir: Path, layout: str, *more: str) -> RunConfig:
    """A run with dropout, so that random states matter, that keeps one checkpoint alone."""
    return compose_config(
        [
            *SMALL,
            "data.workers=0",
            "data.eval_sequences=2",
            "data.sequence_length=32",
            "data.lanes=8",
            "model.config.attention_dropout=0.1",
            f"train.max_steps={MAX_STEPS}",
            f"train.eval_every={SAVE_EVERY}",
            "train.micro_batch_size=2",
            "checkpoint=default",
            f"checkpoint.every={SAVE_EVERY}",
            "checkpoint.keep=1",
            f"run.dir={run_dir}",
            f"strategy={layout}",
            *more,
        ]
    )


def run_whole(folder: Path, config: RunConfig, num_ranks: int = NUM_RANKS) -> Reference:
    """Make the run that nobody kills."""
    Life(config, num_ranks, folder / "log").join()
    return read_run(config.run.folder.path)


def run_case(folder: Path, case: Case, reference: Reference, *more: str) -> Outcome:
    """Kill a run once, start it again until it is over, and compare.

    Raises:
        AssertionError: the moment never came; a checkpoint was lost or damaged, or something is left behind.
    """
    begin = time.monotonic()
    # At their end, ranks whose launcher is gone wait so long for its store.
    short = ["watch.heartbeat_seconds=10"] if case.victim is Victim.launcher else []
    config = make_config(folder / "run", case.layout, *short, *more)
    whole = strike(folder, config, case)
    resumed, num_refused = go_on(folder, config)
    assert whole in (None, resumed), f"{case}: went on from step {resumed} instead of {whole}"
    is_equal = read_run(folder / "run") == reference
    return Outcome(whole, resumed, num_refused, is_equal, time.monotonic() - begin)


def strike(folder: Path, config: RunConfig, case: Case) -> int | None:
    """Start a run, kill someone at the moment, and give the step of the newest checkpoint that verifies, as in Outcome.

    Raises:
        AssertionError: the moment never came, or a checkpoint was lost or damaged.
    """
    run_dir = folder / "run"
    life, _ = _run_into(folder, config, case)
    assert not life.has_finished
    if case.victim is Victim.launcher:
        return None
    whole = _step(newest_whole(run_dir))
    assert case.least_whole <= whole <= case.most_whole, f"{case}: step {whole} is whole"
    assert not list((run_dir / "checkpoints").glob("*.bad-*"))
    return whole


def draw_stops(num_stops: int, seed: int) -> list[Case]:
    """One rank is told to stop: the layouts in turn; every other stop in a save or an evaluation."""
    generator = random.Random(seed)
    in_steps = [moment for moment in Moment if moment.place is Place.step]
    in_saves = [moment for moment in Moment if moment.place in (Place.share, Place.save) and moment is not Moment.prune]
    stops = []
    for number in range(num_stops):
        moment = generator.choice(in_saves if number // len(LAYOUTS) % 2 else in_steps)
        # Steps go on beside a save: the first leaves most of them.
        step = SAVE_EVERY if moment in in_saves else generator.randint(1, 2 * SAVE_EVERY)
        rank = generator.randrange(NUM_RANKS)
        stops.append(Case(LAYOUTS[number % len(LAYOUTS)], moment, Victim.rank, step, rank, signal.SIGTERM))
    return stops


def run_stop(folder: Path, case: Case, reference: Reference, *more: str) -> None:
    """Tell a run to stop, and let it go on.

    Raises:
        AssertionError: it did not stop cleanly, or did not become the run that nobody stopped.
    """
    run_dir = folder / "run"
    config = make_config(run_dir, case.layout, *more)
    life, said = _run_into(folder, config, case)
    codes = {int(path.read_text()) for path in folder.glob("code-*")}
    last = read_lines(RunFolder(run_dir).metrics)[-1]["step"]
    # During a step the others hear of it at its end or at that of the next, wherever they were. Steps go on beside a
    # save, and may come to their end before it.
    is_beside_steps = case.moment.place in (Place.share, Place.save)
    if is_beside_steps and last == MAX_STEPS:
        assert life.has_finished or codes == {PreemptedError.exit_code}, f"{case}: {codes}\n{said}"
    else:
        assert codes == {PreemptedError.exit_code}, f"{case}: {codes}\n{said}"
        assert f"{case.number.name}: saving after step {last}, and stopping" in said
        latest = MAX_STEPS if is_beside_steps else case.step + 1
        assert case.step <= last <= latest, f"{case}: stopped after step {last}"
    assert newest_whole(run_dir) == f"step-{last:08d}"
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step-{last:08d}"]
    assert go_on(folder, config) == (last, 0)
    assert read_run(run_dir) == reference


def _run_into(folder: Path, config: RunConfig, case: Case) -> tuple[Life, str]:
    """Start a run, signal someone at the moment, and give what has ended and what it said."""
    struck = folder / f"struck-{case}"
    life = Life(config, NUM_RANKS, folder / f"log-{case}", partial(_run_until, case=case, struck=struck))
    life.end(LONGEST_SECONDS)
    said = life.log.read_text()
    assert struck.exists(), f"{case}: the moment never came:\n{said}"
    return life, said


def _run_until(config: RunConfig, *, case: Case, struck: Path) -> None:
    """What a rank of the life runs that is struck."""
    rank = read_launcher().rank
    (struck.parent / f"rank-{rank}").write_text(str(os.getpid()))
    watch = Watch(case.moment, case.step, lambda: _signal(case, struck)) if rank == case.observer else None
    try:
        main.__wrapped__(config)
    except HfdistError as error:
        (struck.parent / f"code-{rank}").write_text(str(error.exit_code))
        raise
    if watch is not None:
        watch.reach(Moment.shutdown)


def _signal(case: Case, struck: Path) -> None:
    struck.touch()
    # Of the life that was begun last.
    victim = psutil.Process(int((struck.parent / f"rank-{case.rank}").read_text()))
    match case.victim:
        case Victim.rank:
            victim.send_signal(case.number)
        case Victim.everyone:
            os.killpg(0, case.number)
        case Victim.launcher:
            # With the store at which the ranks met: torchrun serves it in the launcher. The ranks live on.
            launcher = psutil.Process(os.getppid())
            min(launcher.children(), key=lambda child: child.pid).kill()
            launcher.kill()


def go_on(folder: Path, config: RunConfig) -> tuple[int, int]:
    """Start a run again until it is over. Gives the step that it went on from, and how many starts were refused.

    Raises:
        AssertionError: it failed, or left something behind.
    """
    for num_refused in range(MOST_STARTS):
        life = Life(config, NUM_RANKS, folder / f"log-{num_refused}")
        life.end(LONGEST_SECONDS)
        said = life.log.read_text()
        if life.has_finished:
            break
        assert REFUSED in said, said
    assert life.has_finished, f"the folder is never free:\n{said}"
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == [f"step-{MAX_STEPS:08d}"]
    chosen = re.search(r"resuming from .*/(step-\d+)$", said, flags=re.MULTILINE)
    return _step(chosen and chosen[1]), num_refused


def read_run(run_dir: Path) -> Reference:
    """Read what a finished run is compared by."""
    steps = [line["step"] for line in read_lines(RunFolder(run_dir).metrics) if "loss" in line]
    weights = (run_dir / "model" / "model.safetensors").read_bytes()
    (checkpoint,) = (run_dir / "checkpoints").glob(f"step-{len(steps):08d}")
    return Reference(
        steps=steps,
        losses=losses(run_dir),
        eval_losses=eval_losses(run_dir),
        weights=hashlib.sha256(weights).hexdigest(),
        ledger={path.name: path.read_bytes() for path in RunFolder(run_dir).ledger.iterdir()},
        checkpoint_bytes=sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()),
    )


def _step(checkpoint: str | None) -> int:
    return int(checkpoint.removeprefix("step-")) if checkpoint else 0
