"""A machine is lost under an elastic torchrun: the run goes on with those that are left, as if nothing had been."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import config_from_args, parse_args

from hfdist.checkpoint.folder import list_checkpoints
from tests.distributed.runs import SMALL, losses, pretrain
from tests.e2e.forked import end, run_script, start_forked
from tests.e2e.test_launch import RECIPE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(280)]

STEPS = 30
# With one store for all starts, agents that join later, or whose rank 0 is lost, never meet (torch 2.13).
OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Twelve lanes and sequences: one, two and three ranks share them evenly.
SETTINGS = ("data.lanes=12", "train.global_batch_size=12", f"train.max_steps={STEPS}", "data.workers=0",
            "checkpoint=default", "checkpoint.every=3", "optimizer.lr=5e-4")  # fmt: skip


def launch_config(port):
    """What torchrun makes of its command line, but for its ranks: they are forks of this process."""
    return LaunchConfig(
        min_nodes=1, max_nodes=3, nproc_per_node=1, run_id="elastic", max_restarts=3, monitor_interval=0.1,
        rdzv_backend="c10d", rdzv_endpoint=f"localhost:{port}", start_method="fork",
        # On a busy machine an agent may be silent for seconds, and is alive.
        rdzv_configs={"last_call_timeout": 6, "keep_alive_interval": 1, "keep_alive_max_attempt": 8},
    )  # fmt: skip


def test_the_documented_command_line_is_what_is_tested():
    page = (Path(__file__).parents[2] / "docs" / "machines.md").read_text()
    command = re.search(r"^torchrun (.*?) recipes/pretrain.py", page, re.DOTALL | re.MULTILINE)[1].replace("\\\n", "")
    documented = re.search(r"`--rdzv-conf (\S+)`", page)[1]
    assert {pair.partition("=")[0] for pair in documented.split(",")} <= launch_config(0).rdzv_configs.keys()
    wanted = launch_config(29400)
    words = {"1:4": "1:3", "8": "1", "10": "3", "FIRST_NODE:29400": "localhost:29400", "RUN": "elastic"}
    conf = f"--rdzv-conf {','.join(f'{name}={value}' for name, value in wanted.rdzv_configs.items())}"
    given = [*(words.get(word, word) for word in command.split()), *conf.split(), "x.py"]
    found, *_ = config_from_args(parse_args(given))
    assert {name: int(found.rdzv_configs[name]) for name in wanted.rdzv_configs} == wanted.rdzv_configs
    for name in ("min_nodes", "max_nodes", "nproc_per_node", "run_id", "max_restarts", "rdzv_backend", "rdzv_endpoint"):
        assert getattr(found, name) == getattr(wanted, name), name


def run_agent(port, arguments):
    elastic_launch(launch_config(port), run_rank)(*arguments)


def run_rank(*arguments):
    # A fork has torchrun's own handlers; a rank of torchrun has none.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    run_script(RECIPE, *arguments)


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
    arguments = (*SMALL, *SETTINGS, "strategy=ddp", "watch.heartbeat_seconds=5", f"run.dir={run_dir}")

    def start(number):
        log = tmp_path / f"log-{number}"
        log.touch()
        return start_forked(run_agent, port, arguments, cwd=tmp_path, said=(log, log), **OWN_STORES)

    # Each agent stands for a machine; the first serves the store at which they meet, so it must be first.
    agents = [start(0)]
    wait_for(lambda: is_served(port))
    agents += [start(number) for number in (1, 2)]

    def said():
        return "\n".join((tmp_path / f"log-{number}").read_text() for number in range(3))

    try:
        # Without a checkpoint there would be nothing to go on from, and on a busy machine one is long on its way. It
        # gets its name when it is whole.
        checkpoints = run_dir / "checkpoints"
        while "3 processes: data 3" not in said() or not list_checkpoints(checkpoints):
            assert all(agent.is_alive() for agent in agents), said()
            time.sleep(0.02)
        ranks = psutil.Process(agents[2].pid).children()
        os.kill(agents[2].pid, signal.SIGKILL)
        for rank in ranks:
            rank.kill()
        assert [end(agent, 200) for agent in agents[:2]] == [0, 0], said()
    finally:
        for agent in agents:
            end(agent, 0)
    assert "2 processes: data 2" in said()
    assert "resuming from" in said()
    alone = pretrain(tmp_path / "alone", 1, "strategy=single", *SETTINGS)
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-5)
    assert len(losses(run_dir)) == STEPS
