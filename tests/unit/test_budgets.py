"""When a run must stop for a budget, what a start finds that is used up, and what all starts have used."""

import time
from datetime import UTC, datetime

import pytest
import torch
from transformers import TrainerControl, TrainerState

from hfdist.config.checks.budgets import BUDGETS, check_budgets, find_limits, used_up
from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.diff import find_changes
from hfdist.config.run import CostConfig
from hfdist.config.train import parse_time
from hfdist.energy.estimates import ProcessLoad
from hfdist.errors import BudgetError, ConfigError
from hfdist.records import Event, RunFolder, RunRecord, RunRecorder, State, add_event, read_lines, read_run
from hfdist.records.lines import append_line
from hfdist.records.run_file import write_run
from hfdist.run.budget import Budget, Pace, find_reached
from hfdist.run.usage import Usage, describe_usage

PRICE = "cost.price_per_hour=2"


@pytest.fixture(autouse=True)
def _no_run(monkeypatch):
    monkeypatch.setattr(RunRecorder, "of_process", None)


def config(folder, *overrides):
    return compose_config(["model=tiny", f"run.dir={folder}", "checkpoint.every=10", *overrides])


# ---- what is left ----


@pytest.mark.parametrize(
    ("used", "reserve_seconds", "reached"),
    [
        ({"max_hours": 0.5, "max_cost": 1.0}, 100, None),
        ({"max_hours": 0.98, "max_cost": 1.0}, 100, "max_hours"),
        ({"max_hours": 0.98, "max_cost": 1.0}, 71, None),
        ({"max_hours": 0.98, "max_cost": 1.0}, 72, "max_hours"),
        ({"max_hours": 0.5, "max_cost": 9.95}, 100, "max_cost"),
        ({"max_hours": 0.5, "max_cost": None}, 100, None),
        ({"max_hours": 1.0, "max_cost": None}, 0, "max_hours"),
    ],
)
def test_a_budget_is_reached_in_time_for_what_is_still_to_be_done(used, reserve_seconds, reached):
    rates = {"max_hours": 1 / 3600, "max_cost": 0.001}
    assert find_reached({"max_hours": 1.0, "max_cost": 10.0}, used, rates, reserve_seconds) == reached


def test_what_is_kept_for_the_end_is_the_longest_of_each_part():
    pace = Pace(save_seconds=5.0, evaluation_in_steps=4)
    assert pace.reserve_seconds == 10, "before the first step: a save and an export"
    pace.step_seconds = 2
    assert pace.reserve_seconds == 2 * 2 + 10 + 4 * 2, "as in the start before"
    pace.stepped(60)
    assert pace.reserve_seconds == 2 * 60 + 2 * 5 + 4 * 60
    for seconds in (1, 3, 2):
        pace.stepped(seconds)
    assert pace.reserve_seconds == 2 * 3 + 2 * 5 + 4 * 3, "the first step compiles"
    pace.evaluated(7)
    pace.evaluated(6)
    pace.saved(2)
    assert pace.reserve_seconds == 2 * 3 + 2 * 2 + 7
    pace.saved(4)
    pace.saved(3)
    assert pace.reserve_seconds == 2 * 3 + 2 * 4 + 7
    pace.is_saving = True
    assert pace.reserve_seconds == 2 * 3 + 3 * 4 + 7


# ---- before a start ----


def start(folder, *, budget=None, limit=None, **figures):
    """A start that ends: with a stop at a budget, or without a word."""
    recorder = RunRecorder(folder, {}, 1)
    for name, value in figures.items():
        setattr(recorder.record, name, value)
    write_run(folder, recorder.record, is_durable=False)
    if budget is not None:
        recorder.add(Event.budget, step=3, which=budget, used=0.0, limit=limit)
        recorder.end(8)
    RunRecorder.of_process = None


