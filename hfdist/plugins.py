"""Entry points of installed packages, found by name: a config can name what is installed, and run nothing else."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import entry_points
from typing import Any

from hfdist.errors import ConfigError, named_line, nearest


def load_plugin(
    group: str, name: str, *, kind: str, expected: str, where: str, hint: str, built_in: Collection[str] = ()
) -> Any:
    """Import what an installed package offers under an entry point.

    Args:
        group: the group of entry points, as in a package's pyproject.toml: `[project.entry-points."GROUP"]`.
        name: the entry point's name.
        kind: what it is in messages, such as "metric".
        expected: what it must be, in messages.
        where: the config key.
        hint: the override that takes a name, with `{}` in its place.
        built_in: further names that are allowed.

    Raises:
        ConfigError: no package offers it, several do, it cannot be imported, or it cannot be called.
    """
    offered = list(entry_points(group=group))
    found = {entry.value: entry for entry in offered if entry.name == name}
    if not found:
        known = sorted({*built_in, *(entry.name for entry in offered)})
        move = nearest(name, known, hint) or f'an entry point "{group}" in a package of your own'
        what = f"no installed package offers this {kind}"
        raise ConfigError(what, where=where, found=name, allowed=", ".join(known) or None, hint=move)
    if len(found) > 1:
        what, values = f"several installed packages offer a {kind} of this name", ", ".join(sorted(found))
        raise ConfigError(what, where=where, found=f"{name}: {values}", hint="uninstall all but one")
    [entry] = found.values()
    try:
        plugin = entry.load()
    except Exception as error:  # whatever a package raises when it is imported
        what = f"the {kind} cannot be imported: {named_line(error)}"
        raise ConfigError(what, where=where, found=f"{entry.name} = {entry.value}") from error
    if not callable(plugin):
        what, words = f"the {kind} is no function", f"{entry.name} = {entry.value}, a {type(plugin).__name__}"
        raise ConfigError(what, where=where, found=words, allowed=expected)
    return plugin
