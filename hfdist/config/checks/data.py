"""What the sources, their weights and the rows taken out must satisfy together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from hfdist.config.checks.urls import check_address, scheme_of
from hfdist.config.data import ChatConfig, DataConfig, SourceConfig, SourceKind, WeightChange
from hfdist.errors import ConfigError

_OF_PYTHON = (SourceKind.stdlib, SourceKind.docstrings)
_PATHS = {
    SourceKind.files: ("a file, folder or glob, here or as a URL", "..."),
    SourceKind.hub: ("a dataset's Hub id or saved folder", "..."),
    SourceKind.tokens: ("the folder that recipes/pretokenize.py wrote", "runs/NAME/tokens"),
}


def check_data(data: DataConfig) -> None:
    """Check all of `data.*`.

    Raises:
        ConfigError: the first contradiction that is found.
    """
    for name, source in data.sources.items():
        check_source(f"data.sources.{name}", source)
    check_mixture(data)
    _check_chat(data.chat)
    for entry in data.quarantine:
        _check_quarantined(entry, data.sources)


def check_mixture(data: DataConfig) -> None:
    """Check which sources there are, and how they are mixed.

    Raises:
        ConfigError: there are none, or weights or limits that do not go together.
    """
    if not data.sources:
        raise ConfigError(
            "there is nothing to read",
            where="data.sources",
            found="no source",
            hint="data=stdlib (no download), data=files data.sources.files.path='texts/*.txt', "
            "or data=mixture '+data.sources.web={path: \"web/*.parquet\", weight: 1}' for each source",
        )
    _check_weights(data.sources)
    _check_epochs(data.sources)
    _check_anneal(data)


def check_source(key: str, source: SourceConfig) -> None:
    """Check one source by itself.

    Args:
        key: of the source, such as `data.sources.web`.
        source: its values.

    Raises:
        ConfigError: the first contradiction that is found.
    """
    if source.kind in _OF_PYTHON and source.path is not None:
        raise ConfigError(
            "the standard library's source is where Python is installed, so it takes no path",
            where=f"{key}.path",
            found=source.path,
            allowed="null",
            hint=f"{key}.kind=files to read that path",
        )
    if source.kind not in _OF_PYTHON and not source.path:
        allowed, example = _PATHS[source.kind]
        raise ConfigError(
            "the source has no path", where=f"{key}.path", found="null", allowed=allowed, hint=f"{key}.path={example}"
        )
    if source.kind is SourceKind.files and source.path is not None and scheme_of(source.path) is not None:
        check_address(source.path, key=f"{key}.path")
    for name in ("subset", "revision"):
        value = getattr(source, name)
        if value is not None and source.kind is not SourceKind.hub:
            raise ConfigError(
                f"only a dataset of the Hub has a {name}",
                where=f"{key}.{name}",
                found=value,
                allowed="null",
                hint=f"{key}.kind=hub, or {key}.{name}=null",
            )


def _check_chat(chat: ChatConfig) -> None:
    if chat.template is not None and not Path(chat.template).expanduser().is_file():
        raise ConfigError(
            "the chat template cannot be found",
            where="data.chat.template",
            found=chat.template,
            allowed="a file with a chat template in Jinja; null: the tokenizer's own",
        )
    ours = {"messages", "tools", "add_generation_prompt", "conversations", "chat_template"}
    ours |= {"return_assistant_tokens_mask", "continue_final_message", "documents"}
    for name in chat.template_arguments:
        if name in ours:
            raise ConfigError(
                "this variable of the template comes from the data",
                where=f"data.chat.template_arguments.{name}",
                allowed="any other name, such as enable_thinking",
            )


def _check_weights(sources: dict[str, SourceConfig]) -> None:
    without = [name for name, source in sources.items() if source.weight is None]
    if without and len(without) < len(sources):
        raise ConfigError(
            "some sources have a weight and some have none",
            where=f"data.sources.{without[0]}.weight",
            found="null",
            allowed="a number > 0 for every source, or null for all (documents mixed as they are)",
            hint=f"data.sources.{without[0]}.weight=1",
        )


def _check_epochs(sources: dict[str, SourceConfig]) -> None:
    limits = {name: source.epochs for name, source in sources.items()}
    if len(set(limits.values())) > 1 and any(source.weight is None for source in sources.values()):
        raise ConfigError(
            "sources that are mixed as they are cannot end at different times",
            where="data.sources.*.epochs",
            found=", ".join(f"{name}: {'null' if limit is None else limit}" for name, limit in limits.items()),
            allowed="one limit for all, or a weight for every source",
            hint=" ".join(f"data.sources.{name}.weight=1" for name in sources),
        )


def _check_anneal(data: DataConfig) -> None:
    if data.anneal and any(source.weight is None for source in data.sources.values()):
        raise ConfigError(
            "weights change during the run, but there are none at its start",
            where="data.anneal",
            found="data.sources.*.weight=null",
            allowed="a weight for every source, or no change",
            hint=" ".join(f"data.sources.{name}.weight=1" for name in data.sources),
        )
    last_step = 0
    for index, change in enumerate(data.anneal):
        if change.step <= last_step:
            raise ConfigError(
                "the changes of weights are not in order of their steps",
                where=f"data.anneal[{index}].step",
                found=change.step,
                allowed=f"a whole number > {last_step}",
            )
        last_step = change.step
        _check_change(f"data.anneal[{index}].weights", change, data.sources)


def _check_change(key: str, change: WeightChange, sources: dict[str, SourceConfig]) -> None:
    for name, weight in change.weights.items():
        if name not in sources:
            raise _unknown_source(name, sources, where=key, hint=f"{{near}}: {weight:g}")
        # Also false for NaN.
        if not 0 <= weight < float("inf"):
            raise ConfigError("a weight is out of range", where=f"{key}.{name}", found=weight, allowed="a number >= 0")
    missing = [name for name in sources if name not in change.weights]
    if missing:
        raise ConfigError(
            "a change of weights must name every source",
            where=key,
            found=", ".join(change.weights) or "none",
            allowed=", ".join(sources),
            hint=f"{missing[0]}: 0 pauses it",
        )
    if not any(change.weights.values()):
        raise ConfigError("every source is paused", where=key, found="0 for all", allowed="a sum > 0")


def _check_quarantined(entry: str, sources: dict[str, SourceConfig]) -> None:
    name, _, rest = entry.partition(":")
    # Names of files may hold colons.
    file, _, row = rest.rpartition(":")
    if not (name and file and row.isascii() and row.isdigit()):
        raise ConfigError(
            "this does not name a row",
            where="data.quarantine",
            found=entry,
            allowed="SOURCE:FILE:ROW, the row counted from 0",
            hint=f"data.quarantine=[{next(iter(sources))}:part-0.parquet:17]",
        )
    if name not in sources:
        raise _unknown_source(name, sources, where="data.quarantine", hint=f"data.quarantine=[{{near}}:{rest}]")


def _unknown_source(name: str, sources: Iterable[str], *, where: str, hint: str) -> ConfigError:
    near = difflib.get_close_matches(name, sources, n=1, cutoff=0.5)
    return ConfigError(
        f"there is no source {name!r}",
        where=where,
        found=name,
        allowed=", ".join(sources),
        hint=hint.replace("{near}", near[0]) if near else None,
    )
