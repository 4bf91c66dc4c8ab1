"""--offline: the libraries are told, and what needs a connection is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hfdist.config.checks.urls import redact, scheme_of
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError

OFFLINE_FLAG = "--offline"
_SWITCHES = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "offline"}
"""Read by huggingface_hub, transformers and datasets while they are imported; and by the trackers."""
_MLFLOW = "MLFLOW_TRACKING_URI"
_LOCAL_TRACKERS: Mapping[str, tuple[str, ...]] = {
    "tensorboard": (),
    "wandb": (),
    "trackio": ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"),
    "mlflow": (_MLFLOW,),
}
"""Trackers that write to a folder, unless one of these variables names another machine."""


def go_offline() -> None:
    """Switch the Hub off for this process and its children. Call before any of its libraries is imported."""
    os.environ.update(_SWITCHES)


def check_offline(config: RunConfig) -> None:
    """Raise a ConfigError on what needs a connection; the Hub's cache is asked where it is opened."""
    for key, source in config.data.all_sources.items():
        path = source.path or ""
        if scheme_of(path) not in (None, "file", "memory"):
            what = f"the data lie on a network, which {OFFLINE_FLAG} rules out"
            allowed, hint = "a path on this machine", f"copy them here first, or leave {OFFLINE_FLAG} out"
            raise ConfigError(what, where=f"{key}.path", found=redact(path), allowed=allowed, hint=hint)
    mirror = config.checkpoint.mirror or ""
    if scheme_of(mirror) not in (None, "file"):
        what, hint = f"the mirror lies on a network, which {OFFLINE_FLAG} rules out", "checkpoint.mirror=null"
        raise ConfigError(what, where="checkpoint.mirror", found=redact(mirror), allowed="null, file://", hint=hint)
    for name in config.report.to:
        if name not in _LOCAL_TRACKERS:
            what = f"this tracker needs a connection, which {OFFLINE_FLAG} rules out"
            raise ConfigError(what, where="report.to", found=name, allowed=", ".join(_LOCAL_TRACKERS))
        for variable in _LOCAL_TRACKERS[name]:
            value = os.environ.get(variable, "")
            if value and not _is_here(variable, value):
                what = f"this tracker is told to report to another machine, which {OFFLINE_FLAG} rules out"
                found, hint = f"{variable}={redact(value)}", f"unset {variable}"
                raise ConfigError(what, where="report.to", found=found, hint=hint)
    if config.export.push_to is not None:
        what = f"an upload needs the Hub, which {OFFLINE_FLAG} rules out"
        hint = "export.push_to=null; the model's folder can be uploaded later with `hf upload`"
        raise ConfigError(what, where="export.push_to", found=config.export.push_to, hint=hint)


def _is_here(variable: str, value: str) -> bool:
    """Whether a tracker's variable names a place of this machine."""
    # MLflow takes a folder as it is; these names, and those with a colon, are other places to it.
    is_folder = variable == _MLFLOW and ":" not in value and value not in ("databricks", "databricks-uc", "uc")
    return is_folder or value.startswith(("file:", "sqlite:"))
