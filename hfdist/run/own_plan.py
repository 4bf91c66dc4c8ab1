"""The plan of a run that is about to start, made by another process, so that nothing of it stays in this one.

A plan traces the layout with a process group and a model that are not real. A forked process inherits what this one has
imported and read, so that it costs the trace alone. CUDA does not survive a fork, so where there is a GPU the process
is a new one, which sees none.

    this process   begin_plan --fork, or spawn and send `make`-->  builds the model ...  take_plan
    the other                                   make() --------- Plan and Machines, or why not ---^
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import psutil
import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from hfdist.config.hardware import Hardware
from hfdist.config.plan import PlanConfig
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError, ResourceError, first_line, named_line
from hfdist.planning.describe import verdict
from hfdist.planning.machines import find_machines
from hfdist.planning.make_plan import make_plan
from hfdist.planning.plan import Plan
from hfdist.planning.searching.evaluate import Machines
from hfdist.planning.timing.hardware import find_hardware
from hfdist.planning.whole_run import with_steps
from hfdist.processes.child_python import python
from hfdist.processes.stop_signals import heard_signals
from hfdist.strategies.engine import Engine
from hfdist.topology import Topology, read_launcher

logger = logging.getLogger(__name__)

_MOST_SECONDS = 60.0
"""The most seconds that a run waits for its plan once it is ready itself."""
_HOST_MEMORY_ENDS = re.compile(r"DefaultCPUAllocator: (can't|not enough)|bad_alloc|Cannot allocate memory")
"""What torch and the system write in a RuntimeError where the host has no memory left."""
_CONNECTION = 3
"""File descriptor of a new process: the first one after its standard streams."""
PlanAndMachines = tuple[Plan, Machines]
"""A plan, and the machines for which it was made."""


class OwnPlan:
    """Makes a plan beside this process.

    Args:
        make: makes the plan; called in the other process.
        forks: whether the other process is a fork of this one; otherwise it is a new one that sees no GPU, and `make`
            is pickled for it.
    """

    def __init__(self, make: Callable[[], PlanAndMachines], *, forks: bool = True) -> None:
        self._connection, theirs = Pipe()
        self._pid = _fork(make, theirs, self._connection) if forks else _start(theirs)
        # Closed here: otherwise `take` would see no end of the pipe when the child dies.
        theirs.close()
        # A run may fail before it takes the plan: the child ends all the same.
        self._end = weakref.finalize(self, _end, self._pid)
        if not forks:
            self._send(make)

    def _send(self, make: Callable[[], PlanAndMachines]) -> None:
        """Send `make` to the child; end the child where that cannot be pickled, as it would wait for it."""
        try:
            # OSError: the child has ended already.
            with suppress(OSError):
                self._connection.send(make)
        except (pickle.PicklingError, AttributeError, TypeError):
            self._end()

    def take(self) -> PlanAndMachines | str:
        """Wait for the plan; give it, or in words why there is none. Call it once."""
        found: PlanAndMachines | str = f"it took longer than {_MOST_SECONDS:.0f} s, or its process was ended"
        # OSError: the child has ended before it has read what it was sent.
        with suppress(EOFError, OSError):
            if self._connection.poll(_MOST_SECONDS):
                found = self._connection.recv()
        self._connection.close()
        self._end()
        return found


def begin_plan(config: RunConfig, architecture: PreTrainedConfig, topology: Topology) -> OwnPlan | None:
    """Begin to plan the run, on rank 0; None: it is not asked for, or cannot be done here.

    Call it before the process group is started: the child would have a part in it.
    """
    if not (config.report.plan and topology.is_main and hasattr(os, "fork")) or dist.is_initialized():
        return None
    if config.task.answers_prompts:
        return None
    asked = PlanConfig(per_machine=read_launcher().local_world_size)
    has_gpu = torch.cuda.is_available()
    try:
        hardware = find_hardware() if has_gpu else None
    except ConfigError as error:
        logger.info("no plan: %s", first_line(error))
        return None
    make = partial(_make_own, config, asked, hardware, topology.world_size, architecture)
    try:
        return OwnPlan(make, forks=not has_gpu)
    except OSError as error:
        # A user may have no more processes, for example: the run goes on without its plan.
        logger.warning("no plan: %s", error.strerror)
        return None


def _make_own(
    config: RunConfig, asked: PlanConfig, hardware: Hardware | None, processes: int, architecture: PreTrainedConfig
) -> PlanAndMachines:
    """Find the machines of the run, and plan it for them; in the other process."""
    machines = find_machines(config, asked, hardware, processes)
    return make_plan(config, machines, processes, architecture), machines


def take_plan(own: OwnPlan, config: RunConfig, *, runtime_bytes: int | None, max_steps: int) -> Plan | None:
    """Take the plan once all else is built, and warn where the run will not fit, or where there is no plan.

    Args:
        own: the plan that `begin_plan` has begun.
        config: the run's config.
        runtime_bytes: bytes that this process held before the model was made, which a plan can only assume.
        max_steps: number of steps of the run.
    """
    found = own.take()
    if isinstance(found, str):
        logger.warning("no plan: %s", found)
        return None
    plan, machines = found
    if runtime_bytes is not None:
        plan = replace(plan, memory=plan.memory.with_runtime(runtime_bytes))
    plan = with_steps(plan, config, machines, max_steps)
    if not plan.fits:
        hint = "" if plan.advice is None else f"; try {plan.advice}"
        logger.warning("this run %s%s", verdict(plan), hint)
    return plan


def runtime_bytes(engine: Engine | None, device: torch.device) -> int | None:
    """Give the resident bytes of this process without its weights; None: on a GPU, whose peaks hold none of them.

    Call it once all is built and before the first step, since libraries are imported until then.
    """
    if device.type == "cuda" or engine is None:
        return None
    return psutil.Process().memory_info().rss - engine.held_bytes(device)["weights"]


@contextmanager
def naming_lack_of_memory(plan: Plan | None) -> Iterator[None]:
    """Turn an error of torch's for lack of memory into a ResourceError with the next move.

    `plan` is what rank 0 has planned; None: there is no plan, or this is another rank.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not _HOST_MEMORY_ENDS.search(str(error)):
            raise
        found = None if plan is None else verdict(plan)
        hint = "hfdist plan ... plan.search=true names layouts that fit"
        if plan is not None and plan.advice:
            hint = plan.advice
        what = f"there is not enough memory: {first_line(error)}"
        raise ResourceError(what, where="memory", found=found, hint=hint) from error


