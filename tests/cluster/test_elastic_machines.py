"""A machine leaves an elastic torchrun and comes back: the run goes on without it, and then with it, as if undisturbed."""

import time

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hfdist.checkpoint.folder import list_checkpoints
from hfdist.records import State, read_run
from tests.cluster.machines import INTERFACE
from tests.cluster.runs import RECIPE, SETTINGS, compare, install_pausing_optimizer, starts, train_alone
from tests.e2e.forked import end, run_script, start_forked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(280)]

STEPS = 60
# As in tests/e2e/test_elastic.py: with one store for all starts, agents that join later never meet (torch 2.13).
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def agent(machine, endpoint, arguments):
    """What torchrun does, but for its ranks: they are forks, and inherit what this process has imported."""
    machine.enter()
    config = LaunchConfig(
        min_nodes=1, max_nodes=2, nproc_per_node=1, run_id="elastic", max_restarts=3, monitor_interval=0.1,
        rdzv_backend="c10d", rdzv_endpoint=endpoint, local_addr=machine.address, start_method="fork",
        rdzv_configs={"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 3},
    )  # fmt: skip
    elastic_launch(config, run_script)(RECIPE, *arguments)


def test_a_machine_that_leaves_and_comes_back_leaves_no_trace(tmp_path, cache_dir, machines, monkeypatch):
    first, second = machines
    run_dir = tmp_path / "run"
    settings = (*SETTINGS, *install_pausing_optimizer(tmp_path / "packages", monkeypatch), f"train.max_steps={STEPS}",
                "checkpoint.every=4")  # fmt: skip
    arguments = (*settings, "watch.heartbeat_seconds=4", f"run.dir={run_dir}")
    logs = {machine: tmp_path / f"log-{machine.name}" for machine in machines}

    def start(machine, **environment):
        place = (machine, f"{first.name}:29400", arguments)
        said = (logs[machine], logs[machine])
        return start_forked(agent, *place, cwd=tmp_path, said=said, PAUSE_SECONDS="0.2", **ENVIRONMENT)

    def wait_for(condition):
        deadline = time.monotonic() + 120
        while not condition(read_run(run_dir)):
            assert time.monotonic() < deadline and agents[0].is_alive(), [log.read_text() for log in logs.values()]
            time.sleep(0.05)

    agents = [start(machine) for machine in machines]
    wait_for(lambda run: run and run.processes == 2 and list_checkpoints(run_dir / "checkpoints"))
    # Without power a machine closes no connection.
    second.set_link(up=False)
    second.kill_all()
    agents[1].join()
    wait_for(lambda run: run.processes == 1 and run.state is State.running and run.step > 0)
    second.set_link(up=True)
    agents[1] = start(second)
    assert [end(one, 120) for one in agents] == [0, 0], [log.read_text() for log in logs.values()]
    history = starts(run_dir)
    assert [(one["processes"], one["exit_code"]) for one in history] == [(2, 6), (1, 75), (2, 0)]
    assert all(one["from_step"] > 0 for one in history[1:])
    difference = compare(run_dir, train_alone(tmp_path / "alone", *settings))
    assert difference.losses < 1e-5
    assert difference.weights < 1e-4
