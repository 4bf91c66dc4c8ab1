"""What sweeps of real runs find, for how many tokens, and what kills change: `python -m proofs.sweeps PAGE`.

Further words choose among `losses population kills`. The tables between the marks of the page are new then.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from benchmarks.table import markdown, write_section
from hfdist.records import read_lines
from hfdist.records.trials import TRIALS, Trial, TrialLog
from hfdist.tools.sweep.command import parse_sweep
from hfdist.tools.sweep.controller import Controller
from hfdist.tools.sweep.launchers.base import LOG
from hfdist.tools.sweep.launchers.local import LocalLauncher, TrialProcess
from tests.e2e.forked import run_script, start_forked
from tests.e2e.test_command_line import RECIPE
from tests.imports import import_all

SEEDS = range(5)
NOT = "**not** "
"""Stands in a table where something is not as it must be."""
RUN = ("model=tiny", "report=quiet", "optimizer.schedule=constant", "data.eval_sequences=64")
SPACE = ("optimizer.lr=tag(log, interval(1e-4, 1e-1))", "optimizer.warmup_steps=int(interval(0, 8))",
         "optimizer.weight_decay=tag(log, interval(1e-3, 1))")  # fmt: skip


def command(folder: Path, *arguments: str) -> list[str]:
    """Of a sweep in this folder."""
    return [sys.executable, "-m", "hfdist", "sweep", f"run.dir={folder}", *RUN, *arguments]


class ForkingLauncher(LocalLauncher):
    """Trials inherit what this process has imported: most of the time of short ones."""

    def start(self, overrides: Sequence[str], folder: Path, *, slot: int, rung: int) -> TrialProcess:
        """See `Launcher`."""
        log = folder / LOG
        process = start_forked(run_script, RECIPE, *self._command, *overrides, cwd=folder, said=(log, log))
        assert process.pid is not None
        return TrialProcess(psutil.Process(process.pid), slot, rung)


def run_sweep(folder: Path, *arguments: str) -> list[Trial]:
    """Run it to its end, and give its trials."""
    _, sweep, _ = parse_sweep([f"run.dir={folder}", *RUN, *arguments])
    folder.mkdir()
    launcher = ForkingLauncher(sweep.base[1:], sweep.config.slots)
    assert Controller(sweep, launcher, lambda line: None).run()
    return TrialLog(folder).trials


def tokens_of(trials: Sequence[Trial]) -> int:
    """All that they have read; a trial that goes on from another one's checkpoint has not read what that has."""
    ends = {trial.number: trial.results[-1].tokens for trial in trials if trial.results}
    return sum(end - (0 if trial.parent is None else ends[trial.parent]) for trial in trials
               if (end := ends.get(trial.number)) is not None)  # fmt: skip


def best_value(trials: Sequence[Trial]) -> float:
    """The lowest loss of those that have come furthest."""
    furthest = max(trial.results[-1].tokens for trial in trials if trial.results)
    return min(one.value for trial in trials for one in trial.results
               if one.tokens == furthest and one.value is not None)  # fmt: skip


def write_losses(folder: Path) -> str:
    """TPE with successive halving beside a random search of 32 whole trials."""
    rows, shares = [], []
    for seed in SEEDS:
        common = (*SPACE, "train.max_steps=162", f"sweep.seed={seed}", "sweep.slots=2")
        whole = run_sweep(folder / f"random-{seed}", "sweep=random", "sweep.trials=32", *common)
        run_sweep(folder / f"asha-{seed}", "sweep=asha", "sweep.trials=40", *common)
        wanted, tokens = best_value(whole), tokens_of(whole)
        reached = list(_losses_by_tokens(folder / f"asha-{seed}"))
        in_a_third = min(loss for spent, loss in reached if spent <= tokens / 3)
        share = next((spent / tokens for spent, loss in reached if loss <= wanted), float("nan"))
        shares.append(share if share == share else float("inf"))
        last = reached[-1]
        rows.append([f"{seed}", f"{wanted:.4f}", f"{in_a_third:.4f} ({in_a_third - wanted:+.4f})",
                     f"{last[1]:.4f} ({last[0] / tokens:.2f})",
                     f"{share:.2f}" if share == share else "never"])  # fmt: skip
        sys.stderr.write(f"{rows[-1]}\n")
    rows.append(["median", "", "", "", f"{statistics.median(shares):.2f}"])
    header = [
        "seed",
        "random, 32 trials",
        "TPE + ASHA, a third of the tokens",
        "its end (share)",
        "as good at",
    ]
    return markdown(header, rows)