def _end(pid: int) -> None:
    """Kill the other process, and wait until it is gone; it may have ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _fork(make: Callable[[], PlanAndMachines], connection: Connection, parents_end: Connection) -> int:
    """Fork a child that makes the plan and answers over `connection`; give its process id."""
    # tokenizers warns of a fork once it has started threads; the child does nothing with them.
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = before or "false"
    try:
        pid = os.fork()
        if pid == 0:
            try:
                # The child has inherited it: while it is open here, nothing tells the child that its parent has ended.
                parents_end.close()
                _answer(make, connection)
            finally:
                # Without the exit functions of this process, which would end what the parent still uses.
                os._exit(0)
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
    return pid


def _start(connection: Connection) -> int:
    """Start a new process that sees no GPU and answers over `connection`; give its process id."""
    code = f"from {__name__} import make_received; make_received({_CONNECTION})"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # Its standard streams 0, 1 and 2 go nowhere: what it says comes over the connection.
    silent = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
    handed = (os.POSIX_SPAWN_DUP2, connection.fileno(), _CONNECTION)
    command = python("-c", code)
    return os.posix_spawn(command[0], command, environment, file_actions=[*silent, handed])


def make_received(descriptor: int) -> None:
    """Receive `make` over the connection of this descriptor, call it, and answer; runs in the new process."""
    connection = Connection(descriptor)
    _answer(lambda: connection.recv()(), connection)


def _answer(make: Callable[[], PlanAndMachines], connection: Connection) -> None:
    """Send the plan, or in words why there is none."""
    # A signal that asks the run to save is not for this process, which would only inherit its handlers.
    for number in heard_signals():
        signal.signal(number, signal.SIG_DFL)
    try:
        with warnings.catch_warnings():
            # Warnings of libraries: the run itself gives the same.
            warnings.simplefilter("ignore")
            found: PlanAndMachines | str = make()
    except Exception as error:
        found = named_line(error)
    connection.send(found)
