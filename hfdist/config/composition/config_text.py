"""A composed config as plain values and as YAML, from which the same config can be composed again."""

from __future__ import annotations

from typing import Any

from hfdist.config.checks.urls import refuse_secrets
from hfdist.config.composition.files import RUN_DEFAULTS
from hfdist.config.composition.yaml_text import to_yaml_text
from hfdist.config.plain_values import plain
from hfdist.config.run import RunConfig

_RUNS_CODE = (("model", "trust_remote_code"), ("evaluate", "lm_eval_include"), ("report", "alert_command"))
"""Keys that no file may set, and no saved config has where they are set."""


def to_yaml(config: RunConfig) -> str:
    """Write the whole resolved config as a primary config file, which composes to an equal RunConfig.

    The exceptions are `model.trust_remote_code`, `evaluate.lm_eval_include` and `report.alert_command`: no file may set
    them, so they are left out when they are set.
    """
    head = ["# The resolved config of a run. To start one from it: hfdist run <this file>"]
    for section, name in _RUNS_CODE:
        value = getattr(getattr(config, section), name)
        if value:
            # A command may hold what is not for everybody.
            text = "true" if value is True else "..." if name == "alert_command" else value
            head.append(f"# The run also had {section}.{name}={text}, which only the command line can say.")
    defaults = {"defaults": list(RUN_DEFAULTS)}
    return "\n".join(head) + "\n" + to_yaml_text(defaults | to_values(config))


def to_values(config: RunConfig) -> dict[str, object]:
    """Give the resolved config as plain values, without what only the command line sets; ConfigError: a secret."""
    values: dict[str, Any] = plain(config)
    refuse_secrets(values, "")
    for source in values["data"]["sources"].values():
        # As it came to be, so that the key can still be overridden where these values are composed again.
        source["epochs"] = None if source["epochs"] == config.train.epochs else source["epochs"]
    for section, name in _RUNS_CODE:
        if getattr(getattr(config, section), name):
            del values[section][name]
    return values
