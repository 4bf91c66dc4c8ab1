"""A table of the keys in which the configs of several runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hfdist.config.composition.diff import find_changes
from hfdist.tools.report.drawing.chart import colour
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped

_OWN = ("run.name", "run.dir")
"""Keys that each run has for itself."""
_PRESETS = "defaults"
"""Hydra's list of presets: the keys that they set are compared."""
_MOST_KEYS = 80


def differences(runs: Sequence[RunFiles]) -> str:
    """Give a table as HTML: a row for each key that is not the same in all runs, a column for each run."""
    configs = {number: run.config for number, run in enumerate(runs) if run.config is not None}
    unreadable = ", ".join(run.name for run in runs if run.config is None)
    note = f"<p>No config can be read of: {escaped(unreadable)}.</p>" if unreadable else ""
    if len(configs) < 2:
        return f"<h2>Config</h2>{note}" if note else ""
    table = _compare([{key: one for key, one in config.items() if key != _PRESETS} for config in configs.values()])
    if not table:
        return f"<h2>Config</h2><p>The runs have the same config.</p>{note}"
    heads = "".join(f'<th><i class="{colour(one)}"></i>{escaped(runs[one].name, 40)}</th>' for one in configs)
    rows = "".join(
        f"<tr><th>{escaped(key, 80)}</th>{''.join(f'<td>{escaped(_show(value), 120)}</td>' for value in values)}</tr>"
        for key, values in list(table.items())[:_MOST_KEYS]
    )
    note += f"<p>{len(table) - _MOST_KEYS} more keys differ.</p>" if len(table) > _MOST_KEYS else ""
    return (
        f'<h2>What differs</h2><div class="scroll"><table class="words"><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _compare(configs: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """Give the values of all configs, in their order, by the keys that differ."""
    first, *others = configs
    table: dict[str, list[object]] = {}
    for place, other in enumerate(others, 1):
        for change in find_changes(first, other):
            if change.key not in _OWN:
                table.setdefault(change.key, [change.before] * len(configs))[place] = change.after
    return table


def _show(value: object) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
