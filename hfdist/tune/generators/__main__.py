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
"""Seconds between two looks at whether the rank is alive."""


def _end_with(parent: int) -> None:
    """End as soon as the rank has ended, for whatever reason."""
    while os.getppid() == parent:
        time.sleep(_ALIVE_SECONDS)
    os._exit(0)


def main() -> None:
    """Serve the run of the rank that has started this process."""
    settings_path, policy, first_device, index, name, parent = sys.argv[1:]
    # The rank gives its process id: it may have ended, so that this process has another parent already.
    threading.Thread(target=partial(_end_with, int(parent)), daemon=True).start()
    # A launcher may tell all processes of a run to stop, and the ranks still have steps to end.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Imported here, as imports take seconds, those of the model most of all: the two things above must not wait.
    from hfdist.tune.generators.settings import Settings
    from hfdist.tune.generators.sockets import connect

    folder = Path(settings_path).parent
    settings = Settings.read(Path(settings_path))
    broker = connect(folder, name)
    if settings.config.task.server is None:
        from hfdist.tune.generators.generator import Generator
        from hfdist.tune.generators.policy_files import PolicyFiles
        from hfdist.tune.generators.serving import serve

        device = int(first_device) + int(index)
        serve(Generator(settings, PolicyFiles(Path(policy)), device=device), broker)
    else:
        from hfdist.tune.generators.servers.served import serve_by_server

        # The folder has a random name, so it names this start of the run.
        serve_by_server(settings, Path(policy), int(index), start=folder.name, broker=broker)


if __name__ == "__main__":
    main()
