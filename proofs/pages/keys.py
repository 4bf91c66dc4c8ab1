"""The pages of docs/ that are made from the code: `python -m proofs.pages.keys` writes all, or those that it is given.

All keys are made from the dataclasses, other trainers' names from the table of synonyms.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hfdist.config.composition.compose import compose_untyped, make_request
from hfdist.config.composition.other_trainers import OVERRIDES, REASONS
from hfdist.config.conf_folder import list_groups, list_options, shipped_folder
from hfdist.config.data import SourceConfig
from hfdist.config.plain_values import plain
from hfdist.config.schema import ANY_NAME, Key, all_keys, members
from proofs.pages.objectives import objectives
from proofs.pages.python_names import python
from proofs.pages.shipped_tables import getting_started, words_of

HEAD = """\
# All keys

```
hfdist pretrain --help
```

The help shows the same lines with the values of your run. Set a key as `key=value`, for example `train.max_steps=200`.
*Default* is the value of `hfdist pretrain`; where that of `hfdist finetune` differs, it stands after a semicolon.
`make docs` writes this page from the dataclasses in `hfdist/config/`.
"""
SOURCE = f"data.sources.{ANY_NAME}"
HELD_OUT = f"data.eval_sources.{ANY_NAME}"


def page() -> str:
    """The whole page."""
    values = [_values(name) for name in ("pretrain", "finetune")]
    return "\n".join([HEAD, *(line for section in members("") for line in _section(section, values))])


NAMES_HEAD = """\
# Coming from Trainer, TRL, axolotl, LLaMA-Factory, torchrun

```
hfdist pretrain --help
```

A name of another trainer is a mistake here, and the message says what to write. These are all the names that hfdist
knows; `VALUE` is the value that you gave. `make docs` writes this page from
`hfdist/config/composition/other_trainers.py`.

| name | here |
|---|---|
"""


def names_page() -> str:
    """The page of names that other trainers have."""
    by_answer: dict[str, list[str]] = {}
    for name, override in OVERRIDES.items():
        by_answer.setdefault(f"`{override.replace('{value}', 'VALUE')}`", []).append(name)
    for name, reason in REASONS.items():
        by_answer.setdefault(reason.replace("|", "\\|"), []).append(name)
    rows = (f"| {', '.join(f'`{name}`' for name in names)} | {answer} |" for answer, names in by_answer.items())
    return NAMES_HEAD + "\n".join(rows) + "\n"


def _values(primary: str) -> dict[str, Any]:
    request = make_request(primary, [], None)
    return typing.cast(dict[str, Any], OmegaConf.to_container(compose_untyped(request), enum_to_str=True))


def _section(section: str, values: list[dict[str, Any]]) -> Iterator[str]:
    yield f"## {section}\n"
    words = words_of(section)
    yield f"{words[0].upper()}{words[1:]}\n"
    folder = shipped_folder()
    if section in list_groups(folder):
        options = ", ".join(f"`{section}={option}`" for option in list_options(folder, section))
        yield f"Options: {options}.\n"
    yield "| key | default | values | what it is |"
    yield "|---|---|---|---|"
    for key in all_keys().values():
        if not key.name.startswith(f"{section}.") or key.name.startswith(f"{HELD_OUT}."):
            continue
        if key.name == HELD_OUT:
            what = all_keys()[HELD_OUT.rpartition(".")[0]].words
            yield f"| `{_shown(key)}.*` | | as `{_shown(all_keys()[SOURCE])}.*` | {what} |"
        elif not members(key.name) and key.name != SOURCE:
            words = key.words or ""
            # A sentence with bars lists the values, with words on each.
            allowed = "" if " | " in words else _escaped(key.allowed)
            yield f"| `{_shown(key)}` | {_default(key, values)} | {allowed} | {_escaped(words)} |"
    yield ""


def _shown(key: Key) -> str:
    return key.name.replace(ANY_NAME, "NAME")


def _default(key: Key, values: list[dict[str, Any]]) -> str:
    if key.name.startswith(f"{SOURCE}."):
        return _code(plain(getattr(SourceConfig(), key.leaf)))
    pretrain, finetune = (_code(_find(of_recipe, key.name)) for of_recipe in values)
    return pretrain if pretrain == finetune else f"{pretrain}; {finetune}"


def _find(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values[part]
    return values


def _code(value: Any) -> str:
    if isinstance(value, dict) and value:
        return "of the option"
    if isinstance(value, float):
        return f"`{value:g}`"
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    if isinstance(value, str) and value.strip() != value:
        return f'`"{value}"`'
    return f"`[{', '.join(value)}]`" if isinstance(value, list) else f"`{value}`"


def _escaped(words: str) -> str:
    for character in "|*<[]":
        words = words.replace(character, f"\\{character}")
    return words


PAGES: Mapping[str, Callable[[], str]] = {
    "keys.md": page,
    "coming-from.md": names_page,
    "getting-started.md": getting_started,
    "python.md": python,
    "objectives.md": objectives,
}
"""Pages of docs/, or pages with tables, that are made from the code."""

if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or [f"docs/{name}" for name in PAGES]):
        path.write_text(PAGES[path.name](), encoding="utf-8")