@pytest.mark.parametrize(
    ("given", "figures", "found", "hint"),
    [
        (["train.max_hours=1"], {"seconds": 3601.0}, "1 h of 1 h, after 1 start", "train.max_hours=2;"),
        (["train.max_kwh=2"], {"energy_kwh": 2.5}, "2.5 kWh of 2 kWh", "train.max_kwh=4;"),
        (["train.max_cost=3", PRICE, "cost.currency=EUR"], {"cost": 3.0}, "3 EUR of 3 EUR", "train.max_cost=6;"),
        (["train.deadline=2020-01-31T18:00+01:00"], {}, "2020-01-31T18:00+01:00, after 1 start", "a later time"),
    ],
)
def test_a_start_whose_budget_is_used_up_ends_at_once(tmp_path, given, figures, found, hint):
    start(tmp_path, **figures)
    with pytest.raises(BudgetError, match="used up") as caught:
        check_budgets(config(tmp_path, *given))
    assert caught.value.exit_code == 8
    assert caught.value.where == given[0].partition("=")[0]
    assert found in caught.value.found
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "given", [["train.max_hours=1.1"], ["train.max_kwh=3"], ["train.max_cost=4", PRICE], ["train.deadline=2999-01-01"]]
)
def test_a_start_with_something_left_goes_on(tmp_path, given):
    start(tmp_path, seconds=3601.0, energy_kwh=2.5, cost=3.0)
    check_budgets(config(tmp_path, *given))


def test_a_budget_at_which_a_start_has_stopped_is_used_up_though_a_little_is_left(tmp_path):
    start(tmp_path, budget="max_hours", limit=1.0, seconds=3000.0)
    check_budgets(config(tmp_path, "train.max_hours=1.5"))
    check_budgets(config(tmp_path, "train.max_kwh=1"))
    for limit in (1.0, 0.9):
        with pytest.raises(BudgetError, match="used up") as caught:
            check_budgets(config(tmp_path, f"train.max_hours={limit}"))
        assert "the rest is kept for the save" in caught.value.found
    later = datetime.fromtimestamp(time.time() + 600, UTC).isoformat()
    add_event(tmp_path, Event.budget, start=2, step=4, which="deadline", used=later, limit=later)
    with pytest.raises(BudgetError, match="used up"):
        check_budgets(config(tmp_path, f"train.deadline={later}"))
    check_budgets(config(tmp_path, "train.deadline=2999-01-01"))


def test_a_budget_is_not_counted_from_nothing_where_the_record_is_damaged(tmp_path):
    RunFolder(tmp_path).record.write_text('{"schema": 1, "sta')
    check_budgets(config(tmp_path))
    with pytest.raises(ConfigError, match="earlier starts") as caught:
        check_budgets(config(tmp_path, "train.max_hours=1"))
    assert caught.value.hint.startswith(f"rm {RunFolder(tmp_path).record}")


@pytest.mark.parametrize("limit", [{}, {"limit": None}, {"limit": "soon"}, {"limit": [1]}, {"limit": 10**400}])
def test_a_damaged_stop_of_an_earlier_start_does_not_count(tmp_path, limit):
    start(tmp_path, budget="max_hours", limit=1.0)
    add_event(tmp_path, Event.budget, start=2, step=4, which="max_hours", **limit)
    check_budgets(config(tmp_path, "train.max_hours=2"))
    with pytest.raises(BudgetError, match="used up"):
        check_budgets(config(tmp_path, "train.max_hours=1"))


def test_totals_count_starts_that_were_lost(tmp_path):
    start(tmp_path, seconds=10.0, energy_kwh=1.0, cost=0.5)
    start(tmp_path, seconds=20.0, cost=0.25, gco2e=7.0)
    record = RunRecorder(tmp_path, {}, 1).record
    assert (record.start, record.earlier_seconds) == (3, 30.0)
    assert (record.earlier_energy_kwh, record.earlier_cost, record.earlier_gco2e) == (1.0, 0.75, 7.0)
    assert (record.energy_kwh, record.cost, record.gco2e) == (None, None, None), "unknown is not 0"
    assert read_run(tmp_path).total("energy_kwh") == 1.0


def test_a_new_run_is_told_of_a_deadline_that_has_passed(tmp_path):
    with pytest.raises(ConfigError, match="the deadline has passed") as caught:
        check_budgets(config(tmp_path, "train.deadline=2020-01-31"))
    assert caught.value.exit_code == 2
    check_budgets(config(tmp_path, "train.deadline=2999-01-31"))


def test_times_without_a_zone_are_local(tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert parse_time("2030-01-31T18:00").timestamp() == parse_time("2030-01-31T23:00Z").timestamp()
        assert find_limits(config(tmp_path, "train.deadline=2030-01-31T18:00+01:00")) == {"deadline": 1896109200.0}
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()


@pytest.mark.parametrize(
    ("given", "where", "hint"),
    [
        (["train.deadline=soon"], "train.deadline", None),
        (["train.max_hours=0"], "train.max_hours", None),
        (["train.max_cost=5"], "train.max_cost", "cost.price_per_hour"),
        (["train.max_hours=5", "checkpoint.every=null"], "train.max_hours", "checkpoint.every=100"),
        (["cost.price_per_hour=-1"], "cost.price_per_hour", None),
        (["cost.currency="], "cost.currency", None),
    ],
)
def test_budgets_that_cannot_be_held_are_refused(tmp_path, given, where, hint):
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, *given)
    assert caught.value.where == where
    assert hint is None or caught.value.hint.startswith(hint)


