"""What has changed in a config since a checkpoint, and whether it changes the training."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from hfdist.config.composition.compose import to_values
from hfdist.config.data import SourceConfig
from hfdist.config.optimizer import Schedule
from hfdist.config.run import RunConfig
from hfdist.config.schema import plain
from hfdist.config.strategy import Compression
from hfdist.errors import CheckpointError

# The layout is safe by design. Paths are, as the data's cursor compares the content of files. Rows are quarantined
# while a run goes on, and leave the others where they were.
_SAFE = """
run.* launch.* report.* export.* checkpoint.* evaluate.* watch.* cost.* strategy.* adapter.merge model.loss
model.attention islands.address islands.timeout_seconds train.max_hours train.max_cost train.max_kwh train.deadline
train.micro_batch_size train.eval_* train.max_skipped_steps train.max_rollbacks train.compare_replicas_every
train.compile train.gradient_checkpointing train.recompute train.activation_offload optimizer.fused data.sources.*.path
data.chat.template data.workers data.prefetch data.on_bad_rows data.quarantine data.eval_sources*
task.answer_seconds data.eval_sequences data.cache_dir data.file_cache_bytes data.token_cache_bytes
"""
_COMPRESSION = "strategy.compression"
LENGTHS = ("train.max_steps", "train.epochs")
_SCHEDULE = "optimizer.schedule"
_WARMUP = "optimizer.warmup_fraction"


class Change(NamedTuple):
    """One key, as it was and as it is."""

    key: str
    before: object
    after: object
    is_safe: bool
    """Whether the training goes on as it would have."""

    def __str__(self) -> str:
        return f"{self.key}: {_show(self.before)} -> {_show(self.after)}"


def find_changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[Change]:
    """Compare two configs, each as `compose.to_values` gives them; a key that one does not have counts as null.

    A key that `before` lacks, because the key is newer than that config, counts as its default.
    """
    old, new = dict(_leaves(before, "")), dict(_leaves(after, ""))
    old = _defaults(new, old) | old
    safe = {key for pattern in _SAFE.split() for key in fnmatch.filter(old | new, pattern)}
    if new.get(_COMPRESSION, Compression.none.name) != Compression.none.name:
        # It loses a part of the gradients; what goes on without it does not.
        safe -= {*fnmatch.filter(old | new, f"{_COMPRESSION}*")}
    is_constant = old.get(_SCHEDULE) == new.get(_SCHEDULE) == Schedule.constant.name
    if is_constant and not (old.get(_WARMUP) or new.get(_WARMUP)):
        # Under any other schedule the rate of every step depends on the length.
        safe.update(LENGTHS)
    # An empty mapping on one side is no change of its own where the other side has keys in it.
    sections = {key.rpartition(".")[0] for key in old | new}
    keys = [key for key in dict.fromkeys([*new, *old]) if key not in sections]
    return [Change(key, old.get(key), new.get(key), key in safe) for key in keys if old.get(key) != new.get(key)]


def check_changes(changes: list[Change], *, allowed: bool, where: str) -> None:
    """Raise a CheckpointError on changes since the checkpoint `where` that change the training, unless allowed."""
    unsafe = [change for change in changes if not change.is_safe]
    if unsafe and not allowed:
        raise CheckpointError(
            "the config has changed since the checkpoint, and with it the training",
            where=where,
            found=tuple(map(str, unsafe)),
            allowed="what leaves the training as it is: the layout, when to save, evaluate and report, where files lie",
            hint="the values of before; checkpoint.allow_changes=true to go on with the new ones, where no weight has "
            "another shape; or another run.name",
        )


def _defaults(keys: Iterable[str], old: Iterable[str]) -> dict[str, object]:
    """The defaults of the keys that have one, also of keys of sources, whose names are the user's."""
    sources = {".".join(key.split(".")[:3]) for key in old}
    known = dict(_leaves(to_values(RunConfig()), ""))
    of_source = dict(_leaves(plain(SourceConfig()), ""))
    for key in keys:
        section, _, leaf = key.rpartition(".")
        if section in sources and section.startswith("data.sources.") and leaf in of_source:
            known[key] = of_source[leaf]
    return {key: known[key] for key in keys if key in known}


def _leaves(value: object, key: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}".lstrip("."))
    else:
        yield key, value


def _show(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
