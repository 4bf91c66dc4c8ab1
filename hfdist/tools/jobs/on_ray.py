"""What a Ray job does: it runs a script on each machine, and starts all again on other machines when the script asks.

The script is that of ray.py beside it. For each machine there is an actor with all of its GPUs, in a bundle of its own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from types import FrameType
from typing import Any, NoReturn

from hfdist.errors import first_line
from hfdist.processes.stop_signals import heard_signals
from hfdist.tools.jobs.job import AGAIN
from hfdist.tools.jobs.verdict import LOST

_POLL_SECONDS = 1.0


class _Machine:
    """A script on one machine. Made an actor by `ray.remote`; its methods may run at once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._must_stop = False
        """Whether `stop` was called, perhaps before the script has begun."""
        self._lock = threading.Lock()

    def find_place(self) -> tuple[str, int]:
        """Give the machine's address and a port that is free there."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return str(ray.util.get_node_ip_address()), int(probe.getsockname()[1])

    def run(self, script: str, variables: dict[str, str]) -> int:
        """Run it to its end, and give its exit code."""
        with self._lock:
            if self._must_stop:
                return AGAIN
            # In a group of its own: Ray's own signals must not end it while it saves.
            self._process = subprocess.Popen(
                ["bash", "-c", script], env={**os.environ, **variables}, start_new_session=True
            )
        return self._process.wait()

    def stop(self) -> None:
        """Tell the script to save and to end; one that has not begun does not."""
        with self._lock:
            self._must_stop = True
            if self._process is not None:
                self._process.terminate()


def run_on_machines(
    *, nodes: int, cpus: int, gpus: int, memory_gib: int | None, max_restarts: int, script: str
) -> NoReturn:
    """Run a script on each of `nodes` machines, and end with its exit code.

    Args:
        nodes: number of machines.
        cpus: cores of each machine.
        gpus: GPUs of each machine.
        memory_gib: memory of each machine in GiB; None: not asked for.
        max_restarts: how often all start again where all machines were lost; else the script decides.
        script: a bash script. It ends with 75 to be started again, and finds FIRST, PEER, NODE_RANK, PORT and ID.
    """
    import ray

    ray.init()
    asked: dict[str, float] = {"CPU": cpus, "GPU": gpus, "memory": (memory_gib or 0) * 2**30}
    resources = {name: number for name, number in asked.items() if number}
    signals: list[int] = []
    for _ in range(max_restarts + 1):
        code: int | None = AGAIN
        while code == AGAIN and not signals:
            code = _run_once(nodes, resources, script, signals)
        if code is not None or signals:
            break
    sys.exit(LOST if code is None else code)


def _run_once(nodes: int, resources: dict[str, float], script: str, signals: list[int]) -> int | None:
    """Give the exit code of the script; None: all machines were lost.

    The signals that tell this process to stop are added to `signals`.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([resources] * nodes, strategy="STRICT_SPREAD")
    machines: list[Any] = []

    def stop(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for machine in machines:
            machine.stop.remote()

    before = {number: signal.signal(number, stop) for number in heard_signals()}
    try:
        while not signals and not group.wait(_POLL_SECONDS):
            pass
        if signals:
            return AGAIN
        # A method that waits for the script must not keep the others out.
        needs = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0), "memory": resources.get("memory")}
        actor = ray.remote(**needs, max_concurrency=4)(_Machine)
        for index in range(nodes):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            machines.append(actor.options(scheduling_strategy=place).remote())
        # A signal that came before all machines were in the list has not reached them all.
        return AGAIN if signals else _run_on(machines, script)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for machine in machines:
            ray.kill(machine)
        ray.util.remove_placement_group(group)


def _run_on(machines: list[Any], script: str) -> int | None:
    """Give the exit code of the first machine that was not lost; None: all were."""
    import ray
    from ray.exceptions import RayError

    try:
        places = ray.get([machine.find_place.remote() for machine in machines])
    except RayError:
        return None
    shared = {"FIRST": places[0][0], "PORT": str(places[0][1]), "ID": uuid.uuid4().hex}
    running = []
    for rank, machine in enumerate(machines):
        peer = places[0 if rank else -1][0]
        running.append(machine.run.remote(script, {**shared, "PEER": peer, "NODE_RANK": str(rank)}))
    codes: list[int] = []
    waiting = running
    while waiting:
        # Each wait is short, as a signal's handler runs between two waits.
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_SECONDS)
    for result in running:
        try:
            codes.append(ray.get(result))
        except RayError as error:
            sys.stderr.write(f"a machine was lost: {first_line(error)}\n")
    return codes[0] if codes else None
