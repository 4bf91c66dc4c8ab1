"""Hints for values that a key does not take: what to write in their place."""

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
# The losses called aot sort the answers of a batch, and the layout decides which answers are in one batch.
_SIGMOID_FOR = "task.loss=sigmoid, which is DPO's own: {} would depend on the layout"
_OTHER_LOSSES = {
    "bnpo": "task.loss=grpo: its mean is over the tokens of the global batch, bnpo's over those of a micro batch",
    "cpo": "task=cpo task.loss=sigmoid",
    "aot": _SIGMOID_FOR.format("aot"),
    "aot_unpaired": _SIGMOID_FOR.format("aot_unpaired"),
}
"""Losses of TRL that hfdist does not have, and what to write in their place."""


def hint_for_value(key: str, value: object, allowed: str) -> str | None:
    """Give what was probably meant by a value that its key does not take; None: nothing is known.

    `allowed` is what the key takes, in words.
    """
    return (
        _hint_for_launch(key, str(value))
        or _hint_for_loss(key, str(value))
        or _hint_for_file(key, value)
        or (f"'{key}=[{value}]'" if allowed.startswith("a list") else None)
        or _hint_for_number(key, value, allowed)
        or _hint_of_other_trainer(key, value)
        or _hint_for_rewards(key, value)
        or nearest(str(value), _words_of(allowed), key + "={}")
    )


def _hint_for_launch(key: str, text: str) -> str | None:
    """Say how a number of processes, or an option of the group, is given; None: the key is another one."""
    if key != "launch":
        return None
    if text.isdecimal() or text == AUTO:
        return f"launch.processes={text}"
    if text in list_options(shipped_folder(), key):
        return f"accelerate launch --config_file conf/launch/{text}.yaml recipes/pretrain.py"
    return None


def _hint_for_loss(key: str, text: str) -> str | None:
    """Give the loss that is like one of TRL's; None: the key is another one, or the loss is not known."""
    if key != "task.loss":
        return None
    if text.startswith("kto"):
        return "task.loss=sigmoid for pairs; one answer a row, with its label, is another task: kto"
    return _OTHER_LOSSES.get(text)


def _hint_for_file(key: str, value: object) -> str | None:
    """Say how a file, a folder of a run or a list of sources is given; None: the value is none of these."""
    if key == "strategy.deepspeed" and str(value).endswith((".yaml", ".yml")):
        return "a file of JSON, whose name ends in .json"
    if key == "run" and is_run_folder(str(value)):
        return f"--config {value}/config.yaml has the config of that run"
    if key == "data.sources" and isinstance(value, list):
        return f"`{in_yaml('data.sources.files.path', 'PATH')}`: each source has a name"
    return None


def _hint_for_number(key: str, value: object, allowed: str) -> str | None:
    """Write a number as the key takes it: a share, a whole number, or one without a unit; None: it is none of these."""
    if key == "optimizer.warmup_steps" and isinstance(value, float) and 0 < value < 1:
        return f"{key}=0 optimizer.warmup_fraction={value}"
    if isinstance(value, float) and value.is_integer() and "whole number" in allowed:
        return f"{key}={int(value)}"
    if key == "model.dtype" and str(value) in ("fp16", "half", "16"):
        # Weights stay in float32, and only the arithmetic is in float16.
        return f"{key}=float32 train.precision=fp16"
    number = read_quantity(key, str(value))
    return None if number is None else f"{key}={number}"


def _hint_of_other_trainer(key: str, value: object) -> str | None:
    """Translate a value as another trainer calls it; None: it is not known."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    called = VALUES.get(key, {}).get(text)
    return None if called is None else f"{key}={called}"


def _hint_for_rewards(key: str, value: object) -> str | None:
    """Give each reward a weight; None: the key is another one, or the value has no names."""
    if key != REWARDS or not isinstance(value, str | list):
        return None
    return weighted_rewards([value] if isinstance(value, str) else value)


def _words_of(allowed: str) -> list[str]:
    """Give the values in a text such as "auto, sdpa or varlen"; what has spaces is a description."""
    return [word for word in allowed.replace(" or ", ", ").split(", ") if " " not in word]


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
    weights: list[str] = []
    for name in names:
        words = re.findall(r"\w+", str(name).strip(" '\"").removesuffix(".py"))
        if words:
            # In `rewards.py:length` and `my_package.length` the function is the last word.
            weights.append(f"{words[-1]}: 1.0")
    return f"'{REWARDS}={{{', '.join(weights)}}}'"


def allowed_for(key: str) -> str | None:
    """Say what a key, or an entry `key[0]` of its list, takes; None: there is no such key."""
    known = find_key(key.partition("[")[0])
    return None if known is None else known.allowed
