"""The driver of a Ray job: it runs a script on each machine, and starts all again if the script asks for it.

    this process     run_on_machines: a placement group with a bundle for each machine
      actor          _Machine 0 ... N - 1, each in its bundle, with all GPUs of its machine
        bash         the script, which starts torchrun; its exit code 75 asks for another start of all

A second start may get other machines. A signal to this process is passed on to all scripts, which save and end.
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
from typing import Any, NamedTuple, NoReturn

from hfdist.errors import first_line
from hfdist.processes.stop_signals import heard_signals
from hfdist.tools.jobs.job import AGAIN
from hfdist.tools.jobs.verdict import LOST

_POLL_SECONDS = 1.0


class _Place(NamedTuple):
    """Where others reach a machine."""

    address: str
    port: int
    """A port that was free when it was looked for."""


class _Machine:
    """A machine's script. `ray.remote` makes an actor of it, whose methods may run at the same time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._must_stop = False
        """Whether `stop` was called, perhaps before the script has begun."""
        self._lock = threading.Lock()
        """Guards both, so that a script does not begin while `stop` looks for it."""

    def find_place(self) -> _Place:
        """Give the machine's address and a port that is free there."""
        # Imported in functions, as everywhere here: ray is optional, and slow to import.
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            _, port = probe.getsockname()
            return _Place(str(ray.util.get_node_ip_address()), int(port))

    def run(self, script: str, variables: dict[str, str]) -> int:
        """Run the script to its end, with some variables in its environment, and give its exit code."""
        with self._lock:
            if self._must_stop:
                return AGAIN
            # The script has a session of its own: Ray's own signals must not end it while it saves.
            self._process = subprocess.Popen(
                ["bash", "-c", script], env={**os.environ, **variables}, start_new_session=True
            )
        return self._process.wait()

    def stop(self) -> None:
        """Tell the script to save and to end; a script that has not begun will not begin."""
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
        memory_gib: memory of each machine in GiB; None: as Ray gives.
        max_restarts: number of times that all start again after a start in which all machines were lost. After other
            ends the script decides.
        script: a bash script. It ends with exit code 75 to be started again. It finds these variables:
            FIRST, the address of the first machine, and PORT, a port that is free there; PEER, the address of another
            machine; NODE_RANK, the number of its own machine, from 0; and ID, which is new at each start.
    """
    import ray

    ray.init()
    needed: dict[str, float] = {"CPU": cpus, "GPU": gpus, "memory": (memory_gib or 0) * 2**30}
    resources = {name: amount for name, amount in needed.items() if amount}
    stop = _Stop()
    for _ in range(max_restarts + 1):
        code: int | None = AGAIN
        while code == AGAIN and not stop.is_told:
            code = _run_once(nodes, resources, script, stop)
        has_lost_all = code is None
        if not has_lost_all or stop.is_told:
            break
    sys.exit(LOST if code is None else code)


class _Stop:
    """What the signals to this process do: each is passed on to all machines."""

    def __init__(self) -> None:
        self.is_told = False
        """Whether a signal has come, at any start."""
        self.machines: list[Any] = []
        """The actors of this start, of which ray has no type."""

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Tell all machines to stop; the handler of a signal."""
        self.is_told = True
        for machine in self.machines:
            machine.stop.remote()


def _run_once(nodes: int, resources: dict[str, float], script: str, stop: _Stop) -> int | None:
    """Start the script on all machines, and give its exit code; None: all machines were lost."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([resources] * nodes, strategy="STRICT_SPREAD")
    handlers_before = {number: signal.signal(number, stop.hear) for number in heard_signals()}
    try:
        while not stop.is_told and not group.wait(_POLL_SECONDS):
            pass
        if stop.is_told:
            return AGAIN
        needs = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0), "memory": resources.get("memory")}
        # Several methods at once: `run`, which waits for the script, must not keep `stop` out.
        actor = ray.remote(**needs, max_concurrency=4)(_Machine)
        for index in range(nodes):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            stop.machines.append(actor.options(scheduling_strategy=place).remote())
        # A signal that came before all machines were in the list has not reached them all.
        return AGAIN if stop.is_told else _run_on(stop.machines, script)
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
        for machine in stop.machines:
            ray.kill(machine)
        stop.machines.clear()
        ray.util.remove_placement_group(group)


def _run_on(machines: list[Any], script: str) -> int | None:
    """Run the script on all machines, and give the exit code of the first one that was not lost; None: all were."""
    import ray
    from ray.exceptions import RayError

    try:
        places: list[_Place] = ray.get([machine.find_place.remote() for machine in machines])
    except RayError:
        return None
    first, last = places[0], places[-1]
    shared = {"FIRST": first.address, "PORT": str(first.port), "ID": uuid.uuid4().hex}
    results = []
    for rank, machine in enumerate(machines):
        # Any other machine: by the route to it, the network interface is found.
        peer = last if rank == 0 else first
        results.append(machine.run.remote(script, {**shared, "PEER": peer.address, "NODE_RANK": str(rank)}))
    waiting = results
    while waiting:
        # Each wait is short, as a signal's handler runs between two waits.
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_SECONDS)
    codes: list[int] = []
    for result in results:
        try:
            codes.append(ray.get(result))
        except RayError as error:
            sys.stderr.write(f"a machine was lost: {first_line(error)}\n")
    return codes[0] if codes else None
