"""DeepSpeed comes without MLflow, which a tracker still finds."""

import importlib.util
import sys

import pytest

from hfdist.strategies.deepspeed.startup import import_deepspeed
from hfdist.testing import run_ranks


def import_anew():
    """As a process does that has neither of both: whether each is there afterwards, and MLflow can be found."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("deepspeed", "mlflow")]:
        del sys.modules[name]
    import_deepspeed()
    return "deepspeed.autotuning.autotuner" in sys.modules, "mlflow" in sys.modules, importlib.util.find_spec("mlflow")


def test_deepspeed_is_imported_without_mlflow():
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("MLflow is not installed")
    [(has_deepspeed, has_mlflow, found)] = run_ranks(import_anew, 1, group=False)
    assert has_deepspeed
    assert not has_mlflow
    assert found.name == "mlflow"
