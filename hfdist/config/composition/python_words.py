"""Messages for a reader who writes Python: keys of a config become arguments, and values become those of Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hfdist.errors import ConfigError

_OF_MAKE_STRATEGY = {
    **{f"train.{name}": name for name in ("global_batch_size", "micro_batch_size", "precision", "max_grad_norm")},
    "data.sequence_length": "sequence_length",
}
_OF_ARGUMENTS = {
    "optimizer.name": "optim",
    "optimizer.lr": "learning_rate",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.schedule": "lr_scheduler_type",
    "optimizer.warmup_steps": "warmup_steps",
    "train.max_steps": "max_steps",
    "train.compile": "torch_compile",
    "train.gradient_checkpointing": "gradient_checkpointing",
}
_OTHERS = {
    "model.attention": "attn_implementation",
    "model.dtype": "dtype",
    "adapter.targets": "target_modules",
    "adapter.type": "peft_config",
}
_VALUES = {"true": "True", "false": "False", "null": "None"}
_COMPILE = {"none": "False", "blocks": "False", "model": "True"}
_PHRASES = (
    (r"launch\.processes=1, and no launcher", "one process, without a launcher"),
    (r"launch\.processes=(\w+)", r"torchrun --nproc-per-node \1"),
    (r" \(checkpoint=none\)", ""),
    (r"strategy\.deepspeed\.(?=\w)", "deepspeed."),
    (r"train\.compile=none or model", "train.compile=none"),
    (r"train\.arguments\.(\w+)", r"args.\1"),
    (r"\bmodel\.name\b", "model"),
)
_KEY = re.compile(
    r"\b((?:strategy|train|data|optimizer|model|adapter)\.[a-z_]\w*)\b(?![.(\w])(?:=(\[[^]]*\]|[\w.-]*\w)?)?"
)


@contextmanager
def speaking_python() -> Iterator[None]:
    """Translate a ConfigError of the block for somebody who has no config."""
    try:
        yield
    except ConfigError as error:
        where = None if error.where is None else in_python(error.where)
        error.where = where if where == error.where or "(" in str(where) else f"make_strategy({where})"
        error.what = in_python(error.what)
        error.args = (error.what,)
        found = error.found
        error.found = in_python(found) if isinstance(found, str) else found
        error.allowed = None if error.allowed is None else in_python(error.allowed)
        error.hint = None if error.hint is None else in_python(error.hint)
        raise


def in_python(text: str) -> str:
    """Write keys and values in a text as Python has them."""
    text = re.sub(r"\bstrategy=(\w+)((?: strategy\.\w+=\w+)*)", _call, text)
    for pattern, by in _PHRASES:
        text = re.sub(pattern, by, text)
    text = re.sub(r"(=[^\s,()]+) (?=[a-z_]+=)", r"\1, ", _KEY.sub(_argument, text))
    return re.sub(r"\b(true|false|null)\b", lambda match: _VALUES[match[1]], text)


def _call(match: re.Match[str]) -> str:
    """Write a preset, and the degrees that stand beside it, as one call."""
    degrees = [f"{name}={_literal(name, value)}" for name, value in re.findall(r"strategy\.(\w+)=(\w+)", match[2])]
    arguments = ", ".join([f'"{match[1]}"', *degrees])
    return f"make_strategy({arguments})"


def _argument(match: re.Match[str]) -> str:
    key, value, has_value = match[1], match[2], "=" in match[0]
    name = _OF_MAKE_STRATEGY.get(key) or _OTHERS.get(key) or _OF_ARGUMENTS.get(key)
    if name is None and not key.startswith("strategy."):
        return match[0]
    name = name or key.partition(".")[2]
    said = f"{name}={_literal(name, value)}" if has_value else name
    if key not in _OF_ARGUMENTS:
        return said
    return f"TrainingArguments({said})" if has_value else f"args.{name}"


def _literal(name: str, value: str | None) -> str:
    if value is None:
        return ""
    if name == "torch_compile":
        return _COMPILE.get(value, value)
    if name == "optim" and value == "adamw":
        return '"adamw_torch"'
    is_text = re.fullmatch(r"[a-z_]\w*|\d+\w*[a-z]\w*", value) and value not in _VALUES
    return f'"{value}"' if is_text else value
