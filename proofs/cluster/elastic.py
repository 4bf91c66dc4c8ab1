"""A machine leaves an elastic torchrun and comes back: the run goes on without it, and then with it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hfdist.checkpoint.folder import list_checkpoints
from hfdist.records import RunRecord, State, read_run
from proofs.cluster.story import Story, read_starts
from tests.cluster.machines import INTERFACE, Machine
from tests.cluster.runs import RECIPE, SETTINGS, compare, install_pausing_optimizer, train_alone
from tests.e2e.forked import end, run_script, start_forked

STEPS = 60
_MOST_SECONDS = 240
# As in tests/e2e/test_elastic.py: with one store for all starts, agents that join later never meet (torch 2.13).
# Alone it trains slowly: on a busy machine an agent takes long to come back, and the run must not end before.
# An agent of a busy machine that is silent for 3 s is alive: taken for dead, it goes on in a world of its own.
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PAUSE_SECONDS": "0.2",
                "PAUSE_ALONE_SECONDS": "1.5"}  # fmt: skip


def leave_and_come_back(machines: tuple[Machine, Machine], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    """Take the second machine's power, let the first go on alone, and give it back.

    Raises:
        AssertionError: the run does not go on, or does not end.
    """
    first, second = machines
    run_dir = folder / "run"
    settings = (*SETTINGS, *install_pausing_optimizer(folder / "packages", monkeypatch), f"train.max_steps={STEPS}",
                "checkpoint.every=4")  # fmt: skip
    arguments = (*settings, "watch.heartbeat_seconds=4", f"run.dir={run_dir}")
    logs = [folder / f"log-{machine.name}" for machine in machines]

    def start(number: int):
        place = (machines[number], f"{first.name}:29400", arguments)
        return start_forked(_run_agent, *place, cwd=folder, said=(logs[number], logs[number]), **_ENVIRONMENT)

    def said() -> str:
        return "\n".join(log.read_text() for log in logs)

    def wait_for(condition: Callable[[RunRecord | None], object]) -> None:
        deadline = time.monotonic() + _MOST_SECONDS
        while not condition(read_run(run_dir)):
            assert agents[0].is_alive(), said()
            assert time.monotonic() < deadline, said()
            time.sleep(0.05)

    agents = [start(0), start(1)]
    wait_for(lambda run: run and run.processes == 2 and list_checkpoints(run_dir / "checkpoints"))
    # Without power a machine closes no connection.
    second.set_link(up=False)
    second.kill_all()
    agents[1].join()
    wait_for(lambda run: run and run.processes == 1 and run.state is State.running)
    # A signal before it trains would end it otherwise.
    begun = read_run(run_dir).step
    wait_for(lambda run: run.step > begun)
    second.set_link(up=True)
    agents[1] = start(1)
    codes = [end(agent, _MOST_SECONDS) for agent in agents]
    assert codes == [0, 0], said()
    return Story(
        "A machine leaves and comes back",
        "torchrun with `--nnodes 1:2` on two network namespaces. The second machine loses its power. Once the first "
        "trains alone, the second starts its torchrun again.",
        read_starts(run_dir),
        "Both torchruns end with 0.",
        compare(run_dir, train_alone(folder / "alone", *settings)),
    )


def _run_agent(machine: Machine, endpoint: str, arguments: Sequence[str]) -> None:
    """What torchrun does, but for its ranks: they are forks, and inherit what this process has imported."""
    machine.enter()
    config = LaunchConfig(
        min_nodes=1, max_nodes=2, nproc_per_node=1, run_id="elastic", max_restarts=3, monitor_interval=0.1,
        rdzv_backend="c10d", rdzv_endpoint=endpoint, local_addr=machine.address, start_method="fork",
        rdzv_configs={"last_call_timeout": 15, "keep_alive_interval": 1, "keep_alive_max_attempt": 10},
    )  # fmt: skip
    elastic_launch(config, _run_rank)(*arguments)


def _run_rank(*arguments: str) -> None:
    # A fork has torchrun's own handlers, whose exception any code may catch; a rank of torchrun has none.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    run_script(RECIPE, *arguments)
