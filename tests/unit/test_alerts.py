"""Alerts are given early for what was planted, once, and not for what is healthy."""

import itertools
import os
import random
import signal
import threading
import time
from contextlib import suppress

import psutil
import pytest
from transformers import TrainerControl, TrainerState

from hfdist.config.run import CheckpointConfig
from hfdist.records import RunFolder, RunRecorder, read_lines
from hfdist.run.callbacks.alerts import Alerts
from hfdist.tools.alerts import AlertKind, Monitor, command

WARM_UP = 100


def loss_at(step, random_values, noise):
    """From a uniform guess, flat in the warm-up, then by a power of the steps."""
    level = 1.8 + 9.0 * (1 + max(step - WARM_UP / 2, 0) / 20) ** -0.35
    return level * (1 + noise * random_values.gauss(0, 1))


def healthy(seed, num_steps, noise=0.02):
    """Lines of metrics as a run writes them: a noisy loss, norms that fall and have tails, steady steps."""
    values = random.Random(seed)
    for step in range(1, num_steps + 1):
        norm = (0.5 + 3.0 * min(step / 20, 1) * (1 + step / 50) ** -0.5) * values.lognormvariate(0, 0.4)
        yield {
            "step": step,
            "loss": loss_at(step, values, noise),
            "grad_norm": norm,
            "tokens_per_second": 5000 * values.lognormvariate(0, 0.1) * (0.3 if values.random() < 0.02 else 1),
            "step_seconds": 1.0,
        }


def ranks(seed, num_steps, num_ranks=4):
    """Lines of ranks whose times vary."""
    values = random.Random(seed)
    for step in range(1, num_steps + 1):
        compute = [0.6 * values.lognormvariate(0, 0.15) for _ in range(num_ranks)]
        yield {
            "step": step,
            "step_seconds": [1.0] * num_ranks,
            "compute_seconds": compute,
            "data_seconds": [values.uniform(0, 0.1) for _ in range(num_ranks)],
            "wait_seconds": [0.95 - seconds for seconds in compute],
        }


def first(lines, monitor, see="see_metrics"):
    """The alerts of lines."""
    return list(itertools.chain.from_iterable(getattr(monitor, see)(line) for line in lines))


