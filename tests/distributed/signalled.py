"""Runs that are told to stop, by SIGTERM to one rank at a named moment, and go on."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hfdist.config.run import RunConfig
from hfdist.errors import HfdistError, PreemptedError
from hfdist.topology import read_launcher
from hfdist.trainer.reporting.callbacks import METRICS, read_metrics
from recipes.pretrain import main
from tests.distributed.fault_points import Moment, Place, Watch
from tests.distributed.faults import (
    LAYOUTS,
    MAX_STEPS,
    NUM_RANKS,
    SAVE_EVERY,
    Reference,
    go_on,
    make_config,
    pid_of,
    read_run,
)
from tests.distributed.kills import newest_whole
from tests.distributed.processes import LONGEST_SECONDS, Life


@dataclass(frozen=True)
class Stop:
    """Which rank is told, and when."""

    layout: str
    moment: Moment
    step: int
    rank: int

    def __str__(self) -> str:
        return f"{self.layout}-{self.moment.name}-{self.step}-rank-{self.rank}"


def draw_stops(num_stops: int, seed: int) -> list[Stop]:
    """The layouts in turn; every other stop in a save or an evaluation."""
    generator = random.Random(seed)
    in_steps = [moment for moment in Moment if moment.place is Place.step]
    in_saves = [moment for moment in Moment if moment.place in (Place.share, Place.save) and moment is not Moment.prune]
    stops = []
    for number in range(num_stops):
        moment = generator.choice(in_saves if number // len(LAYOUTS) % 2 else in_steps)
        # Steps go on beside a save: the first leaves most of them.
        step = SAVE_EVERY if moment in in_saves else generator.randint(1, 2 * SAVE_EVERY)
        stops.append(Stop(LAYOUTS[number % len(LAYOUTS)], moment, step, generator.randrange(NUM_RANKS)))
    return stops


def run_stop(folder: Path, stop: Stop, reference: Reference) -> int:
    """Stop a run, let it go on, and give the step after which it had stopped.

    Raises:
        AssertionError: it did not stop cleanly, or did not become the run that nobody stopped.
    """
    run_dir = folder / "run"
    config = make_config(run_dir, stop.layout)
    life = Life(config, NUM_RANKS, folder / "log", partial(_run_until, stop=stop, folder=folder))
    life.end(LONGEST_SECONDS)
    said = life.log.read_text()
    assert (folder / "struck").exists(), f"{stop}: the moment never came:\n{said}"
    codes = {int(path.read_text()) for path in folder.glob("code-*")}
    last = read_metrics(run_dir / METRICS)[-1]["step"]
    # During a step the others hear of it at its end or at that of the next, wherever they were. Steps go on beside a
    # save, and may come to their end before it.
    is_beside_steps = stop.moment.place in (Place.share, Place.save)
    if is_beside_steps and last == MAX_STEPS:
        assert life.has_finished or codes == {PreemptedError.exit_code}, f"{stop}: {codes}\n{said}"
    else:
        assert codes == {PreemptedError.exit_code}, f"{stop}: {codes}\n{said}"
        latest = MAX_STEPS if is_beside_steps else stop.step + 1
        assert stop.step <= last <= latest, f"{stop}: stopped after step {last}"
    assert newest_whole(run_dir) == f"step-{last:08d}"
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step-{last:08d}"]
    assert go_on(folder, config) == (last, 0)
    assert read_run(run_dir) == reference
    return last


def _run_until(config: RunConfig, *, stop: Stop, folder: Path) -> None:
    """What a rank of the run runs that is told to stop."""
    rank = read_launcher().rank
    (folder / f"rank-{rank}").write_text(str(os.getpid()))
    if rank == (0 if stop.moment.place is Place.save else stop.rank):
        Watch(stop.moment, stop.step, lambda: _tell(stop, folder))
    try:
        main.__wrapped__(config)
    except HfdistError as error:
        (folder / f"code-{rank}").write_text(str(error.exit_code))
        raise


def _tell(stop: Stop, folder: Path) -> None:
    (folder / "struck").touch()
    os.kill(pid_of(stop.rank, folder), signal.SIGTERM)
