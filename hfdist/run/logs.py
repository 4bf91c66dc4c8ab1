"""Who may speak: rank 0 tells how the run goes, the other ranks only what goes wrong."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from contextlib import nullcontext
from typing import TextIO

import datasets
import torch
import transformers
from tqdm import tqdm

from hfdist.errors import printable
from hfdist.topology import Topology


def set_up_logging(topology: Topology) -> None:
    """Let `hfdist` speak plainly on rank 0, and keep the libraries' chatter and repeated warnings out."""
    logger = logging.getLogger("hfdist")
    logger.propagate = False
    logger.setLevel(logging.INFO if topology.is_main else logging.ERROR)
    handler = _BesideBars(sys.stderr)
    handler.setFormatter(_Plain())
    logger.handlers[:] = [handler]

    level = logging.WARNING if topology.is_main else logging.ERROR
    transformers.logging.set_verbosity(level)
    datasets.logging.set_verbosity(level)
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    if not torch.cuda.is_available():
        # DeepSpeed warns at import, on every rank, that it found no GPU, unless it is told.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed and accelerate log each step of their set-up; DeepSpeed sets its level anew when it is imported.
    for name in ("DeepSpeed", "accelerate", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    # What a library calls in torch under an older name is no user's business, and would stand within the bar.
    if not sys.warnoptions:
        for category in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=r"(torch|deepspeed|accelerate)\b")
        warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
    for of_the_hub in logging.getLogger("huggingface_hub").handlers:
        of_the_hub.addFilter(_without_queries)
    if not topology.is_main:
        warnings.simplefilter("ignore")


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _without_queries(record: logging.LogRecord) -> bool:
    """Addresses of the Hub's storage are signed: who has one may read the file."""
    record.msg, record.args = re.sub(r"(://[^\s?]+)\?[^\s:]+", r"\1", record.getMessage()), ()
    return True


class _BesideBars(logging.StreamHandler[TextIO]):
    """Takes progress bars off the screen for a message, so that it has lines of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        # tqdm has a lock, which a forked process may inherit taken: only who has a bar comes near it.
        with tqdm.external_write_mode(file=self.stream) if getattr(tqdm, "_instances", None) else nullcontext():
            super().emit(record)


class _Plain(logging.Formatter):
    """Messages as they are, but for control characters and secrets; warnings and errors say so.

    Lines of a warning after its first one are indented: a name that holds a line break cannot pass for a message.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = "\n".join(map(printable, super().format(record).split("\n")))
        if record.levelno < logging.WARNING:
            return text
        return f"{record.levelname.lower()}: {text}".replace("\n", "\n  ")
