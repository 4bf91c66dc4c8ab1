"""Generators as of other machines: forks that serve a run over real connections, and kill themselves at a moment."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from enum import Enum
from multiprocessing.process import BaseProcess
from pathlib import Path

from hfdist.environments.player import Player
from hfdist.launch.address import LOOPBACK
from hfdist.messages.door import SECRET
from hfdist.tune.generators import link, remote, remote_files
from hfdist.tune.generators.generator import Generator
from hfdist.tune.generators.link import TcpLink
from hfdist.tune.generators.messages import unpack
from hfdist.tune.generators.remote import RemoteGenerator
from hfdist.tune.generators.remote_files import RemoteFiles


class Moment(Enum):
    """Of a generator, at the version of step 1 where there is one."""

    hello = "before it has said who it is"
    weights = "while it reads weights"
    answer = "in the middle of an answer"
    answered = "after an answer"
    turn = "while an environment acts"


def generate(port: int, folder: Path, moment: Moment | None, struck: Path | None) -> None:
    """As `hfdist generate` does, in a fork that kills itself at a moment; None: that comes once the other is killed."""
    remote_files.RETRY_SECONDS = remote.RETRY_SECONDS = 0.1
    while moment is None and struck is not None and not struck.exists():
        time.sleep(0.05)
    if moment is not None and struck is not None:
        die_at(moment, struck)
    with (folder / "log").open("a", buffering=1) as log:
        address, secret = (LOOPBACK, port), os.environ[SECRET]
        say = lambda line: print(line, file=log)  # noqa: E731
        RemoteGenerator(address, secret, folder, folder, own=None, wait_seconds=120, say=say).run()


def die_at(moment: Moment, struck: Path) -> None:
    """Kill this process at a moment: its methods are wrapped, and nothing is replaced."""
    knock, chunk, forward, send = link.knock, RemoteFiles._chunk, Generator._forward, TcpLink.send
    read, take, versions = Generator.answer, Player.take, []

    def die(is_now):
        if is_now:
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def knock_and_die(*arguments):
        made = knock(*arguments)
        die(moment is Moment.hello)
        return made

    def chunk_and_die(files, asked, wanted):
        found = chunk(files, asked, wanted)
        die(moment is Moment.weights and asked.get("version") == 1)
        return found

    def forward_and_die(generator, *arguments, **named):
        found = forward(generator, *arguments, **named)
        die(moment is Moment.answer and generator._version_read == (0, 1))
        return found

    def send_and_die(connection, content):
        send(connection, content)
        die(moment is Moment.answered and unpack(content).get("version") == 1)

    def note_version(generator, rollback, version, prompts):
        versions.append(version)
        return read(generator, rollback, version, prompts)

    def take_and_die(player, *said):
        die(moment is Moment.turn and versions[-1] == 1)
        return take(player, *said)

    link.knock, RemoteFiles._chunk = knock_and_die, chunk_and_die
    Generator.answer, Player.take = note_version, take_and_die
    Generator._forward, TcpLink.send = forward_and_die, send_and_die


def free_port() -> int:
    """A port that nobody has."""
    with socket.create_server((LOOPBACK, 0)) as taken:
        return taken.getsockname()[1]


def start_pair(port: int, folder: Path, moment: Moment | None) -> list[BaseProcess]:
    """Start one that kills itself at a moment, and one that comes then; without a moment both come at once."""
    processes, struck = [], None if moment is None else folder / "struck"
    for number, own in enumerate((moment, None)):
        home = folder / f"generator-{number}"
        home.mkdir()
        arguments = port, home, own, struck
        processes.append(multiprocessing.get_context("fork").Process(target=generate, args=arguments))
        processes[-1].start()
    return processes
