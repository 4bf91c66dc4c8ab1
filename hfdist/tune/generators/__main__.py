"""A generator on the machine of rank 0: `python -m hfdist.tune.generators SETTINGS POLICY DEVICE INDEX NAME PARENT`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

from hfdist.processes.stop_signals import STOP_SIGNALS

_ALIVE_SECONDS = 1.0
"""Seconds between looks for the rank."""


def _end_with(parent: int) -> None:
    """End as soon as the rank has ended, for whatever reason."""
    while os.getppid() == parent:
        time.sleep(_ALIVE_SECONDS)
    os._exit(0)


def main() -> None:
    """Serve the run of the rank that has started this process."""
    settings, policy, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[5]
    first_device, index, parent = int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[6])
    # The rank tells its id: it may have ended, and this process have another parent already.
    threading.Thread(target=partial(_end_with, parent), daemon=True).start()
    # A launcher may tell all processes of a run to stop, and the ranks still have steps to end.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Imported here: all of it is slow, the model most of all.
    from hfdist.tune.generators.settings import Settings
    from hfdist.tune.generators.sockets import connect

    known = Settings.read(settings)
    broker = connect(settings.parent, name)
    if known.config.task.server is None:
        from hfdist.tune.generators.generator import Generator
        from hfdist.tune.generators.policy_files import PolicyFiles
        from hfdist.tune.generators.serving import serve

        serve(Generator(known, PolicyFiles(policy), device=first_device + index), broker)
    else:
        from hfdist.tune.generators.servers.served import serve_by_server

        serve_by_server(known, policy, index, start=settings.parent.name, broker=broker)


if __name__ == "__main__":
    main()
