"""A table of the keys in which the configs of several runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hfdist.config.composition.diff import find_changes
from hfdist.tools.report.drawing.chart import colour
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped

_KEYS_OF_A_RUN = ("run.name", "run.dir")
"""Keys that differ between any two runs, and are not compared."""
_PRESETS = "defaults"
"""Hydra's list of presets. It is not compared, as the keys that presets set are."""
_MOST_KEYS = 80
"""Most keys in the table."""


def differences(runs: Sequence[RunFiles]) -> str:
    """Give a table as HTML, with a row for each key that is not the same in all runs, and a column for each run."""
    readable = [number for number, run in enumerate(runs) if run.config is not None]
    unreadable = ", ".join(run.name for run in runs if run.config is None)
    note = f"<p>No config can be read of: {escaped(unreadable)}.</p>" if unreadable else ""
    if len(readable) < 2:
        return f"<h2>Config</h2>{note}" if note else ""
    values_of_keys = _compare([runs[number].config or {} for number in readable])
    if not values_of_keys:
        return f"<h2>Config</h2><p>The runs have the same config.</p>{note}"
    heads = "".join(f'<th><i class="{colour(number)}"></i>{escaped(runs[number].name, 40)}</th>' for number in readable)
    rows = "".join(_row(key, values) for key, values in list(values_of_keys.items())[:_MOST_KEYS])
    if len(values_of_keys) > _MOST_KEYS:
        note += f"<p>{len(values_of_keys) - _MOST_KEYS} more keys differ.</p>"
    return (
        f'<h2>What differs</h2><div class="scroll"><table class="words"><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _compare(configs: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """Give the values of all configs, in their order, by each key that differs between the first and another one."""
    first, *others = ({key: value for key, value in config.items() if key != _PRESETS} for config in configs)
    values_of_keys: dict[str, list[object]] = {}
    for place, other in enumerate(others, 1):
        for change in find_changes(first, other):
            if change.key not in _KEYS_OF_A_RUN:
                # A config in which the key does not change has the first one's value.
                values = values_of_keys.setdefault(change.key, [change.before] * len(configs))
                values[place] = change.after
    return values_of_keys


def _row(key: str, values: Sequence[object]) -> str:
    cells = "".join(f"<td>{escaped(_show(value), 120)}</td>" for value in values)
    return f"<tr><th>{escaped(key, 80)}</th>{cells}</tr>"


def _show(value: object) -> str:
    """Write a value as in YAML, and a missing one as `-`."""
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
