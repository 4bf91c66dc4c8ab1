"""`--offline`: a run that opens no connection to another machine but those of its own ranks."""

from __future__ import annotations

import os

from hfdist.config.checks.urls import redact, scheme_of
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError

FLAG = "--offline"
_LOCAL_TRACKERS = ("tensorboard", "wandb")
# Read by huggingface_hub, transformers and datasets while they are imported; and by the trackers.
_SWITCHES = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "offline"}


def go_offline() -> None:
    """Switch the Hub off for this process and its children. Call before any of its libraries is imported."""
    os.environ.update(_SWITCHES)


def check_offline(config: RunConfig) -> None:
    """Refuse what cannot be had without a connection. What the Hub's cache holds is found out where it is opened.

    Raises:
        ConfigError: data behind a network, or an upload.
    """
    data = config.data
    named = {f"data.sources.{name}": source for name, source in data.sources.items()}
    named |= {f"data.eval_sources.{name}": source for name, source in data.eval_sources.items()}
    for key, source in named.items():
        scheme = scheme_of(source.path or "")
        if scheme not in (None, "file", "memory"):
            raise ConfigError(
                f"the data lie behind a network, which {FLAG} rules out",
                where=f"{key}.path",
                found=redact(source.path or ""),
                allowed="a path on this machine",
                hint=f"copy them here first, or leave {FLAG} out",
            )
    for name in config.report.to:
        if name not in _LOCAL_TRACKERS:
            raise ConfigError(
                f"this tracker needs a connection, which {FLAG} rules out",
                where="report.to",
                found=name,
                allowed=", ".join(_LOCAL_TRACKERS),
            )
    if config.export.push_to is not None:
        raise ConfigError(
            f"an upload needs the Hub, which {FLAG} rules out",
            where="export.push_to",
            found=config.export.push_to,
            hint="export.push_to=null; the model's folder can be uploaded later with `hf upload`",
        )
