"""A machine is lost under an elastic torchrun: the run goes on with those that are left, as if nothing had been."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from hfdist.checkpoint.folder import list_checkpoints
from tests.distributed.runs import SMALL, losses, pretrain
from tests.e2e.test_launch import RECIPE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(280)]

STEPS = 30
# With one store for all starts, agents that join later, or whose rank 0 is lost, never meet (torch 2.13).
OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Twelve lanes and sequences: one, two and three ranks share them evenly.
SETTINGS = ("data.lanes=12", "train.global_batch_size=12", f"train.max_steps={STEPS}", "data.workers=0",
            "checkpoint=default", "checkpoint.every=3", "optimizer.lr=5e-4")  # fmt: skip
# On a busy machine an agent may be silent for seconds, and is alive.
LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=3",
          "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-id=elastic",
          "--rdzv-conf=last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=8")  # fmt: skip


def start(command, log):
    with log.open("w") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | OWN_STORES)


def is_served(port):
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_lost_machine_leaves_the_losses_as_they_are(tmp_path, cache_dir):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    run_dir = tmp_path / "run"
    recipe = [str(RECIPE), *SMALL, *SETTINGS, "strategy=ddp", "watch.heartbeat_seconds=5", f"run.dir={run_dir}"]
    command = [*LAUNCH, f"--rdzv-endpoint=localhost:{port}", *recipe]
    # Each agent stands for a machine; the first serves the store at which they meet, so it must be first.
    agents = [start(command, tmp_path / "log-0")]
    wait_for(lambda: is_served(port))
    agents += [start(command, tmp_path / f"log-{number}") for number in (1, 2)]

    def said():
        return "\n".join((tmp_path / f"log-{number}").read_text() for number in range(3))

    try:
        # Without a checkpoint there would be nothing to go on from, and on a busy machine one is long on its way. It
        # gets its name when it is whole.
        checkpoints = run_dir / "checkpoints"
        while "3 processes: data 3" not in said() or not list_checkpoints(checkpoints):
            assert all(agent.poll() is None for agent in agents), said()
            time.sleep(0.02)
        ranks = psutil.Process(agents[2].pid).children()
        os.kill(agents[2].pid, signal.SIGKILL)
        for rank in ranks:
            rank.kill()
        assert [agent.wait(200) for agent in agents[:2]] == [0, 0], said()
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert "2 processes: data 2" in said()
    assert "resuming from" in said()
    alone = pretrain(tmp_path / "alone", 1, "strategy=single", *SETTINGS)
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-5)
    assert len(losses(run_dir)) == STEPS
