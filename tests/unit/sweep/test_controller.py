"""A sweep whose controller or trials are killed at any moment ends as one that nobody disturbed."""

import io
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time

import psutil
import pytest
from rich.console import Console

from hfdist.config.composition.compose import compose_config
from hfdist.config.override_text import COMMAND_LINE
from hfdist.config.sweep import compose_sweep
from hfdist.errors import ConfigError
from hfdist.records import RunFolder, read_lines, read_run
from hfdist.records.lines import append_line
from hfdist.records.trials import Result, TrialLog
from hfdist.tools.sweep import live
from hfdist.tools.sweep.controller import Controller
from hfdist.tools.sweep.end_screen import describe_end, find_notes
from hfdist.tools.sweep.folder import write_best
from hfdist.tools.sweep.launchers.local import LocalLauncher, TrialProcess
from hfdist.tools.sweep.ranking import find_best, format_table, with_parents
from hfdist.tools.sweep.space import Space, parse_dimension
from hfdist.tools.sweep.sweep import Sweep
from tests.marks import many
from tests.unit.sweep.trial import TOKENS_PER_STEP, loss

_FORK = multiprocessing.get_context("fork")
STEPS = 45


def make_sweep(folder, name, *overrides, values="tag(log, interval(1e-4, 1))", more=()):
    config = compose_sweep(name, [f"sweep.{override}" for override in overrides], None)
    fixed = ["train.max_steps=45", "train.global_batch_size=8", "data.sequence_length=128"]
    return Sweep(
        folder=folder,
        config=config,
        space=Space([parse_dimension("optimizer.lr", values, COMMAND_LINE)]),
        base=["tests.unit.sweep.trial", *fixed, *more],
        compose=lambda own: compose_config([*fixed, *own]),
    )


@pytest.mark.parametrize("name", ["my runs (1)", "a,b", "a=b"])
def test_the_folder_of_a_sweep_may_have_any_name(name, tmp_path):
    sweep = make_sweep(tmp_path / name, "grid", values="1e-3,1e-2")
    sweep.folder.mkdir()
    trial = TrialLog(sweep.folder).begin({"optimizer.lr": 1e-3})
    assert sweep.compose(sweep.overrides_of(trial, 0)).run.dir == str(sweep.folder / "trial-0000")
    assert compose_config(name="best", extra_dir=write_best(sweep, [trial]).parent).run.dir == str(
        sweep.folder / "best"
    )


def make_launcher(sweep):
    return LocalLauncher([sys.executable, "-m", *sweep.base], sweep.config.slots)


def start(sweep, lines, launcher=None):
    """The controller in a process of its own, as a user starts it."""

    def run():
        os.setsid()

        def say(line):
            with lines.open("a") as file:
                file.write(f"{line}\n")

        controller = Controller(sweep, launcher or make_launcher(sweep), say)
        signal.signal(signal.SIGTERM, lambda *_: controller.stop())
        sys.exit(0 if controller.run() else 75)

    process = _FORK.Process(target=run)
    process.start()
    return process


def finish(sweep, lines, launcher=None):
    process = start(sweep, lines, launcher)
    process.join(60)
    assert process.exitcode == 0
    return TrialLog(sweep.folder)


def in_figures(book):
    return [
        (trial.values, [(r.step, r.tokens, r.value) for r in trial.results], trial.failure) for trial in book.trials
    ]


def running_in(sweep):
    return [one for folder, one in TrialProcess.find_all().items() if folder.parent == sweep.folder.resolve()]


def steps_of(sweep, trial):
    return [line["step"] for line in read_lines(RunFolder(sweep.folder_of(trial)).metrics)]


