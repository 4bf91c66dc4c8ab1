"""What to write in place of a name, a value or an option of another trainer."""

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
_NOTHING = ("false", "none", "null", "no_shard")
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
    if text is not None and text.lower() in _NOTHING:
        template = OPPOSITES.get(template, template)
    key = template.removesuffix("={value}")
    if text is not None:
        text = VALUES.get(key, {}).get(text, text)
    if key == "checkpoint.resume" and (text is None or text.lower() == "true"):
        text = "auto"
    if text is not None and "[{value}]" in template:
        text = text.strip("[]")
    if text is not None and key != template:
        text = read_quantity(key, text) or text
    if template == HUB_DATA and text is not None and Path(text).suffix:
        template = "data={value}"
    return _fill(template, text)


def _without_template(template: str, name: str, value: str) -> str | None:
    """Give what stands for some values in place of the template; None: it is the template."""
    if template == _ZERO and value in STAGES:
        # As LLaMA-Factory has `stage: sft`.
        return f"hfdist {STAGES[value]}, in place of {name}={value}"
    if template == REWARDS and re.search(r"[:/]|\.py", value):
        return OWN_REWARD
    if template == HELD_OUT and re.fullmatch(r"0?\.\d+", value):
        return f"data.eval_fraction={value}"
    if template == BETAS:
        pair = re.findall(r"[\d.]+", value)
        return "optimizer.beta1={} optimizer.beta2={}".format(*(pair if len(pair) == 2 else ("0.9", "0.95")))
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
    # The first number is of minutes where there are neither days nor three.
    seconds = [60, 1] if days is None and len(given) < 3 else [3600, 60, 1]
    return f"{24 * int(days or 0) + sum(map(mul, given, seconds)) / 3600:.4g}"


def _fill(template: str, value: str | None) -> str:
    """Put a value in, quoted for a shell where it needs that."""
    if value is None or re.fullmatch(r"[\w./,:@%+=~\[\]-]+", value):
        return template.replace("{value}", value or "...")
    is_one_word = " " not in template and "'" not in template
    return shlex.quote(template.replace("{value}", value)) if is_one_word else template.replace("{value}", "...")


def reason_against(name: str) -> str | None:
    """Say why hfdist has no key for a name of another trainer, or what does it; None: not known."""
    return REASONS.get(name, REASONS.get(name.rpartition(".")[2]))


def override_for_option(group: str, option: str) -> str | None:
    """Give a ready override for an option of a group that others call so; None: not known."""
    if group == "optimizer" and option in OptimizerName.__members__:
        return f"optimizer.name={option}"
    return OPTIONS.get(group, {}).get(option.lower())
