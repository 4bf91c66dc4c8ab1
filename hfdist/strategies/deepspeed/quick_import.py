"""DeepSpeed is imported without MLflow, which takes a sixth of all imports of a run and which nobody here needs."""

from __future__ import annotations

import importlib
import sys


def import_deepspeed() -> None:
    """Import it before accelerate does, whatever the layout.

    Its module of autotuning, which runs of hfdist never use, imports MLflow where that is installed. None in the table
    of modules is Python's way to say that there is none; a tracker of the run imports it afterwards as ever.
    """
    if "deepspeed" in sys.modules or "mlflow" in sys.modules:
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("deepspeed")
    finally:
        del sys.modules["mlflow"]
