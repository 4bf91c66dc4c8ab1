"""Overrides of hfdist in place of names, values and options of other trainers, whose tables are other_trainers.py."""

from __future__ import annotations

import re
import shlex
from operator import mul
from pathlib import Path

from hfdist.config.composition.other_trainers import (
    BETAS,
    HELD_OUT,
    HUB_DATA,
    OPPOSITES,
    OPTIONS,
    OVERRIDES,
    OWN_REWARD,
    REASONS,
    REWARDS,
    STAGES,
    VALUES,
)
from hfdist.config.composition.quantities import read_quantity
from hfdist.config.optimizer import OptimizerName

_MOST_MINUTES = 10_000
"""A larger number is a time in seconds."""
_SWITCHED_OFF = ("false", "none", "null", "no_shard")
"""Values, in small letters, that switch off what their name is for."""
_ZERO = "strategy=zero{value}"


def override_for(name: str, value: object = None) -> str | None:
    """Give a ready override for a name of another trainer, from its last part; None: not known."""
    name = name.replace(".arguments.", ".")
    template = OVERRIDES.get(name, OVERRIDES.get(name.rpartition(".")[2]))
    if template is None:
        return None
    ready = _without_template(template, name, str(value))
    if ready is not None:
        return ready
    text = _value_text(template, value)
    if text is not None and text.lower() in _SWITCHED_OFF:
        template = OPPOSITES.get(template, template)
    text = _translate_value(template, text)
    if template == HUB_DATA and text is not None and Path(text).suffix:
        # A name with a suffix is a file, and none of the Hub.
        template = "data={value}"
    return _fill(template, text)


def _translate_value(template: str, text: str | None) -> str | None:
    """Write a value as hfdist's key takes it: by its own name, without a unit; None: there is no value.

    The template is `KEY={value}`, or a whole override in which the value has no place or another one.
    """
    key = template.removesuffix("={value}")
    if text is not None:
        text = VALUES.get(key, {}).get(text, text)
    if key == "checkpoint.resume" and (text is None or text.lower() == "true"):
        return "auto"
    if text is None:
        return None
    if "[{value}]" in template:
        text = text.strip("[]")
    has_key_alone = key != template
    return (read_quantity(key, text) or text) if has_key_alone else text


def _without_template(template: str, name: str, value: str) -> str | None:
    """Give the override or the sentence for a value that a template cannot take; None: the template takes it."""
    if template == _ZERO and value in STAGES:
        # LLaMA-Factory has `stage: sft`.
        return f"hfdist {STAGES[value]}, in place of {name}={value}"
    if template == REWARDS and re.search(r"[:/]|\.py", value):
        return OWN_REWARD
    if template == HELD_OUT and re.fullmatch(r"0?\.\d+", value):
        return f"data.eval_fraction={value}"
    if template == BETAS:
        numbers = re.findall(r"[\d.]+", value)
        # Values that cannot be read become hfdist's own defaults.
        beta1, beta2 = numbers if len(numbers) == 2 else ("0.9", "0.95")
        return f"optimizer.beta1={beta1} optimizer.beta2={beta2}"
    return None


def _value_text(template: str, value: object) -> str | None:
    """Write a value as an override has it; None: there is none that fits."""
    if template == "cluster.hours={value}":
        return _hours(str(value))
    if value is None or isinstance(value, dict) or (template == _ZERO and not str(value).isdecimal()):
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        # Other trainers write whole numbers so: `num_train_epochs: 3.0`.
        return str(int(value))
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _hours(text: str) -> str | None:
    """Give the hours of a time as SLURM has it; None: it is none.

    M, M:S, H:M:S, D-H, D-H:M and D-H:M:S are days, hours, minutes and seconds. YAML reads H:M:S as seconds.
    """
    time = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text)
    if time is None:
        return None
    days, *numbers = time.groups()
    given = [int(number) for number in numbers if number is not None]
    if days is None and len(given) == 1 and given[0] > _MOST_MINUTES:
        return f"{given[0] / 3600:.4g}"
    # M and M:S begin with minutes, all other forms with hours.
    begins_with_minutes = days is None and len(given) < 3
    seconds = [60, 1] if begins_with_minutes else [3600, 60, 1]
    hours = sum(map(mul, given, seconds)) / 3600
    return f"{24 * int(days or 0) + hours:.4g}"


def _fill(template: str, value: str | None) -> str:
    """Put a value into a template, quoted for a shell where it needs that; `...` stands for one that cannot be."""
    if value is None:
        return template.replace("{value}", "...")
    filled = template.replace("{value}", value)
    if re.fullmatch(r"[\w./,:@%+=~\[\]-]+", value):
        return filled
    # Quotes around several overrides would make them one, and quotes within quotes end them.
    can_be_quoted = " " not in template and "'" not in template
    return shlex.quote(filled) if can_be_quoted else template.replace("{value}", "...")


def reason_against(name: str) -> str | None:
    """Say why hfdist has no key for a name of another trainer, or what does it; None: not known."""
    return REASONS.get(name, REASONS.get(name.rpartition(".")[2]))


def override_for_option(group: str, option: str) -> str | None:
    """Give a ready override for an option of a group that others call so; None: not known."""
    if group == "optimizer" and option in OptimizerName.__members__:
        return f"optimizer.name={option}"
    return OPTIONS.get(group, {}).get(option.lower())
