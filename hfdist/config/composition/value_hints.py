"""Values that a key does not take, and what to write in their place."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hfdist.config.composition.other_trainers import VALUES
from hfdist.config.composition.path_overrides import in_yaml
from hfdist.config.composition.quantities import read_quantity
from hfdist.config.conf_folder import list_options, shipped_folder
from hfdist.config.run import AUTO
from hfdist.config.schema import find_key
from hfdist.errors import nearest
from hfdist.records.run_folder import is_run_folder

REWARDS = "task.rewards"
# Those of aot sort the answers of a batch.
_OF_LAYOUT = "task.loss=sigmoid, which is DPO's own: {} would depend on the layout"
_OTHER_LOSSES = {
    "bnpo": "task.loss=grpo: its mean is over the tokens of the global batch, bnpo's over those of a micro batch",
    "cpo": "task=cpo task.loss=sigmoid",
    "aot": _OF_LAYOUT.format("aot"),
    "aot_unpaired": _OF_LAYOUT.format("aot_unpaired"),
}
"""Losses of TRL that are none here, and what to write in their place."""


def hint_for_value(key: str, value: object, allowed: str) -> str | None:
    """Give what was probably meant by a value that its key does not take; `allowed` is what it takes, in words."""
    if key == "launch" and (str(value).isdecimal() or value == AUTO):
        return f"launch.processes={value}"
    if key == "launch" and str(value) in list_options(shipped_folder(), key):
        return f"accelerate launch --config_file conf/launch/{value}.yaml recipes/pretrain.py"
    if key == "task.loss" and str(value).startswith("kto"):
        return "task.loss=sigmoid for pairs; one answer a row, with its label, is another task: kto"
    if key == "task.loss" and str(value) in _OTHER_LOSSES:
        return _OTHER_LOSSES[str(value)]
    if key == "strategy.deepspeed" and str(value).endswith((".yaml", ".yml")):
        return "a file of JSON, whose name ends in .json"
    if key == "run" and is_run_folder(str(value)):
        return f"--config {value}/config.yaml has the config of that run"
    if key == "data.sources" and isinstance(value, list):
        return f"`{in_yaml('data.sources.files.path', 'PATH')}`: each source has a name"
    if allowed.startswith("a list"):
        return f"'{key}=[{value}]'"
    if key == "optimizer.warmup_steps" and isinstance(value, float) and 0 < value < 1:
        return f"{key}=0 optimizer.warmup_fraction={value}"
    if isinstance(value, float) and value.is_integer() and "whole number" in allowed:
        return f"{key}={int(value)}"
    if key == "model.dtype" and str(value) in ("fp16", "half", "16"):
        return f"{key}=float32 train.precision=fp16"
    if (number := read_quantity(key, str(value))) is not None:
        return f"{key}={number}"
    called = VALUES.get(key, {}).get(str(value).lower() if isinstance(value, bool) else str(value))
    if called is not None:
        return f"{key}={called}"
    if key == REWARDS and isinstance(value, str | list):
        return weighted_rewards([value] if isinstance(value, str) else value)
    words = [word for word in allowed.replace(" or ", ", ").split(", ") if " " not in word]
    return nearest(str(value), words, key + "={}")


def hint_for_source(key: str, value: str) -> str | None:
    """Say how a source is given, where a path or one of its keys stands in its place; None: it is no source."""
    section, _, name = key.rpartition(".")
    if key == "data.eval_sources":
        return f"data.eval_fraction=0 {key}.val.path={value}"
    if section not in ("data.sources", "data.eval_sources"):
        return None
    source = "files" if section == "data.sources" else "val"
    if find_key(f"{section}.{source}.{name}") is None:
        return f"{key}.path={value}"
    return f"data={value}" if (source, name) == ("files", "path") else f"{section}.{source}.{name}={value}"


def weighted_rewards(names: Iterable[str]) -> str:
    """Give the override for rewards of these names; one that a file names is called as its function."""
    own = [re.findall(r"\w+", str(name).strip(" '\"").removesuffix(".py"))[-1:] for name in names]
    return f"'{REWARDS}={{{', '.join(f'{name}: 1.0' for last in own for name in last)}}}'"


def allowed_for(key: str) -> str | None:
    """Say what a key, or an entry `key[0]` of its list, takes; None: there is no such key."""
    known = find_key(key.partition("[")[0])
    return None if known is None else known.allowed