@pytest.mark.parametrize("noise", [0.005, 0.03])
def test_healthy_runs_have_no_alerts(noise):
    for seed in range(10):
        monitor = Monitor(max_steps=3000, save_every=500)
        for line in healthy(seed, 3000, noise):
            step = line["step"]
            assert monitor.see_metrics(line) == []
            if step % 500 == 0:
                # Two checkpoints stay.
                save = {"step": step, "checkpoint/step": step, "checkpoint/bytes": 10**9}
                assert monitor.see_metrics(save, 2 * 10**11 - 10**9 * min(step // 500, 2)) == []
        assert first(ranks(seed, 400), monitor, "see_ranks") == []


def test_a_spike_is_found_within_three_steps_and_told_once():
    for seed in range(10):
        lines = list(healthy(seed, 700))
        for line in lines[500:520]:
            line["loss"] *= 1.4
        alerts = first(lines, Monitor())
        assert [alert.kind for alert in alerts] == [AlertKind.loss_spike]
        assert alerts[0].step <= 503
        assert "the loss has jumped from" in alerts[0].text


def test_a_loss_that_rises_from_the_beginning_is_found_and_one_odd_batch_there_is_not():
    losses = [6.93, 193.0, *(100.0 / step for step in range(1, 29))]
    alerts = first([{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)], Monitor())
    assert [(alert.step, alert.kind) for alert in alerts] == [(3, AlertKind.loss_spike)]
    assert "the loss began at 6.93 and is 100" in alerts[0].text
    assert not first([{"step": step, "loss": 9.0 if step == 2 else 1.5} for step in range(1, 30)], Monitor())


def test_one_odd_batch_is_no_spike_and_a_second_spike_is_new():
    lines = list(healthy(1, 900))
    lines[400]["loss"] *= 3
    lines[500]["loss"], lines[510]["loss"], lines[510]["grad_norm"] = None, float("nan"), float("inf")
    for line in (*lines[600:604], *lines[750:754]):
        line["loss"] *= 2
    assert [alert.step for alert in first(lines, Monitor())] == [602, 752]


@pytest.mark.parametrize(("noise", "latest"), [(0.002, 2600), (0.01, 3500)])
def test_a_plateau_is_found_once_its_noise_allows(noise, latest):
    for seed in range(5):
        values = random.Random(seed)
        lines = [{"step": s, "loss": loss_at(min(s, 1500), values, noise)} for s in range(1, latest + 1)]
        alerts = first(lines, Monitor())
        assert {alert.kind for alert in alerts} == {AlertKind.plateau}
        assert alerts[0].step > 1500


def test_a_growing_gradient_norm_is_found():
    for seed in range(10):
        lines = list(healthy(seed, 1000))
        for line in lines[600:]:
            line["grad_norm"] *= 1.01 ** (line["step"] - 600)
        alerts = first(lines, Monitor())
        assert [alert.kind for alert in alerts] == [AlertKind.grad_norm_drift]
        # It has grown five times after 162 steps.
        assert alerts[0].step < 860


def test_a_gradient_norm_that_was_0_has_no_multiple():
    norms = [1.0] * 64 + [0.0] * 64 + [1.0] * 128
    assert first([{"step": step, "grad_norm": norm} for step, norm in enumerate(norms)], Monitor()) == []


def test_the_loss_of_rewarded_answers_is_no_measure():
    values = random.Random(0)
    lines = []
    for step in range(1, 1001):
        # First no answer is right, then some are, then all: gradients come and go.
        differ = values.random() < (0 if step < 100 else 0.7 if step < 700 else 0.1)
        loss, norm = (values.gauss(0, 0.1), 1 + step / 50) if differ else (0.0, 1e-3)
        speed = 5000 if step < 500 else 1000
        lines.append({"step": step, "loss": loss, "grad_norm": norm, "tokens_per_second": speed, "step_seconds": 1.0})
    assert first([line | {"reward": 0.5} for line in lines], Monitor()) == []
    assert first(lines, Monitor()) != []


def test_a_slow_rank_is_named_with_its_host():
    for seed in range(10):
        lines = list(ranks(seed, 60))
        for line in lines[30:]:
            line["compute_seconds"][2] *= 1.5
        alerts = first(lines, Monitor(hosts=["a", "a", "b", "b"]), "see_ranks")
        assert [alert.kind for alert in alerts] == [AlertKind.slow_rank]
        assert alerts[0].step <= 52
        assert alerts[0].text.startswith("rank 2 (on b) is slow: it computes ")
        assert (alerts[0].figures["rank"], alerts[0].figures["host"]) == (2, "b")


def test_stages_of_a_pipeline_have_different_work():
    lines = list(ranks(0, 40))
    for line in lines:
        line["compute_seconds"][2:] = [2 * seconds for seconds in line["compute_seconds"][2:]]
    assert first(lines, Monitor(num_stages=2), "see_ranks") == []
    for line in lines:
        line["compute_seconds"][3] *= 1.5
    assert [alert.figures["rank"] for alert in first(lines, Monitor(num_stages=2), "see_ranks")] == [3]


def test_a_gpu_has_no_computing_times_and_a_wait_for_data_is_found():
    lines = list(ranks(0, 30))
    for line in lines:
        line["compute_seconds"] = line["wait_seconds"] = [None] * 4
        line["data_seconds"][1] = 0.4
    alerts = first(lines, Monitor(), "see_ranks")
    assert [alert.kind for alert in alerts] == [AlertKind.data_wait]
    assert "rank 1 waits for its data in 40% of the time" in alerts[0].text


def test_short_disturbances_are_none():
    """They last a second, and not for ten."""
    lines = list(ranks(0, 600))
    for line in lines:
        line["step_seconds"] = [0.02] * 4
        line["data_seconds"] = [0.001] * 4
        line["compute_seconds"] = [0.015, 0.018 if 300 <= line["step"] < 350 else 0.01, 0.01, 0.01]
    assert [alert.figures["rank"] for alert in first(lines, Monitor(), "see_ranks")] == [0]


def test_falling_throughput_is_found_and_one_pause_is_not():
    for seed in range(10):
        lines = list(healthy(seed, 300))
        lines[50]["step_seconds"], lines[50]["tokens_per_second"] = 60.0, 80.0
        for line in lines[200:]:
            line["tokens_per_second"] *= 0.6
            line["step_seconds"] /= 0.6
        alerts = first(lines, Monitor())
        assert [alert.kind for alert in alerts] == [AlertKind.falling_throughput]
        assert 200 < alerts[0].step <= 225


def saves(monitor, free_of):
    lines = ({"step": s, "checkpoint/step": s, "checkpoint/bytes": 10**9} for s in range(100, 1100, 100))
    return [(alert.step, alert.text) for line in lines for alert in monitor.see_metrics(line, free_of(line["step"]))]


def test_a_disk_that_fills():
    # As other things grow, it is full at step 900 of 2000.
    found = saves(Monitor(max_steps=2000), lambda step: 90 * 10**9 - step * 10**8)
    assert [step for step, _ in found] == [700]
    assert "will be full at about step 890 of 2,000" in found[0][1]
    assert saves(Monitor(max_steps=2000), lambda step: 90 * 10**9 - step * 10**6) == []
    # Many checkpoints are kept: by the end it fills no more.
    assert saves(Monitor(max_steps=1000, num_kept=50), lambda step: 80 * 10**9 - step * 7 * 10**7) == []
    found = saves(Monitor(), lambda step: 3 * 10**9 if step < 500 else 10**9)
    assert [step for step, _ in found] == [500]
    assert "no room for two saves: 954 MiB are free, and a save has 954 MiB" in found[0][1]


def test_a_checkpoint_older_than_asked():
    lines = [{"step": s, "step_seconds": 1.0, "tokens_per_second": 1.0} for s in range(501, 900)]
    lines.insert(50, {"step": 550, "checkpoint/step": 550, "checkpoint/bytes": 1})
    alerts = first(lines, Monitor(save_every=50))
    assert [(alert.kind, alert.step) for alert in alerts] == [(AlertKind.old_checkpoint, 651)]
    assert first(lines, Monitor(save_every=200)) == []
    # A minute has not passed.
    assert (
        first([line | {"step_seconds": 0.01} for line in lines if "step_seconds" in line], Monitor(save_every=50)) == []
    )


def test_generators_that_answer_by_another_policy():
    lines = [{"step": step, "reward": 0.5, "mismatch": 0.7 if step > 5 else 0.1} for step in range(1, 9)]
    assert [(alert.kind, alert.step) for alert in first(lines, Monitor())] == [(AlertKind.mismatch, 6)]


def test_an_alert_is_told_again_after_a_thousand_steps():
    lines = [{"step": s, "step_seconds": 1.0, "tokens_per_second": 1.0} for s in range(1, 2300)]
    assert [alert.step for alert in first(lines, Monitor(save_every=100))] == [201, 1201, 2201]


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Makes the callback of a run whose first save is late at step 3."""
    monkeypatch.setattr(RunRecorder, "of_process", None)
    logged = []

    def make(alert_command=None):
        recorder = RunRecorder(tmp_path, {"pipeline": 1}, 1)
        return Alerts(recorder, CheckpointConfig(every=1), alert_command, logged.append), logged

    return make


def train(alerts, num_steps=5):
    for step in range(1, num_steps + 1):
        state, control = TrainerState(global_step=step), TrainerControl()
        alerts.on_log(None, state, control, logs={"loss": 1.0, "step_seconds": 40.0, "tokens_per_second": 1.0})
        alerts.on_log(None, state, control, logs={"alert/old_checkpoint": 1})
        alerts.on_step_begin(None, state, control)
    alerts.on_train_end(None, state, control)


def test_the_command_of_an_alert_of_the_last_upload_is_waited_for(watch, tmp_path):
    script = tmp_path / "slow"
    script.write_text(f"sleep 0.3; cat > {tmp_path}/got")
    alerts, _ = watch(f"sh {script}")
    alerts.on_train_end(None, TrainerState(), TrainerControl())
    failed = {"mirror/step": 5, "mirror/failed": 1, "mirror/failures": 1}
    alerts.on_log(None, TrainerState(global_step=5), TrainerControl(), logs=failed)
    [got] = read_lines(tmp_path / "got")
    assert got["kind"] == "mirror"


def test_an_alert_goes_everywhere_once(watch, tmp_path, caplog):
    alerts, logged = watch(f"tee -a {tmp_path}/got")
    train(alerts)
    [event] = [line for line in read_lines(RunFolder(tmp_path).events) if line["event"] == "alert"]
    told = {"step": 3, "kind": "old_checkpoint", "saved_step": 0, "save_every": 1}
    assert {name: event[name] for name in told} == told
    assert logged == [{"alert/old_checkpoint": 1}]
    assert caplog.messages == [f"step 3: {event['text']}"]
    [got] = read_lines(tmp_path / "got")
    assert got == {"run": str(tmp_path)} | told | {"text": event["text"]}


@pytest.mark.parametrize(
    ("alert_command", "words"),
    [
        ("ls /no/such/folder", "exit code 2: ls: cannot access"),
        ("sleep 60", "took more than 0.2 s, and was killed"),
        # No shell.
        ("false; touch here", "cannot be started: No such file"),
    ],
)
def test_a_command_that_fails_is_a_warning(watch, monkeypatch, caplog, alert_command, words):
    monkeypatch.setattr(command, "_LONGEST_SECONDS", 0.2)
    alerts, _ = watch(alert_command)
    begin = time.monotonic()
    train(alerts)
    assert time.monotonic() - begin < 30
    assert words in caplog.text


def test_a_command_for_which_no_thread_can_be_started_is_a_warning(monkeypatch, caplog):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    command.AlertCommand("true").start({"step": 1})
    assert "cannot be started: can't start new thread" in caplog.text


def test_a_command_is_killed_with_its_children_and_what_it_leaves_running_is_not_waited_for(
    watch, monkeypatch, caplog, tmp_path
):
    alerts, _ = watch(f"sh -c 'sleep 50 & echo $! > {tmp_path}/left'")
    begin = time.monotonic()
    train(alerts)
    assert time.monotonic() - begin < 10
    assert "report.alert_command" not in caplog.text
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    monkeypatch.setattr(command, "_LONGEST_SECONDS", 1.0)
    alerts, _ = watch(f"sh -c 'sleep 50 & echo $! > {tmp_path}/killed; wait'")
    train(alerts)
    assert "took more than 1 s, and was killed" in caplog.text
    with suppress(psutil.NoSuchProcess):
        killed = psutil.Process(int((tmp_path / "killed").read_text()))
        while killed.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() - begin < 30
            time.sleep(0.01)


def test_a_full_disk_ends_no_training(watch, tmp_path, caplog):
    alerts, logged = watch()
    RunFolder(tmp_path).events.unlink()
    RunFolder(tmp_path).events.symlink_to("/dev/full")
    train(alerts)
    assert "events.jsonl lacks this alert" in caplog.text
    assert logged == [{"alert/old_checkpoint": 1}]
