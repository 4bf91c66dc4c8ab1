"""Signals under real launchers, whose ranks are forks: a launcher passes its own on, and starts stopped ranks again."""

import os
import signal
import time
from contextlib import suppress

import psutil
import pytest
import torch.distributed.run

from hfdist import __main__ as command
from hfdist.processes.stop_signals import STOP_SIGNALS
from hfdist.records import RunFolder, State, read_lines, read_run
from proofs.kills import newest_whole
from tests.e2e.forked import end, run_script, start_forked
from tests.e2e.test_launch import LAUNCHER, RECIPE, ROOT, SMALL, forked_ranks  # noqa: F401

pytestmark = pytest.mark.e2e

ENDLESS = (*SMALL, "train.max_steps=100000", "checkpoint=default", "checkpoint.every=100000", "run.name=stopped")


class Launched:
    """A launcher in a fork, and the run that it has started."""

    def __init__(self, folder, run, *arguments):
        self.log, self.run_dir = folder / "log", folder / "runs" / "stopped"
        self.process = start_forked(run, *arguments, cwd=folder, said=(self.log, self.log))

    @property
    def said(self):
        return self.log.read_text()

    @property
    def steps(self):
        return [line["step"] for line in read_lines(RunFolder(self.run_dir).metrics) if "loss" in line]

    def wait_for_steps(self, number):
        while len(self.steps) < number:
            assert self.process.is_alive(), self.said
            time.sleep(0.02)

    def ranks(self):
        """The processes that run the recipe; loader processes are their children."""
        return psutil.Process(self.process.pid).children()

    def kill(self):
        """Leave nothing of a test that failed: the run has no end of its own."""
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            for process in (*launcher.children(recursive=True), launcher):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.join()

    def check_stopped(self):
        """The last step is saved, and no step is done twice."""
        assert newest_whole(self.run_dir) == f"step-{len(self.steps):08d}"
        assert self.steps == list(range(1, len(self.steps) + 1))
        record = read_run(self.run_dir)
        assert (record.state, record.exit_code, record.step) == (State.stopped, 75, len(self.steps))

    @property
    def events(self):
        return [(event["start"], event["event"]) for event in read_lines(RunFolder(self.run_dir).events)]


@pytest.fixture
def launch(tmp_path, cache_dir):
    started = []
    yield lambda *arguments: started.append(Launched(tmp_path, *arguments)) or started[-1]
    for run in started:
        run.kill()


def test_hfdist_passes_a_signal_on_and_ends_as_its_ranks_do(launch, forked_ranks):  # noqa: F811
    run = launch(run_script, command.__file__, "pretrain", "launch.processes=2", "strategy=zero1", *ENDLESS)
    run.wait_for_steps(3)
    os.kill(run.process.pid, signal.SIGTERM)
    assert end(run.process) == 75, run.said
    run.check_stopped()
    assert run.said.count("SIGTERM: saving after step") == 1, run.said
    assert run.said.count("Stopped: the run was told to stop, and has saved where it was") == 1
    assert "Traceback" not in run.said
    assert "elastic" not in run.said
    assert run.events == [(1, "start"), (1, "save"), (1, "end")]


def run_rank(*arguments):
    # A fork has its launcher's handlers; a new process has none.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    run_script(*arguments)


def launch_forks(*arguments):
    """Run `accelerate launch` with `arguments` in this process; only its ranks are no new processes."""
    read = torch.distributed.run.config_from_args

    def read_for_forks(parsed):
        # By this the script's name and arguments are those of a function.
        parsed.run_path = True
        config, _, words = read(parsed)
        config.start_method = "fork"
        return config, run_rank, words

    torch.distributed.run.config_from_args = read_for_forks
    run_script(LAUNCHER, *arguments)


def test_ranks_save_and_a_launcher_with_restarts_goes_on(launch):
    """First a rank is told to stop, then the launcher."""
    options = ("--config_file", ROOT / "conf" / "launch" / "cpu_2.yaml", "--max_restarts", 1)
    run = launch(launch_forks, *options, RECIPE, "strategy=ddp", *ENDLESS)
    run.wait_for_steps(3)
    run.ranks()[1].send_signal(signal.SIGTERM)
    while "resuming from" not in run.said:
        assert run.process.is_alive(), run.said
        time.sleep(0.02)
    run.wait_for_steps(len(run.steps) + 3)
    os.kill(run.process.pid, signal.SIGTERM)
    assert end(run.process) not in (0, None), run.said
    assert run.said.count("SIGTERM: saving after step") == 2, run.said
    run.check_stopped()
    assert run.events == [(1, "start"), (1, "save"), (1, "end"), (2, "start"), (2, "resume"), (2, "save"), (2, "end")]
