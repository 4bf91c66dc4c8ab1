"""The part of the page about a sweep: its best trial, its notes, charts, and a table of its trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hfdist.records.trials import NOTES, SETTINGS, Trial, TrialLog, rank_trials
from hfdist.tools.report.reading.json_file import read_object
from hfdist.tools.report.sweep_charts import draw_by_value
from hfdist.tools.report.sweep_lines import draw_lines
from hfdist.tools.report.text import escaped, number
from hfdist.units import count, short

_MOST_NOTES, _MOST_DRAWN, _MOST_ROWS = 8, 300, 100
"""Most notes, most trials in a chart, and most trials in the table."""


def read_trials(folder: Path) -> list[Trial]:
    """Read the trials of a sweep, the best first; where trials have several lengths, the longest ones come first."""
    settings = read_object(folder / SETTINGS)
    sign = -1 if settings.get("direction") == "maximize" else 1
    has_lengths = settings.get("rungs", 1) != 1 or settings.get("sampler") == "pbt"
    trials = TrialLog(folder).trials
    for trial in trials:
        # The file may say anything: what is no finite number becomes none.
        trial.results = [
            replace(result, tokens=int(number(result.tokens) or 0), value=number(result.value))
            for result in trial.results
        ]
    return rank_trials(trials, sign=sign, has_lengths=has_lengths)


def sweep(folder: Path) -> str:
    """Give the part as HTML, or an empty text if the sweep has no trials."""
    trials, settings = read_trials(folder), read_object(folder / SETTINGS)
    if not trials:
        return ""
    metric = str(settings.get("metric", "metric"))
    num_failed = sum(bool(trial.failure) for trial in trials)
    words = f"{count(len(trials), 'trial')}, {num_failed} failed, {escaped(settings.get('sampler', ''))}"
    best, notes = _best(trials[0], metric), _notes(settings.get(NOTES))
    with_value = [trial for trial in trials if trial.value is not None][:_MOST_DRAWN]
    charts = ""
    if len(with_value) > 1:  # One trial alone is no comparison.
        charts = draw_by_value(with_value, metric) + draw_lines(with_value, metric)
    return f"<h2>Sweep <small>{words}</small></h2>{best}{notes}{charts}{_table(trials, metric)}"


def _best(trial: Trial, metric: str) -> str:
    if trial.value is None:
        return ""
    values = f"<code>{escaped(_overrides(trial))}</code>"
    return f"<p>Best: trial {trial.number}, {escaped(metric)} {short(trial.value)}: {values}</p>"


def _notes(notes: object) -> str:
    if not isinstance(notes, list) or not notes:
        return ""
    items = "".join(f"<li>{escaped(text, 500)}</li>" for text in notes[:_MOST_NOTES])
    return f'<ul class="findings">{items}</ul>'


def _overrides(trial: Trial) -> str:
    return " ".join(f"{key}={value}" for key, value in trial.values.items())


def _table(trials: Sequence[Trial], metric: str) -> str:
    """Give a table of the best trials; a column that says nothing in this sweep is left out."""
    has_rungs = any(len(trial.results) > 1 for trial in trials)
    has_parents = any(trial.parent is not None for trial in trials)
    rows = []
    for trial in trials[:_MOST_ROWS]:
        cells = {
            "trial": f"{trial.number}",
            metric: escaped(trial.failure or "", 60) if trial.value is None else short(trial.value),
            "tokens": short(trial.tokens),
        }
        if has_rungs:
            cells["rungs"] = f"{len(trial.results)}"
        if has_parents:
            cells["begins at"] = "" if trial.parent is None else f"trial {trial.parent}"
        cells["values"] = escaped(_overrides(trial))
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells.values())}</tr>")
    heads = "".join(f"<th>{escaped(title, 40)}</th>" for title in cells)
    body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table class="words">{body}</table></div>'
