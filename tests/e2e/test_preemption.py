"""Signals under real launchers: a launcher passes its own on, and starts ranks that were stopped again."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from hfdist.trainer.reporting.callbacks import METRICS, read_metrics
from tests.e2e.test_launch import LAUNCH, RECIPE, ROOT, SMALL

pytestmark = pytest.mark.e2e

STEPS = 100
LONGER = (f"train.max_steps={STEPS}", "checkpoint=default", "checkpoint.every=1000", "run.name=stopped")


def start(tmp_path, *command):
    """Start it, and give it once it has done some steps, with its ranks."""
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
    metrics = tmp_path / "runs" / "stopped" / METRICS
    while len(read_metrics(metrics)) < 3:
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    return process, metrics


def recipes(process):
    """The processes that run the recipe as ranks; loader processes are their children."""
    children = psutil.Process(process.pid).children(recursive=True)
    named = [child for child in children if str(RECIPE) in child.cmdline()]
    return [child for child in named if child.ppid() not in {other.pid for other in named}]


def test_hfdist_passes_a_signal_on_and_ends_as_its_ranks_do(tmp_path, cache_dir):
    command = [sys.executable, "-m", "hfdist", "pretrain", "launch.processes=2", "strategy=zero1", *SMALL, *LONGER]
    process, metrics = start(tmp_path, *command)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75
    said = (tmp_path / "log").read_text()
    (checkpoint,) = (metrics.parent / "checkpoints").iterdir()
    steps = [line["step"] for line in read_metrics(metrics) if "loss" in line]
    assert checkpoint.name == f"step-{len(steps):08d}"
    assert said.count("SIGTERM: saving after step") == 1, said
    assert said.count("Stopped: the run was told to stop, and has saved where it was") == 1
    assert "Traceback" not in said
    assert "elastic" not in said


@pytest.mark.parametrize("to_launcher", [True, False])
def test_ranks_save_and_a_launcher_with_restarts_goes_on(tmp_path, cache_dir, to_launcher):
    config = str(ROOT / "conf" / "launch" / "cpu_2.yaml")
    restarts = "0" if to_launcher else "1"
    command = [*LAUNCH, "--config_file", config, "--max_restarts", restarts, RECIPE, "strategy=ddp", *SMALL, *LONGER]
    process, metrics = start(tmp_path, *map(str, command))
    target = psutil.Process(process.pid) if to_launcher else recipes(process)[1]
    target.send_signal(signal.SIGTERM)
    code = process.wait(120)
    said = (tmp_path / "log").read_text()
    assert said.count("SIGTERM: saving after step") == 1, said
    steps = [line["step"] for line in read_metrics(metrics) if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
    if to_launcher:
        assert code != 0
        assert len(steps) < STEPS
        (checkpoint,) = (metrics.parent / "checkpoints").iterdir()
        assert checkpoint.name == f"step-{len(steps):08d}"
    else:
        assert code == 0, said
        assert "resuming from" in said
        assert len(steps) == STEPS
