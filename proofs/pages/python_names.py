"""The table of docs/python.md: names for programs of users, with the first lines of what they say of themselves."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator

from hfdist.errors import HfdistError
from proofs.pages.shipped_tables import DOCS, put_between

_NAMES = {
    "hfdist": None,
    "hfdist.rewards": None,
    "hfdist.trainer.run_options": ("RunOptions",),
    "hfdist.config.composition.compose": ("compose_config",),
    "hfdist.run": ("prepare_run",),
    "hfdist.run.builder": ("Run",),
    "hfdist.run.pretokenize": ("pretokenize_share",),
    "hfdist.config.data": ("DataConfig", "SourceConfig"),
    "hfdist.data": ("open_corpus", "TokenStream"),
    "hfdist.testing": ("run_ranks",),
}
"""Modules with their names; None: all of `__all__`."""


def python() -> str:
    """The whole page, with its table as it should be."""
    return put_between((DOCS / "python.md").read_text(encoding="utf-8"), "names", _table())


def _table() -> Iterator[str]:
    yield "| name | what it is |"
    yield "|---|---|"
    shown: set[object] = set()
    for module, names in _NAMES.items():
        home = importlib.import_module(module)
        for name in names or home.__all__:
            thing = getattr(home, name)
            if thing not in shown and not isinstance(thing, str):
                shown.add(thing)
                yield f"| `{module}.{name}` | {_first_line(thing)} |"
    for kind in (HfdistError, *_kinds(HfdistError)):
        code = "" if kind is HfdistError else f" Exit code {kind.exit_code}."
        yield f"| `{kind.__module__}.{kind.__name__}` | {_first_line(kind)}{code} |"


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0].replace("|", "\\|")


def _kinds(kind: type[HfdistError]) -> Iterator[type[HfdistError]]:
    for one in kind.__subclasses__():
        if one.__module__ == HfdistError.__module__:
            yield one
            yield from _kinds(one)