def test_a_raised_budget_changes_nothing_of_the_training():
    before = {"train": {"max_hours": 1.0, "deadline": None, "max_cost": 2.0}, "cost": {"price_per_hour": 1.0}}
    after = {"train": {"max_hours": 2.0, "deadline": "2030-01-01", "max_cost": 3.0}, "cost": {"price_per_hour": 2.0}}
    changes = find_changes(before, after)
    assert len(changes) == 4
    assert all(change.is_safe for change in changes)


# ---- in a run ----


class Run:
    """A Trainer's events, without the Trainer: one process."""

    def __init__(self, folder, *overrides, num_parameters=0):
        self.config = config(folder, *overrides)
        folder.mkdir(exist_ok=True)
        self.recorder = RunRecorder(folder, {}, 1)
        self.usage = Usage(self.recorder, self.config.cost, torch.device("cpu"))
        self.budget = Budget(self.config, self.usage, self.recorder, num_parameters=num_parameters, num_held_out=0)
        self.state, self.control = TrainerState(max_steps=100), TrainerControl()
        for callback in (self.usage, self.budget):
            callback.on_train_begin(None, self.state, self.control)

    def step(self):
        """Do one, and say whether it is the last."""
        flags = {flag: flag.flag() for flag in (self.usage, self.budget)}
        self.budget.on_step_begin(None, self.state, self.control)
        self.state.global_step += 1
        for flag, value in flags.items():
            if value:
                flag.on_flag(value, self.state, self.control)
        self.budget.on_step_end(None, self.state, self.control)
        return self.control.should_training_stop


def test_a_run_stops_saves_and_says_which_override_raises_it(tmp_path):
    run = Run(tmp_path, "train.max_hours=1e-6")
    assert run.step()
    assert run.control.should_save
    assert not run.control.should_evaluate, "the end of the run does that: an extra one would count in the checkpoint"
    (event,) = [line for line in read_lines(RunFolder(tmp_path).events) if line["event"] == "budget"]
    assert (event["step"], event["which"], event["limit"]) == (1, "max_hours", 1e-6)
    assert event["used"] > 0
    with pytest.raises(BudgetError, match="used up") as caught:
        run.budget.check()
    assert "train.max_hours=2e-06" in caught.value.hint
    run.recorder.end(8, "the budget")
    assert (read_run(tmp_path).state, read_run(tmp_path).exit_code) == (State.stopped, 8)


def test_lines_of_an_earlier_start_that_are_no_numbers_stop_no_run(tmp_path):
    lines = (
        '{"step_seconds": "x", "eval_runtime": []}\n{"step_seconds": 7.5, "eval_runtime": 2}\n{"step_seconds": null}\n'
    )
    (tmp_path / "metrics.jsonl").write_text(lines)
    (tmp_path / "events.jsonl").write_text('{"event": "save"}\n{"event": "save", "seconds": null}\n')
    run = Run(tmp_path, "train.max_hours=1")
    assert run.budget._pace.step_seconds == 7.5
    assert run.budget._pace.evaluation_seconds == 2.0


def test_a_run_that_ends_anyhow_is_not_stopped(tmp_path):
    run = Run(tmp_path, "train.max_hours=1e-6")
    run.state.max_steps = 1
    assert not run.step()
    run.budget.check()
    run.control.should_training_stop = True
    run.state.max_steps = 10
    run.step()
    run.budget.check()


def test_a_first_save_that_will_take_long_is_allowed_for(tmp_path):
    # 7e9 parameters: 84 GB, about a quarter of an hour each for the save and the export.
    assert not Run(tmp_path / "small", "train.max_hours=0.4").step()
    assert Run(tmp_path / "large", "train.max_hours=0.4", num_parameters=7_000_000_000).step()


