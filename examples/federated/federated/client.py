"""A client: for each round it launches hfdist on its own data, in any layout, and gives back the weights.

Its settings are those of its SuperNode (--node-config): hfdist (the command), model (a folder like the server's), work
(a folder for its runs), overrides (of the run's config, separated by spaces; data among them).
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flwr.client import Client, ClientApp, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.common import Context, Message
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

from federated.arrays import read_arrays, write_model


class HfdistClient(NumPyClient):
    """Trains one round at a time."""

    def __init__(self, settings: dict[str, str]) -> None:
        self._hfdist, self._overrides = shlex.split(settings["hfdist"]), shlex.split(settings["overrides"])
        self._model, self._work = Path(settings["model"]), Path(settings["work"])

    def fit(self, parameters: list[np.ndarray], config: dict) -> tuple[list[np.ndarray], int, dict]:
        """Train from these weights; give new ones, the number of tokens, and the loss before."""
        folder = self._work / f"round-{config['round']}"
        shutil.rmtree(folder, ignore_errors=True)
        write_model(self._model, folder / "start", parameters)
        run = folder / "run"
        start = [f"model.name={folder / 'start'}", f"run.dir={run}", "evaluate.at_start=true"]
        # Its processes are of its own: torchrun or accelerate inside a client.
        command = [*self._hfdist, "pretrain", "model=hub", *start, *self._overrides]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        (folder / "hfdist.log").write_text(ended.stdout, encoding="utf-8")
        if ended.returncode != 0:
            last = ended.stdout[-2000:]
            raise RuntimeError(f"hfdist ended with {ended.returncode}; {folder / 'hfdist.log'} ends with:\n{last}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        before = next(line["eval_loss"] for line in lines if "eval_loss" in line)
        tokens = next(line["tokens"] for line in reversed(lines) if "tokens" in line)
        return read_arrays(run / "model"), int(tokens), {"loss": float(before)}


def make_client(context: Context) -> Client:
    """Make that of a SuperNode."""
    return HfdistClient(context.node_config).to_client()


def mask_if_asked(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Mask what this client gives where the server asks for secure aggregation: it sees the sum alone."""
    if RECORD_KEY_CONFIGS in message.content.config_records:
        return secaggplus_mod(message, context, call_next)
    return call_next(message, context)


app = ClientApp(make_client, mods=[mask_if_asked])
