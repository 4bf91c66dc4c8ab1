"""Each tracker that is installed, for real: runs that are killed, go on and go back stay one run in it.

The extra `tests` installs all four; one that is missing is skipped.
"""

import os
import sys

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from hfdist.config.composition.compose import compose_config
from hfdist.records import RunFolder, State, read_lines, read_run
from hfdist.run.callbacks.trackers import Trackers
from hfdist.testing import run_ranks
from tests.e2e.forked import run_forked
from tests.e2e.test_launch import SMALL, fork_ranks
from tests.e2e.tracker_files import INSTALLED, PACKAGES, QUIET, read_tracker

pytestmark = pytest.mark.e2e

each_tracker = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(name not in INSTALLED, reason=f"without the package {package}"))
        for name, package in PACKAGES.items()
    ],
)

# After the lines of step 5, two steps after a checkpoint, rank 1 of the first start is killed. The trackers of rank 0,
# which write once or twice a second, have time until it is found.
PROGRAM = """
import os, signal, time
from pathlib import Path
from transformers import TrainerCallback
from hfdist.config.cli.command import recipe
from hfdist.records import read_run
from hfdist.run import prepare_run

class Dies(TrainerCallback):
    def on_step_begin(self, args, state, control, **named):
        if state.global_step == 5 and args.process_index == 1 and read_run(Path(args.output_dir)).start == 1:
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)

@recipe()
def main(config):
    run = prepare_run(config)
    run.find_model()
    run.open_data()
    run.open_folder()
    run.start_ranks()
    run.build_model()
    run.build_trainer()
    run.trainer.add_callback(Dies())
    run.train()

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module", autouse=True)
def trackio_is_imported_anew():
    """It reads where its folder is when it is imported, as other tests do by trainers of TRL."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def run_of_two_starts(tmp_path_factory, cache_dir):
    """Killed after step 5, and started again by its launcher from step 3."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "program.py").write_text(PROGRAM)
    settings = (*SMALL, "strategy=ddp", "train.max_steps=7", "train.eval_every=3", "checkpoint.every=3",
                "checkpoint.background=false", "run.name=tracked", f"report.to=[{','.join(INSTALLED)}]",
                "launch.processes=2", "launch.max_restarts=1")  # fmt: skip
    environment = QUIET | {"HOME": str(folder)}
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        done = run_forked(*settings, cwd=folder, script=folder / "program.py", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "tracked"


@each_tracker
def test_a_run_that_is_killed_and_goes_on_is_one_run_with_each_step_once(name, run_of_two_starts):
    record = read_run(run_of_two_starts)
    assert (record.start, record.state, record.step) == (2, State.finished, 7)
    runs = read_tracker(name, run_of_two_starts)
    assert len(runs) == 1
    [run] = runs.values()
    assert {"run", "model", "data", "strategy", "train"} <= set(run["config"])
    assert run.get("status", "FINISHED") == "FINISHED"

    wanted = {}
    for line in read_lines(RunFolder(run_of_two_starts).metrics):
        # A save is reported at the step at which it has ended.
        for key in set(line) - {"step", "epoch"} if "checkpoint/step" not in line else ():
            wanted.setdefault(key, []).append((line["step"], line[key]))
    assert [step for step, _ in wanted["loss"]] == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step, _ in wanted["eval_loss"]] == [3, 6, 7]
    for key, points in wanted.items():
        assert [step for step, _ in run[key]] == [step for step, _ in points], key
        if not any(word in key for word in ("second", "runtime", "energy", "cost", "gco2e")):
            assert [value for _, value in run[key]] == pytest.approx([value for _, value in points], rel=1e-6), key


def drive(run_dir, events, *overrides, trackers=INSTALLED):
    """Call trackers of a project as a Trainer does. `events`: names, each with its step and what is logged."""
    os.environ.update(QUIET | {"HOME": str(run_dir)})
    settings = (f"run.name={run_dir.name}", f"run.dir={run_dir}", f"report.to=[{','.join(trackers)}]",
                "report.project=mine", *overrides)  # fmt: skip
    args = TrainingArguments(str(run_dir), report_to="none", run_name=run_dir.name, use_cpu=True)
    callback, state, control = Trackers(compose_config(["model=tiny", *settings])), TrainerState(), TrainerControl()
    for event, step, *logs in events:
        state.global_step = step
        if event == "log":
            callback.on_log(args, state, control, model=None, logs=logs[0])
        elif event == "rollback":
            callback.on_rollback(state)
        elif event == "end":
            callback.on_train_end(args, state, control, model=None)
        else:
            callback.on_train_begin(args, state, control, model=None)
    callback.end()


def drive_after_another(run_dir, events):
    """As the second run of a process, with names and a folder of its own."""
    trackers = [name for name in INSTALLED if name == "mlflow"]
    other = run_dir.with_name("another")
    other.mkdir()
    drive(other, events, trackers=trackers)
    left = {f"MLFLOW_{name}" for name in ("EXPERIMENT_NAME", "EXPERIMENT_ID", "RUN_ID", "TRACKING_URI")}
    assert not left & os.environ.keys()
    drive(run_dir, events)


@pytest.fixture(scope="module")
def reports_of_three_starts(tmp_path_factory):
    """What the trackers have of a run that went back once and was resumed, and once more after one that began anew."""
    run_dir = tmp_path_factory.mktemp("back")
    first = [("log", step, {"loss": 1.0 * step}) for step in (1, 2, 3, 4)]
    again = [("log", step, {"loss": 10.0 * step}) for step in (3, 4, 5)]
    late = ("log", 5, {"eval_loss": 0.5})
    events = [("begin", 0), *first, ("rollback", 2), *again, ("end", 5), late]
    run_ranks(drive, 1, run_dir, events, group=False)
    # MLflow takes no parameter a second time with another value.
    run_ranks(drive, 1, run_dir, [("begin", 5), ("log", 6, {"loss": 60.0}), ("end", 6)], "train.seed=5", group=False)
    before = {name: read_tracker(name, run_dir, "mine") for name in INSTALLED}
    # As a run does that has no checkpoint to go on from.
    RunFolder(run_dir).trackers.unlink(missing_ok=True)
    run_ranks(drive_after_another, 1, run_dir, [("begin", 0), ("log", 1, {"loss": 2.0}), ("end", 1)], group=False)
    return before, {name: read_tracker(name, run_dir, "mine") for name in INSTALLED}


@each_tracker
def test_steps_that_are_done_again_are_not_reported_twice(name, reports_of_three_starts):
    [run] = reports_of_three_starts[0][name].values()
    # Only TensorBoard can take something back.
    redone = [(3, 30), (4, 40)] if name == "tensorboard" else [(3, 3), (4, 4)]
    assert run["loss"] == [(1, 1), (2, 2), *redone, (5, 50), (6, 60)]
    assert run["eval_loss"] == [(5, 0.5)]


@each_tracker
def test_a_run_that_begins_anew_is_a_new_run(name, reports_of_three_starts):
    before, after = ([run["loss"] for run in runs[name].values()] for runs in reports_of_three_starts)
    assert sorted(after) == sorted([[(1, 2)], *(before if name != "tensorboard" else [])])


BROKEN = {
    "tensorboard": {"TENSORBOARD_LOGGING_DIR": "{file}"},
    "wandb": {"WANDB_MODE": "online", "WANDB_API_KEY": "wrong"},
    "trackio": {"TRACKIO_SPACE_ID": "me/none", "HF_TOKEN": "", "HF_ENDPOINT": "http://127.0.0.1:9"},
    "mlflow": {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"},
}
"""A folder that is a file, a wrong key, no login, and a server that is not there."""


@pytest.mark.skipif(not INSTALLED, reason="without any tracker")
def test_trackers_that_fail_do_not_fail_the_run(tmp_path, cache_dir):
    (tmp_path / "file").touch()
    environment = {k: v.format(file=tmp_path / "file") for name in INSTALLED for k, v in BROKEN[name].items()}
    settings = (*SMALL, "strategy=single", "run.name=broken", f"report.to=[{','.join(INSTALLED)}]")
    done = run_forked(*settings, cwd=tmp_path, **(QUIET | environment | {"HOME": str(tmp_path)}))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert read_run(tmp_path / "runs" / "broken").step == 4
    for name in INSTALLED:
        assert said.count(f"warning: no more reports to {name}: ") == 1, said
    assert "Traceback" not in said
