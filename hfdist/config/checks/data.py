"""What the sources, their weights and the rows taken out must satisfy together."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hfdist.config.checks.urls import check_address, scheme_of
from hfdist.config.data import (
    COLUMNS,
    TEMPLATES,
    ChatConfig,
    DataConfig,
    RowFormat,
    SourceConfig,
    SourceKind,
    WeightChange,
    are_columns,
)
from hfdist.config.paths import expand_user
from hfdist.errors import ConfigError, nearest

_OF_PYTHON = (SourceKind.stdlib, SourceKind.docstrings)
_PATHS = {
    SourceKind.files: ("a file, folder or glob, here or as a URL", "..."),
    SourceKind.hub: ("a dataset's Hub id or saved folder", "..."),
    SourceKind.tokens: ("the folder that recipes/pretokenize.py wrote", "runs/NAME/tokens"),
}
_NOT_FROM_CONFIG = (
    "messages", "tools", "add_generation_prompt", "conversations", "chat_template", "documents",
    "return_assistant_tokens_mask", "continue_final_message",
)  # fmt: skip
"""Variables of a chat template that the rows, or transformers, give."""


def check_data(data: DataConfig) -> None:
    """Check all of `data.*`; ConfigError: the first contradiction that is found."""
    for name, source in data.sources.items():
        check_source(f"data.sources.{name}", source)
    _check_mappings(data)
    check_mixture(data)
    _check_chat(data.chat)
    for entry in data.quarantine:
        _check_quarantined(entry, data.sources)


def check_mixture(data: DataConfig) -> None:
    """Check which sources there are, and how they are mixed; ConfigError: none, or a contradiction."""
    sources = data.sources
    if not sources:
        hint = (
            "data=stdlib (no download), data=files data.sources.files.path='texts/*.txt', "
            "or data=mixture '+data.sources.web={path: \"web/*.parquet\", weight: 1}' for each source"
        )
        raise ConfigError("there is nothing to read", where="data.sources", found="no source", hint=hint)
    without = [name for name, source in sources.items() if source.weight is None]
    weights = " ".join(f"data.sources.{name}.weight=1" for name in sources)
    if without and len(without) < len(sources):
        what, key = "some sources have a weight and some have none", f"data.sources.{without[0]}.weight"
        allowed = "a number > 0 for every source, or null for all (documents mixed as they are)"
        raise ConfigError(what, where=key, found="null", allowed=allowed, hint=f"{key}=1")
    limits = {name: source.epochs for name, source in sources.items()}
    if without and len(set(limits.values())) > 1:
        what = "sources without weights cannot end at different times"
        allowed = "one limit for all, or a weight for every source"
        found = ", ".join(f"{name}: {'null' if limit is None else limit}" for name, limit in limits.items())
        raise ConfigError(what, where="data.sources.*.epochs", found=found, allowed=allowed, hint=weights)
    if without and data.anneal:
        what, found = "weights change during the run, but there are none at its start", "data.sources.*.weight=null"
        allowed = "a weight for every source, or no change"
        raise ConfigError(what, where="data.anneal", found=found, allowed=allowed, hint=weights)
    last_step = 0
    for index, change in enumerate(data.anneal):
        if change.step <= last_step:
            what, allowed = "the changes of weights are not in order of their steps", f"a whole number > {last_step}"
            raise ConfigError(what, where=f"data.anneal.{index}.step", found=change.step, allowed=allowed)
        last_step = change.step
        _check_change(f"data.anneal.{index}.weights", change, sources)


def check_source(key: str, source: SourceConfig) -> None:
    """Check one source by itself, whose key is such as `data.sources.web`; ConfigError: the first contradiction."""
    if source.kind in _OF_PYTHON and source.path is not None:
        what = "the standard library's source is where Python is installed, so it takes no path"
        hint = f"{key}.kind=files to read that path"
        raise ConfigError(what, where=f"{key}.path", found=source.path, allowed="null", hint=hint)
    if source.kind not in _OF_PYTHON and not source.path:
        allowed, example = _PATHS[source.kind]
        hint = f"{key}.path={example}"
        raise ConfigError("the source has no path", where=f"{key}.path", found="null", allowed=allowed, hint=hint)
    if source.kind is SourceKind.files and source.path is not None and scheme_of(source.path) is not None:
        check_address(source.path, key=f"{key}.path")
    if source.index is not None and source.kind is not SourceKind.files:
        what, hint = "only files have an index", f"{key}.index=null"
        raise ConfigError(what, where=f"{key}.index", found=source.index, allowed="null", hint=hint)
    for name in ("subset", "revision"):
        value = getattr(source, name)
        if value is not None and source.kind is not SourceKind.hub:
            what, hint = f"only a dataset of the Hub has a {name}", f"{key}.kind=hub, or {key}.{name}=null"
            raise ConfigError(what, where=f"{key}.{name}", found=value, allowed="null", hint=hint)


def _check_mappings(data: DataConfig) -> None:
    """Check the columns that sources name, and those that `data.columns` names for the others."""
    for key, source in data.all_sources.items():
        _check_columns(f"{key}.columns", source.columns, {source.format or data.format})
    others = {source.format or data.format for source in data.all_sources.values() if not source.columns}
    _check_columns("data.columns", data.columns, others or {data.format})


def _check_columns(key: str, columns: Mapping[str, object], formats: set[RowFormat]) -> None:
    """Check a mapping of columns; ConfigError: a name is of none of the formats, or names no column."""
    names = [name for one in sorted(formats, key=lambda one: one.value) for name in COLUMNS[one]]
    for name, paths in columns.items():
        if name not in names:
            known = any(name in of_format for of_format in COLUMNS.values())
            what = f"no row of format {', '.join(sorted(one.value for one in formats))} has this column"
            value = f"[{','.join(map(str, paths))}]" if isinstance(paths, list) else paths
            hint = nearest(name, names, f"{key}.{{}}={value}", cutoff=0.0)
            if not known and all(path in names for path in columns.values()):
                # As datasets' rename_columns has it.
                pairs = ", ".join(f"{path}: {column}" for column, path in columns.items())
                hint = f"the other way round, '{key}={{{pairs}}}'"
            if known and formats == {RowFormat.text}:
                hint = "data.format=auto, as hfdist finetune has it"
            raise ConfigError(
                what, where=f"{key}.{name}", found=name, allowed=", ".join(dict.fromkeys(names)), hint=hint
            )
        if not are_columns(paths):
            what, allowed = "this names no column", "a column, or a list of columns"
            raise ConfigError(what, where=f"{key}.{name}", found=repr(paths), allowed=allowed)


def _check_chat(chat: ChatConfig) -> None:
    is_known = chat.template is None or chat.template in TEMPLATES
    if chat.template is not None and not is_known and not os.path.isfile(expand_user(chat.template)):
        what, where = "the chat template cannot be found", "data.chat.template"
        allowed = f"a file with a chat template in Jinja, or {', '.join(TEMPLATES)}; null: the tokenizer's own"
        hint = "data.chat.template=chatml"
        raise ConfigError(what, where=where, found=chat.template, allowed=allowed, hint=hint)
    for name in chat.template_arguments:
        if name in _NOT_FROM_CONFIG:
            what, where = "this variable of the template comes from the data", f"data.chat.template_arguments.{name}"
            raise ConfigError(what, where=where, allowed="any other name, such as enable_thinking")


def _check_change(key: str, change: WeightChange, sources: dict[str, SourceConfig]) -> None:
    for name, weight in change.weights.items():
        if name not in sources:
            raise _unknown_source(name, sources, where=key, template=f"{{}}: {weight:g}")
        # The comparison is false for NaN, too.
        if not 0 <= weight < float("inf"):
            raise ConfigError("a weight is out of range", where=f"{key}.{name}", found=weight, allowed="a number >= 0")
    missing = [name for name in sources if name not in change.weights]
    if missing:
        what, hint = "a change of weights must name every source", f"{missing[0]}: 0 pauses it"
        found = ", ".join(change.weights) or "none"
        raise ConfigError(what, where=key, found=found, allowed=", ".join(sources), hint=hint)
    if not any(change.weights.values()):
        raise ConfigError("every source is paused", where=key, found="0 for all", allowed="a sum > 0")


def _check_quarantined(entry: str, sources: dict[str, SourceConfig]) -> None:
    name, _, rest = entry.partition(":")
    # Names of files may hold colons.
    file, _, row = rest.rpartition(":")
    if not (name and file and row.isascii() and row.isdigit()):
        what, allowed = "this does not name a row", "SOURCE:FILE:ROW, the row counted from 0"
        hint = f"data.quarantine=[{next(iter(sources))}:part-0.parquet:17]"
        raise ConfigError(what, where="data.quarantine", found=entry, allowed=allowed, hint=hint)
    if name not in sources:
        raise _unknown_source(name, sources, where="data.quarantine", template=f"data.quarantine=[{{}}:{rest}]")


def _unknown_source(name: str, sources: dict[str, SourceConfig], *, where: str, template: str) -> ConfigError:
    what, allowed, hint = f"there is no source {name!r}", ", ".join(sources), nearest(name, sources, template)
    return ConfigError(what, where=where, found=name, allowed=allowed, hint=hint)