def test_an_evaluation_and_a_save_are_no_part_of_a_step(tmp_path, monkeypatch):
    seconds = [0.0]
    run = Run(tmp_path, "train.max_hours=10")
    monkeypatch.setattr("hfdist.run.budget.time.monotonic", lambda: seconds[0])

    def event(name, after, **logs):
        seconds[0] += after
        getattr(run.budget, name)(None, run.state, run.control, logs=logs)

    for _ in range(3):
        event("on_step_begin", 1)
        event("on_step_end", 10)
        event("on_evaluate", 200)
        # In the foreground.
        event("on_save", 3000)
        event("on_log", 0, **{"checkpoint/seconds": 3000})
    assert run.budget._pace.reserve_seconds == 2 * 11 + 2 * 3000 + 200


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("events.jsonl", {"start": 1, "event": "save", "step": 3, "bytes": 1, "seconds": 7200.0, "stall_seconds": 1.0}),
        ("metrics.jsonl", {"step": 3, "loss": 2.0, "step_seconds": 7200.0}),
        ("metrics.jsonl", {"step": 3, "eval_loss": 2.0, "eval_runtime": 7200.0}),
    ],
)
def test_what_took_long_in_earlier_starts_is_allowed_for(tmp_path, file, line):
    start(tmp_path)
    append_line(tmp_path / file, line)
    in_an_hour = datetime.fromtimestamp(time.time() + 3600, UTC).isoformat()
    assert Run(tmp_path, f"train.deadline={in_an_hour}").step()


def test_energy_that_is_an_estimate_limits_with_a_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hfdist.energy.rank_meter._open_host", lambda watts, powercap: ProcessLoad(watts))
    run = Run(tmp_path, "train.max_kwh=1e-9")
    assert "train.max_kwh limits what is partly an estimate" in caplog.text
    assert not run.step(), "nothing is summed yet"
    assert run.step()


def test_energy_that_nobody_knows_cannot_be_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("hfdist.run.usage._uuid", lambda device: "GPU-0")
    with pytest.raises(ConfigError, match="nobody knows the energy") as caught:
        Run(tmp_path, "train.max_kwh=1")
    assert "cost.device_watts" in caught.value.hint
    with pytest.raises(ConfigError, match="nobody knows the energy") as caught:
        Run(tmp_path / "cost", "train.max_cost=1", PRICE, "cost.price_per_kwh=0.3")
    assert caught.value.where == "train.max_cost"
    Run(tmp_path / "hours", "train.max_cost=1", PRICE)
    run = Run(tmp_path / "free", "cost.gco2e_per_kwh=400")
    run.step()
    assert run.usage.figures() == {}
    assert (run.recorder.record.energy_kwh, run.recorder.record.gco2e) == (None, None)


def test_cost_is_of_device_hours_and_energy(tmp_path):
    start(tmp_path, cost=1.0, energy_kwh=1.0, gco2e=100.0)
    given = ["cost.price_per_hour=3600", "cost.price_per_kwh=3600", "cost.gco2e_per_kwh=400", "cost.currency=EUR"]
    run = Run(tmp_path, *given)
    assert run.recorder.record.cost is None, "the energy is not known yet, and a part would pass for the whole"
    run.step()
    figures, record = run.usage.figures(), run.recorder.record
    seconds = run.recorder.seconds
    assert figures["energy_kwh"] - 1.0 == pytest.approx(record.energy_kwh)
    assert record.energy_kwh > 0
    assert figures["cost"] == pytest.approx(1.0 + seconds + 3600 * record.energy_kwh, abs=0.1)
    assert figures["gco2e"] == pytest.approx(100 + 400 * record.energy_kwh)
    said = describe_usage(run.usage.totals(), run.config.cost)
    assert said.endswith(" EUR, in 2 starts")
    assert " kWh (" in said


def test_what_is_not_known_is_not_said(tmp_path):
    record = RunRecorder(tmp_path, {}, 1).record
    assert describe_usage(record, CostConfig()) == "0 ms"


def test_every_budget_has_its_key_and_its_rate(tmp_path):
    run = Run(tmp_path)
    assert set(run.usage.find_rates()) == set(run.usage.find_used()) == set(BUDGETS)
    assert [name for name in BUDGETS if not hasattr(run.config.train, name)] == []


@pytest.mark.parametrize(
    ("step", "used", "limit", "enough"),
    [
        (0, 1.0, 1.0, 2.0),  # nothing is known
        (25, 0.5, 0.6, 2.2),
        (9, 0.003361, 0.006, 0.17),
        (399, 1.0, 1.2, 1.4),  # more than before, whatever is left
    ],
)
def test_the_next_budget_is_enough_for_the_steps_that_are_left(step, used, limit, enough, tmp_path):
    record = RunRecord(start=1, step=step, max_steps=100 if step == 25 else 400)
    error = used_up(config(tmp_path, f"train.max_hours={limit}"), "max_hours", used, record)
    assert error.hint.startswith(f"train.max_hours={enough:g};")
