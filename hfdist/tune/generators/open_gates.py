"""The gates that a run needs for other machines, opened on rank 0, and the connection of each rank to the broker."""

from __future__ import annotations

import logging
import os
import platform
import secrets
from pathlib import Path

from hfdist.config.data import cache_dir
from hfdist.config.task import TaskConfig
from hfdist.control_group import machines
from hfdist.errors import ConfigError, PeerError
from hfdist.launch.address import LOOPBACK, listen, own_address
from hfdist.messages.door import SECRET
from hfdist.messages.message import NotAMessageError, RefusedError
from hfdist.models.peft_config import saved_files
from hfdist.models.resolve import list_files, resolve_model
from hfdist.topology import read_launcher
from hfdist.tune.generators.chunks import may_travel
from hfdist.tune.generators.gates import GeneratorGate, RankGate
from hfdist.tune.generators.link import TcpLink
from hfdist.tune.generators.messages import MOST_BYTES, RANK, Link
from hfdist.tune.generators.policy_files import PolicyFiles
from hfdist.tune.generators.served_files import ADAPTER, MODEL, TOKENIZER, ServedFiles
from hfdist.tune.generators.settings import Settings
from hfdist.tune.generators.sockets import connect

logger = logging.getLogger(__name__)

_TAKEN_SECONDS = 10.0
"""Seconds in which a process of the start before may still have the port."""
_CONNECT_SECONDS = 30.0
_BYTES_OF_TOKEN = 48
"""The most bytes of a token and its log-probability in a message of answers of one turn."""


class Gates:
    """The gates of rank 0; without other machines there are none.

    Args:
        settings: settings of the generators.
        sockets: folder of the broker's socket.
        files: versions of the policy.

    Raises:
        ConfigError: this machine cannot listen at `task.generators_port`.
    """

    def __init__(self, settings: Settings, sockets: Path, files: PolicyFiles) -> None:
        self._ranks: RankGate | None = None
        self._generators: GeneratorGate | None = None
        self.way_for_ranks: list[object] = []
        """Host, port and secret for ranks of other machines, as JSON; []: there are none."""
        self.invitation: str | None = None
        """How a generator of another machine joins; None: none can."""
        if len(_beside_rank_0()) < read_launcher().world_size:
            address, listens_at = own_address(0)
            listener = listen(listens_at, 0)
            self._ranks = RankGate(listener, sockets)
            self.way_for_ranks = [address, listener.getsockname()[1], self._ranks.secret]
        if settings.config.task.generators_port is not None:
            self._generators = _open_for_generators(settings, sockets, files)
            self.invitation = _invite(settings.config.task)
            logger.info("generators may join: %s", self.invitation)

    def close(self, *, is_end: bool) -> None:
        """Serve no more; `is_end`: generators are told that the training has ended."""
        if self._generators is not None:
            self._generators.close(is_end=is_end)
        if self._ranks is not None:
            self._ranks.close()


def connect_rank(rank: int, sockets: Path, way: list[object]) -> Link:
    """Connect a rank to the broker of rank 0, over the network where that is on another machine.

    Args:
        rank: number of this rank.
        sockets: folder of the broker's socket.
        way: `Gates.way_for_ranks` of rank 0.

    Raises:
        PeerError: rank 0 cannot be reached.
    """
    if rank in _beside_rank_0():
        return connect(sockets, f"{RANK}{rank}")
    host, port, secret = (str(part) for part in way)
    try:
        return TcpLink((host, int(port)), secret, {"rank": rank}, _CONNECT_SECONDS)
    except (OSError, NotAMessageError, RefusedError) as error:
        what, found = f"rank {rank} cannot reach the broker of the generators, on rank 0", f"{host}:{port}: {error}"
        raise PeerError(what, found=found, hint="hfdist doctor, which looks at the links between machines") from error


def _beside_rank_0() -> list[int]:
    """List the ranks that are surely on the machine of rank 0, rank 0 included."""
    # `machines` tells machines apart by the names of their hosts. If it knows one, and the launcher has started
    # others, then all hosts have one name: only rank 0 itself is surely there.
    if len(machines()) == 1 and read_launcher().has_other_machines:
        return [0]
    return machines()[0]


def _open_for_generators(settings: Settings, sockets: Path, files: PolicyFiles) -> GeneratorGate:
    config, secret = settings.config, os.environ.get(SECRET, "")
    task, port = config.task, config.task.generators_port
    assert port is not None
    host = _host(task)
    try:
        listener = listen(host, port, wait_seconds=_TAKEN_SECONDS)
    except (OSError, OverflowError) as error:
        what, found = "generators cannot be let in there", f"{host or 'all addresses'}, {port}: {error}"
        hint = "another port, as task.generators_port=29700"
        raise ConfigError(what, where="task.generators_host, task.generators_port", found=found, hint=hint) from error
    most_tokens = settings.limits.max_new_tokens * task.num_generations * config.train.micro_batch_size
    most_bytes = 2**16 + _BYTES_OF_TOKEN * most_tokens
    return GeneratorGate(
        listener,
        sockets,
        secret=secret,
        welcome={"settings": settings.to_message(), "start": secrets.token_hex(16)},
        files=ServedFiles(_files_of(settings), files),
        # What is said in an episode may be long: the largest message is the only bound.
        most_bytes=min(MOST_BYTES, most_bytes) if task.environment is None else MOST_BYTES,
    )


def _host(task: TaskConfig) -> str:
    """Give the address to listen at; "": all of this machine. Without a secret, only this machine may come in."""
    if task.generators_host:
        return task.generators_host
    return "" if os.environ.get(SECRET) else LOOPBACK


def _invite(task: TaskConfig) -> str:
    """Give the command of a generator, and where it may be run."""
    host = _host(task)
    name = platform.node() if host in ("", "0.0.0.0", "::") else host
    if ":" in name:
        # An address of IPv6.
        name = f"[{name}]"
    command = f"hfdist generate join={name}:{task.generators_port}"
    if os.environ.get(SECRET):
        return f"{command}, with this run's {SECRET}"
    return f"{command}, on this machine; from others with a {SECRET} that both have"


def _files_of(settings: Settings) -> dict[str, dict[str, Path]]:
    """Find the files that a generator builds its model from, by kind and by name."""
    config = settings.config
    model, adapter, tokenizer = {}, {}, {}
    start = resolve_model(config.model, cache_dir=cache_dir(config.data))
    if start.model.name is not None:
        folder = Path(start.model.name)
        model = {name: folder / name for name in list_files(start.model, folder) if may_travel(name)}
    if config.adapter.path is not None:
        adapter = saved_files(config.adapter.path)
    if config.task.environment is not None:
        # `Host` has saved the tokenizer there.
        paths = Path(str(config.model.tokenizer.name)).iterdir()
        tokenizer = {path.name: path for path in paths if may_travel(path.name)}
    return {MODEL: model, ADAPTER: adapter, TOKENIZER: tokenizer}