def test_halving_trains_the_best_to_the_end_and_no_step_twice(tmp_path):
    sweep = make_sweep(tmp_path / "sweep", "asha", "trials=9", "slots=2")
    sweep.folder.mkdir()
    book = finish(sweep, tmp_path / "lines")
    assert len(book.trials) == 9
    numbers = sorted((len(trial.results) for trial in book.trials), reverse=True)
    assert numbers[0] == 3
    # The best third of those that have ended so far goes on, so each new best one may.
    assert 3 <= sum(number >= 2 for number in numbers) <= 6
    for trial in book.trials:
        reached = [STEPS // 9, STEPS // 3, STEPS][len(trial.results) - 1]
        assert steps_of(sweep, trial) == list(range(1, reached + 1))
        last = trial.results[-1]
        assert (last.step, last.tokens) == (reached, reached * TOKENS_PER_STEP)
        assert last.value == pytest.approx(loss(trial.values["optimizer.lr"], reached))


def test_trials_of_a_later_bracket_train_longer_at_once(tmp_path):
    sweep = make_sweep(tmp_path / "sweep", "hyperband", "trials=4", "rungs=2", "factor=2", "brackets=2")
    sweep.folder.mkdir()
    book = finish(sweep, tmp_path / "lines")
    half = (STEPS + 1) // 2
    steps = [[result.step for result in trial.results] for trial in book.trials]
    assert sorted(steps[:2]) == [[half], [half, STEPS]]
    assert steps[2:] == [[STEPS], [STEPS]]


@pytest.mark.parametrize("seed", [0, many(1)])
def test_whoever_is_killed_the_sweep_ends_as_it_would_have(tmp_path, seed):
    whole, killed = (make_sweep(tmp_path / name, "asha", "trials=6") for name in ("whole", "killed"))
    for sweep in (whole, killed):
        sweep.folder.mkdir()
    wanted = finish(whole, tmp_path / "whole.txt")
    choose = random.Random(seed)
    for _ in range(5):
        process = start(killed, tmp_path / "lines")
        time.sleep(choose.uniform(0.1, 1.0))
        victim = choose.choice(("controller", "trial", "both"))
        running = running_in(killed)
        if victim != "trial":
            process.kill()
        for one in running if victim != "controller" else ():
            one._process.kill()
        if victim == "trial":
            time.sleep(0.2)
            process.kill()
        process.join()
    found = finish(killed, tmp_path / "lines")
    assert in_figures(found) == in_figures(wanted)
    for trial in found.trials:
        assert steps_of(killed, trial) == steps_of(whole, trial)


def test_bad_members_of_a_population_go_on_as_changed_good_ones(tmp_path):
    """Also with kills between."""
    sweeps = [make_sweep(tmp_path / name, "pbt", "trials=4", "generations=3", "slots=1") for name in ("a", "b")]
    for sweep in sweeps:
        sweep.folder.mkdir()
    process = start(sweeps[1], tmp_path / "lines")
    while len(TrialLog(sweeps[1].folder).trials) < 6:
        time.sleep(0.01)
    process.kill()
    process.join()
    book, disturbed = (finish(sweep, tmp_path / "lines") for sweep in sweeps)
    assert in_figures(disturbed) == in_figures(book)
    assert len(book.trials) == 12
    for generation in (1, 2):
        before = book.trials[4 * generation - 4 : 4 * generation]
        best, worst = (pick(before, key=lambda trial: trial.value) for pick in (min, max))
        for member, trial in enumerate(book.trials[4 * generation : 4 * generation + 4]):
            own = before[member]
            assert trial.parent == (best if own is worst else own).number
            ratio = trial.values["optimizer.lr"] / book.trials[trial.parent].values["optimizer.lr"]
            assert any(ratio == pytest.approx(one, rel=1e-4) for one in ((0.8, 1.25) if own is worst else (1,)))
            assert steps_of(sweeps[0], trial) == list(range(15 * generation + 1, 15 * generation + 16))
    controller = Controller(sweeps[0], make_launcher(sweeps[0]), print)
    best = find_best(controller.sweep, controller.log.trials)
    assert best.number >= 8
    assert [one.number // 4 for one in with_parents(best, controller.log.trials)] == [0, 1, 2]


def test_a_live_orphan_is_adopted_and_not_started_again(tmp_path):
    sweep = make_sweep(tmp_path / "sweep", "random", "trials=1")
    sweep.folder.mkdir()
    lines = tmp_path / "lines"
    lines.touch()
    process = start(sweep, lines)
    while not (running := running_in(sweep)):
        time.sleep(0.01)
    # So that it does not end before it is found.
    running[0]._process.suspend()
    process.kill()
    process.join()
    process = start(sweep, lines)
    while "trial 0 still runs" not in lines.read_text():
        assert process.is_alive()
        time.sleep(0.01)
    running[0]._process.resume()
    process.join(60)
    assert process.exitcode == 0
    book, said = TrialLog(sweep.folder), lines.read_text()
    # Not in the second life; the first one may have died before it said so.
    assert "begins" not in said.partition("still runs")[2]
    assert said.count("begins") <= 1
    assert book.trials[0].results[0].step == STEPS


def test_what_a_trial_has_started_in_a_session_of_its_own_is_not_the_trial(tmp_path):
    """As a tracker's service: it has the trial's environment."""
    starts = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True).wait()"
    trial = TrialProcess.start([sys.executable, "-c", starts], tmp_path, slot=0, rung=0, environment={})
    while not (children := psutil.Process(trial.pid).children()) or children[0].name() != "sleep":
        time.sleep(0.01)
    try:
        assert TrialProcess.find_all()[tmp_path.resolve()].pid == trial.pid
    finally:
        children[0].kill()


def test_the_exit_code_of_a_trial_outlives_the_start_of_another(tmp_path):
    first = TrialProcess.start([sys.executable, "-c", "exit(3)"], tmp_path, slot=0, rung=0, environment={})
    while psutil.Process(first.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    TrialProcess.start(["true"], tmp_path, slot=1, rung=0, environment={})
    assert first.poll()
    assert first.exit_code == 3


def test_trials_of_slots_that_are_no_more_count(tmp_path):
    sweep = make_sweep(tmp_path / "sweep", "random", "trials=3", "slots=2")
    sweep.folder.mkdir()
    for slot in (2, 3):
        folder = sweep.folder_of(TrialLog(sweep.folder).begin({"optimizer.lr": 0.01}))
        folder.mkdir()
        TrialProcess.start(["sleep", "60"], folder, slot=slot, rung=0, environment={})
    seen = []

    def look(controller):
        seen.append(len(controller.running()))
        controller.stop()

    assert not Controller(sweep, make_launcher(sweep), print).run(look)
    assert seen[0] == 2


def test_a_member_whose_parent_has_no_checkpoint_any_more_fails_alone(tmp_path):
    sweep = make_sweep(tmp_path / "sweep", "pbt", "trials=2", "generations=2")
    sweep.folder.mkdir()
    book = TrialLog(sweep.folder)
    for value in (1.0, 2.0):
        book.reach(book.begin({"optimizer.lr": 0.01}), Result(step=22, tokens=22 * TOKENS_PER_STEP, value=value))
    assert Controller(sweep, make_launcher(sweep), print).run()
    words = "trial 0, at whose checkpoint it begins, has none any more"
    assert [trial.failure for trial in TrialLog(sweep.folder).trials] == [None, None, words, words]


def test_told_to_stop_trials_save_and_go_on_later(tmp_path):
    sweep = make_sweep(tmp_path / "sweep", "random", "trials=3", "slots=2")
    sweep.folder.mkdir()
    process = start(sweep, tmp_path / "lines")
    while len(TrialLog(sweep.folder).trials) < 2 or not any(
        steps_of(sweep, trial) for trial in TrialLog(sweep.folder).trials
    ):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    process.join(20)
    assert process.exitcode == 75
    assert "has stopped" in (tmp_path / "lines").read_text()
    book = finish(sweep, tmp_path / "lines")
    assert [len(trial.results) for trial in book.trials] == [1, 1, 1]
    assert all(steps_of(sweep, trial) == list(range(1, STEPS + 1)) for trial in book.trials)


def test_a_trial_is_told_to_save_once_this_start_of_it_has_begun(tmp_path, monkeypatch):
    """And not by the record that its last rung has left: SLURM would pass a signal on to nobody."""
    sweep = make_sweep(tmp_path / "sweep", "asha", "trials=2", "rungs=2", "factor=2")
    sweep.folder.mkdir()
    told, stop = [], TrialProcess.stop

    def note(self, *, can_save):
        told.append(can_save)
        stop(self, can_save=can_save)

    monkeypatch.setattr(TrialProcess, "stop", note)

    class NeverBegins(LocalLauncher):
        """The first trial that goes on to its last rung."""

        def start(self, *arguments, rung, **named):
            if rung == 1:
                self._command = [sys.executable, "-c", "import time; time.sleep(60)"]
            return super().start(*arguments, rung=rung, **named)

    def stop_on_last_rung(controller):
        for trial in controller.running():
            if trial.results:
                controller.stop()

    def stop_once_begun(controller):
        for trial in controller.running():
            while read_run(sweep.folder_of(trial)).start == 1:
                time.sleep(0.01)
            controller.stop()

    assert not Controller(sweep, NeverBegins([sys.executable, "-m", *sweep.base]), print).run(stop_on_last_rung)
    assert told == [False]
    assert not Controller(sweep, make_launcher(sweep), print).run(stop_once_begun)
    assert told == [False, True]


def test_a_trial_whose_budget_is_used_up_has_ended(tmp_path):
    sweep = make_sweep(tmp_path / "sweep", "grid", values="1e-3,1e-2", more=["budget=5"])
    sweep.folder.mkdir()
    book = finish(sweep, tmp_path / "lines")
    assert [[result.step for result in trial.results] for trial in book.trials] == [[5], [5]]


def test_a_trial_that_fails_does_not_stop_the_others(tmp_path):
    sweep = make_sweep(tmp_path / "sweep", "grid", values="1e-3,1e-1,1e-2", more=["fail=true"])
    sweep.folder.mkdir()
    book = finish(sweep, tmp_path / "lines")
    assert [trial.failure for trial in book.trials] == [None, "the loss is not finite", None]
    controller = Controller(sweep, make_launcher(sweep), print)
    trials = controller.log.trials
    best = find_best(sweep, trials)
    assert best.values == {"optimizer.lr": 1e-2}
    assert format_table(sweep, trials).splitlines()[-1].split() == ["1", "failed", "0", "optimizer.lr=0.1"]
    notes = [*find_notes(sweep, trials, best)]
    told = describe_end(sweep, trials, [best], "hfdist pretrain", notes)
    # Of the three values 1e-2 is between the others; it is the largest of those that have ended, but not of all tried.
    assert told.startswith(f"best: {sweep.folder_of(best)}: optimizer.lr=0.01\nused by all trials: ")


def test_the_end_says_that_the_best_value_is_the_last_one_that_was_tried(tmp_path):
    sweep = make_sweep(tmp_path / "a sweep", "grid", values="1e-3,1e-2")
    sweep.folder.mkdir()
    finish(sweep, tmp_path / "lines")
    trials = Controller(sweep, make_launcher(sweep), print).log.trials
    best = find_best(sweep, trials)
    notes = [*find_notes(sweep, trials, best)]
    told = describe_end(sweep, trials, [best], "hfdist pretrain", notes)
    assert "  optimizer.lr=0.01 is the largest that was tried: a larger one may be better\n" in told
    assert f"  hfdist report '{sweep.folder}' " in told


def test_a_trial_that_cannot_begin_is_no_result_of_its_earlier_rung(tmp_path):
    sweep = make_sweep(tmp_path / "sweep", "asha", "trials=3", "rungs=2", "factor=3")
    sweep.folder.mkdir()

    class Breaks(LocalLauncher):
        """Only its first trials come to anything."""

        starts = 0

        def start(self, *arguments, **named):
            self.starts += 1
            if self.starts > 3:
                self._command = [sys.executable, "-c", "raise SystemExit(2)"]
            return super().start(*arguments, **named)

    book = finish(sweep, tmp_path / "lines", Breaks([sys.executable, "-m", *sweep.base]))
    (failed,) = [trial for trial in book.trials if trial.failure is not None]
    assert failed.failure == "exit code 2 before the run had begun"
    assert [len(trial.results) for trial in book.trials] == [1, 1, 1]


@pytest.mark.parametrize(
    ("end", "failure"),
    [
        ("os.kill(os.getpid(), 9)", "it was killed 3 times"),
        ("sys.exit(137)", "it was killed 3 times"),
        ("sys.exit(255)", "exit code 255 before the run had begun"),
    ],
    ids=["itself", "below a shell", "by no signal"],
)
def test_a_trial_that_is_killed_again_and_again_is_given_up(tmp_path, end, failure):
    sweep = make_sweep(tmp_path / "sweep", "random", "trials=1")
    sweep.folder.mkdir()
    launcher = LocalLauncher([sys.executable, "-c", f"import os, sys; {end}"])
    book = finish(sweep, tmp_path / "lines", launcher)
    assert [trial.failure for trial in book.trials] == [failure]


def test_a_terminal_shows_the_trials_that_run_and_how_long_still(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "_SECONDS", 0.01)
    sweep = make_sweep(tmp_path / "sweep", "asha", "trials=4", "rungs=2")
    sweep.folder.mkdir()
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with live.LiveTable(console, "eval_loss") as table:
        controller = Controller(sweep, make_launcher(sweep), table.say)
        assert controller.run(table.look)
    said = console.file.getvalue()
    assert re.search(r"\n +\d +1 +\d+/\d+ +\d\.\d{4} .*optimizer\.lr=", said), said[-3000:]
    assert re.search(r"3 of 4 trials have a result; best: trial \d, eval_loss \d\.\d{4}; about 0:00:\d\d left", said)
    assert said.count("trial 0 (rung 0) begins") == 1
    # Four thirds of a trial, and two thirds of a third of four trials.
    assert controller.planned_tokens == 4 * 15 * TOKENS_PER_STEP + 4 / 3 * 30 * TOKENS_PER_STEP


@pytest.mark.parametrize("exit_code", [6, 143])
def test_a_trial_that_is_ended_from_outside_goes_on(tmp_path, exit_code):
    """A lost rank, and a signal that came before it could save: its record says `failed`."""
    sweep = make_sweep(tmp_path / "sweep", "random", "trials=1", more=["train.max_steps=3"])
    sweep.folder.mkdir()

    class Ends(LocalLauncher):
        """Its first trial is ended."""

        starts = 0

        def start(self, overrides, folder, **named):
            self.starts += 1
            more = [f"ended={exit_code}"] if self.starts == 1 else []
            return super().start([*overrides, *more], folder, **named)

    book = finish(sweep, tmp_path / "lines", Ends([sys.executable, "-m", *sweep.base]))
    assert [trial.failure for trial in book.trials] == [None]
    assert [result.step for result in book.trials[0].results] == [3]
    assert "was killed, and goes on" in (tmp_path / "lines").read_text()


@pytest.mark.parametrize(
    "line",
    [
        {"trial": 1, "values": {"optimizer.lr": 0.01, "report.alert_command": "touch mark"}},
        {"trial": 1, "values": {"optimizer.lr": 2}},
        {"trial": 1, "values": {}},
        {"trial": 1, "values": {"optimizer.lr": 0.01}, "parent": 0},
    ],
)
def test_a_line_that_the_sweep_has_not_written_is_refused_before_anything_starts(tmp_path, line):
    sweep = make_sweep(tmp_path, "asha", "trials=9")
    TrialLog(tmp_path).begin({"optimizer.lr": 0.02})
    with TrialLog(tmp_path).path.open("a") as file:
        file.write(f"torn{json.dumps(line)}\n{json.dumps(line)}\n")
    with pytest.raises(ConfigError, match="no such trial") as caught:
        Controller(sweep, make_launcher(sweep), print)
    assert caught.value.where == f"{tmp_path / 'sweep.jsonl'}, line 3"
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.jsonl"]


def test_a_line_of_no_trial_is_left_out(tmp_path):
    log = TrialLog(tmp_path)
    log.begin({"optimizer.lr": 0.02})
    append_line(log.path, {"trial": -1, "failed": "not the last one"})
    append_line(log.path, {"trial": 1, "values": {}, "parent": -1})
    assert [(trial.number, trial.failure) for trial in TrialLog(tmp_path).trials] == [(0, None)]


def test_results_beyond_the_last_rung_are_refused(tmp_path):
    sweep = make_sweep(tmp_path, "asha", "trials=9")
    trial = TrialLog(tmp_path).begin({"optimizer.lr": 0.02})
    log = TrialLog(tmp_path)
    for _ in range(4):
        log.reach(log.trials[trial.number], Result(step=5, tokens=5, value=1.0))
    with pytest.raises(ConfigError, match="more results than rungs"):
        Controller(sweep, make_launcher(sweep), print)