def _losses_by_tokens(folder: Path) -> Iterator[tuple[int, float]]:
    """For each end of a rung, in their order: all tokens read so far, and the lowest loss."""
    ends: dict[int, int] = {}
    lowest = float("inf")
    for line in read_lines(folder / TRIALS):
        if "value" in line:
            ends[line["trial"]] = line["tokens"]
            lowest = min(lowest, float("inf") if line["value"] is None else line["value"])
            yield sum(ends.values()), lowest


def write_population(folder: Path) -> str:
    """Eight members in five generations beside eight whole trials each of two fixed schedules."""
    rows = []
    lr = "optimizer.lr=tag(log, interval(1e-4, 1e-1))"
    for seed in SEEDS:
        common = ("train.max_steps=200", f"sweep.seed={seed}", "sweep.slots=2", lr, "sweep.trials=8")
        found = [
            run_sweep(folder / f"constant-{seed}", "sweep=random", *common),
            run_sweep(folder / f"cosine-{seed}", "sweep=random", *common, "optimizer.schedule=cosine"),
            run_sweep(folder / f"pbt-{seed}", "sweep=pbt", "sweep.generations=5", *common),
        ]
        rows.append([f"{seed}", *(f"{best_value(trials):.4f}" for trials in found), f"{tokens_of(found[2]):,}"])
        sys.stderr.write(f"{rows[-1]}\n")
    medians = [f"{statistics.median(float(row[column]) for row in rows):.4f}" for column in (1, 2, 3)]
    rows.append(["median", *medians, ""])
    return markdown(["seed", "best of 8, constant", "best of 8, cosine", "population of 8", "tokens of each"], rows)


def write_kills(folder: Path, num_kills: int = 20) -> str:
    """A sweep that is killed at moments of all kinds beside one that nobody killed."""
    arguments = ("sweep=asha", "sweep.trials=9", "train.max_steps=81", *SPACE)
    begin = time.monotonic()
    subprocess.run(command(folder / "whole", *arguments), check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - begin
    choose, kills = random.Random(0), {"the controller": 0, "a trial": 0, "both": 0}
    killed = folder / "killed"
    while sum(kills.values()) < num_kills:
        controller = subprocess.Popen(command(killed, *arguments), stdout=subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            controller.wait(choose.uniform(0.5, 1.6 * seconds / num_kills))
            break
        what = choose.choice(sorted(kills))
        kills[what] += 1
        if what != "a trial":
            controller.kill()
        if what != "the controller":
            for path, one in TrialProcess.find_all().items():
                if killed in path.parents:
                    _kill_session(one)
        if what == "a trial":
            # It goes on alone for a while.
            with suppress(subprocess.TimeoutExpired):
                controller.wait(choose.uniform(0.5, 3))
            controller.kill()
        controller.wait()
    subprocess.run(command(killed, *arguments), check=True, stdout=subprocess.DEVNULL)
    is_same = (folder / "whole" / TRIALS).read_bytes() == (killed / TRIALS).read_bytes()
    words = ", ".join(f"{what} {number} times" for what, number in kills.items())
    return (
        f"Killed with SIGKILL: {words}. The trials and values of `{TRIALS}` are "
        f"{'byte by byte ' if is_same else NOT}those of the sweep that nobody killed: "
        f"{len(TrialLog(killed).trials)} trials, {sum(len(trial.results) for trial in TrialLog(killed).trials)} rungs."
    )


def _kill_session(one: TrialProcess) -> None:
    with suppress(psutil.Error, ProcessLookupError):
        os.killpg(one.pid, signal.SIGKILL)


def main(page: Path, *parts: str) -> bool:
    """Write the parts that are asked for, or all where none is; give whether all is as it must be."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    import_all()
    is_right = True
    for name, write in (("losses", write_losses), ("population", write_population), ("kills", write_kills)):
        if not parts or name in parts:
            with tempfile.TemporaryDirectory() as folder:
                text = write(Path(folder))
            write_section(page, name, text)
            is_right = is_right and NOT not in text
    return is_right


if __name__ == "__main__":
    sys.exit(not main(Path(sys.argv[1]), *sys.argv[2:]))
