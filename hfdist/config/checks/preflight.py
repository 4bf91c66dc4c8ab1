"""What a run needs of this machine, found without torch: processes, paths, packages.

`Run` asks again, for programs that did not ask before their imports.
"""

from __future__ import annotations

import importlib.util
import os

from hfdist.config.batch import BatchPlan, plan_batch
from hfdist.config.checks.accelerate_variables import check_environment
from hfdist.config.checks.budgets import check_budgets
from hfdist.config.checks.paths import check_paths
from hfdist.config.data import WHOLE
from hfdist.config.run import TRACKERS, RunConfig
from hfdist.config.task import NO_SERVER, TaskConfig
from hfdist.config.train import Precision
from hfdist.errors import ConfigError, nearest
from hfdist.topology import Topology

_PYZMQ = "'pyzmq>=26'"


def check_run(config: RunConfig, *, world_size: int | None = None) -> tuple[Topology, BatchPlan]:
    """Check what can be checked before anything large is imported; ConfigError: the first mistake.

    Args:
        config: the run's.
        world_size: number of processes that are to be started; None: as many as the launcher says.

    Returns:
        The place of this process, of rank 0 where `world_size` is given; and the batch arithmetic.
    """
    check_environment(config, os.environ)
    topology, batch = plan_run(config, world_size=world_size)
    check_paths(config)
    if config.data.shard != WHOLE:
        what, hint = "a run reads all files, and each rank its own lanes of them", f"data.shard={WHOLE}"
        raise ConfigError(what, where="data.shard", found=config.data.shard, allowed=WHOLE, hint=hint)
    _check_trackers(config.report.to)
    check_budgets(config)
    _check_packages(config)
    _check_address(config.task)
    return topology, batch


def _check_address(task: TaskConfig) -> None:
    """Refuse to let generators of other machines in who need no secret."""
    host = task.generators_host
    if host is None:
        return
    # Imported here, as both take long, and few runs name an address.
    from hfdist.launch.address import LOOPBACK
    from hfdist.messages.door import SECRET

    if host in ("localhost", LOOPBACK, "::1") or os.environ.get(SECRET):
        return
    what = "whoever reaches this address could answer the run's prompts, and read its model"
    found, allowed = f"{host}, without {SECRET}", f"{LOOPBACK}, or any with a secret"
    hint = f"the same {SECRET} in the environment of the run and of its generators"
    raise ConfigError(what, where="task.generators_host", found=found, allowed=allowed, hint=hint)


def _check_packages(config: RunConfig) -> None:
    """Check that the package is installed of each value that needs one besides hfdist's own."""
    task = config.task
    if config.train.precision is Precision.fp8:
        _need("torchao", "'torchao>=0.18,<0.19'", "train.precision", Precision.fp8.value, instead="bf16")
    if config.train.arguments.get("use_liger_kernel"):
        _need("liger_kernel", "liger-kernel", "train.arguments.use_liger_kernel", "true", instead="false")
    if task.server is not None:
        without = NO_SERVER.removeprefix("task.server=")
        _need("zmq", _PYZMQ, "task.server", task.server.value, instead=without)
    elif task.generators_port is not None:
        _need("zmq", _PYZMQ, "task.generators_port", task.generators_port, instead="null")
    elif task.generators > 0:
        _need("zmq", _PYZMQ, "task.generators", task.generators, instead="0")


def _need(module: str, package: str, key: str, value: object, *, instead: str) -> None:
    """Raise a ConfigError of a value that needs a module, where that is not installed; `instead` needs none."""
    if importlib.util.find_spec(module) is None:
        what, hint = "this value needs a package that is not installed", f"pip install {package}, or {key}={instead}"
        raise ConfigError(what, where=key, found=f"{value}, without {module}", hint=hint)


def plan_run(config: RunConfig, *, world_size: int | None = None, rank: int = 0) -> tuple[Topology, BatchPlan]:
    """Give a place, as `StrategyConfig.topology` does, and the batch arithmetic.

    Raises:
        ConfigError: sizes that do not divide, or too few processes.
    """
    topology = config.strategy.topology(world_size, rank=rank)
    batch = plan_batch(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        data_size=topology.data,
        sequence_length=config.data.sequence_length,
        lanes=config.data.lanes,
        islands=config.islands.shares,
    )
    return topology, batch


def _check_trackers(names: list[str]) -> None:
    for name in names:
        if name not in TRACKERS:
            what, allowed = "transformers has no such tracker", ", ".join(sorted(TRACKERS))
            hint = nearest(name, TRACKERS, "report.to=[{}]") or "report.to=[]"
            raise ConfigError(what, where="report.to", found=name, allowed=allowed, hint=hint)
        modules = TRACKERS[name]
        if all(importlib.util.find_spec(module) is None for module in modules):
            what, hint = "the tracker's package is not installed", f"report.to=[], or pip install {modules[0]}"
            raise ConfigError(what, where="report.to", found=name, hint=hint)
