"""Keys in which two configs differ, and whether that changes the training."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_values
from hfdist.config.composition.earlier import as_now
from hfdist.config.composition.files import refuse_references
from hfdist.config.data import SourceConfig
from hfdist.config.optimizer import Schedule
from hfdist.config.plain_values import plain
from hfdist.config.run import RunConfig
from hfdist.config.strategy import Compression
from hfdist.errors import CheckpointError, HfdistError
from hfdist.records.run_folder import RunFolder

_SAFE_KEYS = (
    # Where a run lies, what it says, saves and measures.
    "run.*", "report.*", "export.*", "checkpoint.*", "evaluate.*", "watch.*", "cost.*", "adapter.merge",
    "train.eval_*", "data.eval_sources*", "data.eval_sequences", "train.compare_replicas_every",
    # When it gives up.
    "train.max_hours", "train.max_cost", "train.max_kwh", "train.deadline", "train.max_skipped_steps",
    "train.max_rollbacks", "task.answer_seconds", "islands.timeout_seconds",
    # Other addresses of the same program. `task.server` is not here: another program draws other answers.
    "task.server_addresses", "task.server_key_variable", "task.generators_host", "islands.address", "islands.port",
    # The layout, and how a step is computed.
    "launch.*", "strategy.*", "model.loss", "model.attention", "optimizer.fused", "train.micro_batch_size",
    "train.compile", "train.gradient_checkpointing", "train.recompute", "train.activation_offload",
    "task.teacher_sharding", "islands.server_shards",
    # Where the data lie. The data's cursor compares the content of files, and what becomes of images.
    "data.sources.*.path", "data.sources.*.index", "data.shard", "data.chat.template", "data.cache_dir",
    "data.images.*",
    # How the data are read ahead.
    "data.file_cache_bytes", "data.token_cache_bytes", "data.workers", "data.prefetch",
    # Rows that are left out while a run goes on: the others stay where they were.
    "data.quarantine", "data.on_bad_rows",
)  # fmt: skip
"""Patterns of keys that leave the training as it is, whatever their values; `find_changes` has the exceptions."""
LENGTHS = ("train.max_steps", "train.epochs")
"""Keys of the length, which the rate of each step depends on under most schedules."""
_COMPRESSION = "strategy.compression"
_SCHEDULE = "optimizer.schedule"
_PORT = "task.generators_port"
_WARMUP = "optimizer.warmup_fraction"
_SOURCES = ("data.sources", "data.eval_sources")


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
    """Compare two configs, each as `config_text.to_values` gives them.

    A key that one of them lacks, as a config from before there was the key does, counts as its default; else as null.
    """
    old, new = dict(_leaves(before, "")), dict(_leaves(after, ""))
    keys = [*dict.fromkeys([*new, *old])]
    old, new = (_defaults(keys, values) | as_now(values) for values in (old, new))
    safe = {key for pattern in _SAFE_KEYS for key in fnmatch.filter(keys, pattern)}
    if new.get(_COMPRESSION, Compression.none.name) != Compression.none.name:
        # It loses a part of the gradients; what goes on without it does not.
        safe -= {*fnmatch.filter(keys, f"{_COMPRESSION}*")}
    is_constant = old.get(_SCHEDULE) == new.get(_SCHEDULE) == Schedule.constant.name
    if is_constant and not (old.get(_WARMUP) or new.get(_WARMUP)):
        safe.update(LENGTHS)
    if all(values.get("task.generators") or values.get(_PORT) for values in (old, new)):
        # Generators answer before and after: the port says only where others may join.
        safe.add(_PORT)
    # An empty mapping on one side is no change of its own where the other side has keys in it, at any depth.
    sections = {key[:dot] for key in keys for dot, letter in enumerate(key) if letter == "."}
    changed = [key for key in keys if key not in sections and old.get(key) != new.get(key)]
    return [Change(key, old.get(key), new.get(key), key in safe) for key in changed]


def changes_since(folder: RunFolder, values: Mapping[str, object]) -> list[Change] | None:
    """Compare a config, as `config_text.to_values` gives it, with that in a run's folder; None: that cannot be read."""
    try:
        refuse_references(folder.config)
        before = to_values(compose_config(name=folder.config.stem, extra_dir=folder.path))
    except (HfdistError, OSError):
        return None
    return find_changes(before, values)


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


def _defaults(keys: Iterable[str], config: Iterable[str]) -> dict[str, object]:
    """Give the defaults of those keys that have one; a key of a source has one if `config` has keys of this source."""
    sources = {".".join(key.split(".")[:3]) for key in config}
    known = dict(_leaves(to_values(RunConfig()), ""))
    source_defaults = dict(_leaves(plain(SourceConfig()), ""))
    for key in keys:
        source, _, leaf = key.rpartition(".")
        if source in sources and source.rpartition(".")[0] in _SOURCES and leaf in source_defaults:
            known[key] = source_defaults[leaf]
    return {key: known[key] for key in keys if key in known}


def _leaves(value: object, key: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _show(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
