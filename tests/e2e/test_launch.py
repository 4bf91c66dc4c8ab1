"""Real `accelerate launch`: the recipe as a user starts it, from any folder, and launchers that start too few."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import accelerate.commands.launch
import pytest

from hfdist.launch import launch
from hfdist.processes.stop_signals import STOP_SIGNALS
from hfdist.records import RunFolder, State, read_lines, read_run
from tests.e2e.forked import run_forked

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "pretrain.py"
LAUNCHER = Path(accelerate.commands.launch.__file__)

SMALL = ("model=tiny", "data.sequence_length=64", "data.eval_sequences=8", "train.max_steps=4", "report=quiet",
         "train.global_batch_size=8", "train.micro_batch_size=2", "checkpoint.every=2")  # fmt: skip

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def run(command, folder, timeout_seconds=170, **environment):
    """Run a command outside the checkout, as a user would, and give exit code and all output."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=clean | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    return result.returncode, result.stdout


def forked(folder, *command, script=RECIPE):
    done = run_forked(*command, cwd=folder, script=script)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def forked_ranks(monkeypatch):
    """Those of `launch.processes` inherit what this process has imported."""
    fork_ranks(monkeypatch)


def fork_ranks(patch):
    """As the fixture, for fixtures that live longer."""
    start = launch._run_rank

    def run_rank(*arguments):
        # A new process would not have the handlers of its parent.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        start(*arguments)

    patch.setattr(launch, "START_METHOD", "fork")
    patch.setattr(launch, "_run_rank", run_rank)


def test_two_processes_train_and_resume(tmp_path, cache_dir, monkeypatch):
    """The ranks of the second start are new processes, which get the command pickled."""
    settings = ("strategy=zero2", "run.name=first", *SMALL)
    with monkeypatch.context() as patch:
        fork_ranks(patch)
        code, output = forked(tmp_path, "launch.processes=2", *settings)
    assert code == 0, output
    assert "2 processes: data 2" in output
    assert output.count("held-out loss") == 1, "only rank 0 reports"
    run_dir = tmp_path / "runs" / "first"
    lines = read_lines(RunFolder(run_dir).metrics)
    assert not any("epoch" in line for line in lines), "of a stream, it would be the share of the steps"
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    wanted = {"step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds"}
    assert wanted <= set(lines[0])
    assert (run_dir / "config.yaml").is_file()

    more = ("launch.processes=2", "train.max_steps=6", "checkpoint.allow_changes=true")
    code, output = run([sys.executable, "-m", "hfdist", "pretrain", *settings, *more], tmp_path)
    assert code == 0, output
    assert "resuming from" in output
    assert output.count("changed: train.max_steps: 4 -> 6") == 1
    lines = [line for line in read_lines(RunFolder(run_dir).metrics) if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    record = read_run(run_dir)
    assert (record.start, record.state, record.step, record.max_steps) == (2, State.finished, 6, 6)
    assert record.tokens == lines[-1]["tokens"]
    resume = next(event for event in read_lines(RunFolder(run_dir).events) if event["event"] == "resume")
    assert "train.max_steps: 4 -> 6" in resume["changes"]


def test_a_single_process_needs_no_launcher_and_no_mpi(tmp_path, cache_dir):
    code, output = forked(tmp_path, "strategy=zero3_offload", *SMALL)
    assert code == 0, output
    assert "1 process;" in output
    assert "mpi" not in output.lower()


def test_the_launcher_that_silently_starts_one_process_is_noticed(tmp_path, cache_dir):
    """`--cpu --num_processes 2` starts one process without a word: the recipe says so and stops."""
    options = ("--cpu", "--num_processes", 2)
    code, output = forked(tmp_path, *options, RECIPE, "strategy=ddp", *SMALL, script=LAUNCHER)
    assert code != 0
    assert "the layout does not fit the number of processes" in output
    assert "found:   1 process" in output
    assert "--multi_gpu" in output
    assert not (tmp_path / "runs").exists()


def test_a_model_that_does_not_fit_the_pipeline_is_told_once_for_all_ranks(tmp_path, cache_dir, forked_ranks):
    """Found when the process group is up already."""
    layout = ("launch.processes=2", "strategy=pipeline", "strategy.blocks_per_stage=[1,2]")
    code, output = forked(tmp_path, *SMALL, *layout)
    assert code != 0
    assert output.count("Config error") == 1, output
    assert "strategy.blocks_per_stage=[1,1]" in output
    assert "hfdist" not in output.partition("Config error")[2].partition("strategy.blocks_per_stage=[1,1]")[0]


SHOW_RANK = """
import os, sys
from pathlib import Path
Path(sys.argv[1], os.environ.get("RANK", "0")).write_text(os.environ.get("WORLD_SIZE", "1"))
"""


@pytest.mark.parametrize(("name", "num_ranks"), [("cpu_1", 1), ("cpu_4", 4)])
def test_a_launch_file_starts_that_many_ranks(name, num_ranks, tmp_path):
    program, out = tmp_path / "show.py", tmp_path / "out"
    program.write_text(SHOW_RANK)
    out.mkdir()
    options = ("--config_file", ROOT / "conf" / "launch" / f"{name}.yaml", "--main_process_port", 0)
    code, output = forked(tmp_path, *options, program, out, script=LAUNCHER)
    assert code == 0, output
    assert {path.name: path.read_text() for path in out.iterdir()} == {str(r): str(num_ranks) for r in range(num_ranks)}
