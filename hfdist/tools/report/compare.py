"""In what the configs of several runs differ, and how their figures do."""

from __future__ import annotations

from collections.abc import Sequence

from hfdist.config.composition.diff import find_changes
from hfdist.tools.report.drawing.chart import colour
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped

_OWN = ("run.name", "run.dir")
"""Keys that each run has for itself."""
_MOST_KEYS = 80


def differences(runs: Sequence[RunFiles]) -> str:
    """Give a table: a row a key that is not the same in all runs, a column a run."""
    found = [(number, run, _read(run)) for number, run in enumerate(runs)]
    known = [(number, run, values) for number, run, values in found if values is not None]
    missing = [run.name for _, run, values in found if values is None]
    note = f"<p>No config can be read of: {escaped(', '.join(missing))}.</p>" if missing else ""
    if len(known) < 2:
        return f"<h2>Config</h2>{note}" if note else ""
    table: dict[str, list[object]] = {}
    base = known[0][2]
    for place, (_, _, values) in enumerate(known[1:], 1):
        for change in find_changes(base, values):
            if change.key not in _OWN:
                row = table.setdefault(change.key, [change.before] * len(known))
                row[place] = change.after
    if not table:
        return f"<h2>Config</h2><p>The runs have the same config.</p>{note}"
    heads = "".join(f'<th><i class="{colour(n)}"></i>{escaped(run.name, 40)}</th>' for n, run, _ in known)
    rows = "".join(
        f"<tr><th>{escaped(key, 80)}</th>{''.join(f'<td>{escaped(_show(value), 120)}</td>' for value in values)}</tr>"
        for key, values in list(table.items())[:_MOST_KEYS]
    )
    note += f"<p>{len(table) - _MOST_KEYS} more keys differ.</p>" if len(table) > _MOST_KEYS else ""
    return (
        f'<h2>What differs</h2><div class="scroll"><table class="words"><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _read(run: RunFiles) -> dict[str, object] | None:
    return None if run.config is None else {key: value for key, value in run.config.items() if key != "defaults"}


def _show(value: object) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
