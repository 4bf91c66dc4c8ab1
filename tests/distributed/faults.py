"""A run of which someone is killed at a named moment, started again, beside the same run that nobody killed."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path

import deepspeed  # noqa: F401  # inherited by every rank, which else takes seconds
import psutil

from hfdist.config.composition.compose import compose_config
from hfdist.config.run import RunConfig
from hfdist.data import LEDGER
from hfdist.topology import read_launcher
from hfdist.trainer.reporting.callbacks import METRICS, read_metrics
from recipes.pretrain import main
from tests.distributed.fault_points import SAVE_EVERY, Moment, Place, Watch
from tests.distributed.kills import newest_whole
from tests.distributed.processes import LONGEST_SECONDS, Life
from tests.distributed.runs import SMALL, eval_losses, losses

LAYOUTS = ("ddp", "zero2", "zero3", "pipeline")
NUM_RANKS = 2
MAX_STEPS = 3 * SAVE_EVERY
MOST_STARTS = 5
"""Until a run is over whose folder the ranks of a killed launcher may still use."""
REFUSED = "another run is using the folder"


class Victim(Enum):
    """Who is killed."""

    rank = "a rank"
    everyone = "every process"
    launcher = "the launcher"


@dataclass(frozen=True)
class Case:
    """Whom to kill, and when."""

    layout: str
    moment: Moment
    victim: Victim
    step: int
    """The optimizer step that is done or saved then."""
    rank: int = 0
    """Who is killed if it is one rank, and who sees the moment if all ranks come to it."""

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
        return f"{self.layout}-{self.moment.name}-{self.step}-{self.victim.name}"


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
    return read_run(Path(config.run.dir))


def run_case(folder: Path, case: Case, reference: Reference, *more: str) -> Outcome:
    """Kill a run once, start it again until it is over, and compare.

    Raises:
        AssertionError: the moment never came; a checkpoint was lost or damaged, or something is left behind.
    """
    begin = time.monotonic()
    config = make_config(folder / "run", case.layout, *more)
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
    run_dir, struck = folder / "run", folder / f"struck-{case}"
    life = Life(config, NUM_RANKS, folder / f"log-{case}", partial(_run_until, case=case, struck=struck))
    life.end(LONGEST_SECONDS)
    assert struck.exists(), f"{case}: the moment never came:\n{life.log.read_text()}"
    assert not life.has_finished
    if case.victim is Victim.launcher:
        return None
    whole = _step(newest_whole(run_dir))
    assert case.least_whole <= whole <= case.most_whole, f"{case}: step {whole} is whole"
    assert not list((run_dir / "checkpoints").glob("*.bad-*"))
    return whole


def _run_until(config: RunConfig, *, case: Case, struck: Path) -> None:
    """What a rank of the life runs that is struck."""
    rank = read_launcher().rank
    (struck.parent / f"rank-{rank}").write_text(str(os.getpid()))
    if rank != case.observer:
        main.__wrapped__(config)
        return
    watch = Watch(case.moment, case.step, lambda: _kill(case, struck))
    main.__wrapped__(config)
    watch.reach(Moment.shutdown)


def _kill(case: Case, struck: Path) -> None:
    struck.touch()
    match case.victim:
        case Victim.rank:
            os.kill(pid_of(case.rank, struck.parent), signal.SIGKILL)
        case Victim.everyone:
            os.killpg(0, signal.SIGKILL)
        case Victim.launcher:
            # With the store at which the ranks met: torchrun serves it in the launcher. The ranks live on.
            launcher = psutil.Process(os.getppid())
            min(launcher.children(), key=lambda child: child.pid).kill()
            launcher.kill()


def pid_of(rank: int, folder: Path) -> int:
    """Of the rank of the life that was begun last."""
    return int((folder / f"rank-{rank}").read_text())


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
    steps = [line["step"] for line in read_metrics(run_dir / METRICS) if "loss" in line]
    weights = (run_dir / "model" / "model.safetensors").read_bytes()
    (checkpoint,) = (run_dir / "checkpoints").glob(f"step-{len(steps):08d}")
    return Reference(
        steps=steps,
        losses=losses(run_dir),
        eval_losses=eval_losses(run_dir),
        weights=hashlib.sha256(weights).hexdigest(),
        ledger={path.name: path.read_bytes() for path in (run_dir / LEDGER).iterdir()},
        checkpoint_bytes=sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()),
    )


def _step(checkpoint: str | None) -> int:
    return int(checkpoint.removeprefix("step-")) if checkpoint else 0
