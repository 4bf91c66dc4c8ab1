"""The page as one file of HTML: its parts, and its style and script inside, so that a browser loads nothing else.

A policy in the page allows only this script, by its hash. A text of a run is never executed, even one that a mistake
lets through unescaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from hfdist.tools.report import compare, curves, figures, plan, rollouts, run_head, sections, sweep
from hfdist.tools.report.drawing.chart import colour
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped
from hfdist.units import count, list_first

_PARTS: dict[str, Callable[[RunFiles], str]] = {
    "plan": plan.plan,
    "ranks": sections.ranks,
    "pipeline": sections.pipeline,
    "traffic": sections.traffic,
    "checkpoints": sections.checkpoints,
    "events": sections.events,
    "data": sections.data,
    "samples": sections.samples,
    "rollouts": rollouts.rollouts,
    "details": sections.details,
}
"""Parts about one run by their ids, in the order of the page."""
_MOST_BYTES = 260_000
"""Most bytes of all parts together, so that the page with style and script stays below 300 KB."""


class _LargePart(NamedTuple):
    """A part that may be too large for the page, and the file of the run that has all of it."""

    title: str
    content: str
    file: str


_LARGE_PARTS = {
    "pipeline": _LargePart("Pipeline", "The recorded step", "timeline.json"),
    "rollouts": _LargePart("Answers and their rewards", "Answers", "rollouts.jsonl"),
    "samples": _LargePart("Samples", "Samples", "samples.jsonl"),
}
"""Parts of a page of one run by their ids, in the order in which they are left out until the page is small enough."""
_MARKS = (
    "<footer>Marks in the curves: R a resume, S a skipped step, B a rollback, A an alert, L a lost rank, $ a budget "
    "that is used up, E an end that is no good one. Of many points, the lowest and the highest of each stretch are "
    "drawn, and their mean.</footer>"
)


def parts(runs: Sequence[RunFiles], sweeps: Sequence[Path] = ()) -> dict[str, str]:
    """Give the HTML of each part of the page by its id, in the order of the page; a part may be empty.

    Args:
        runs: the runs that the page is about.
        sweeps: folders of the sweeps whose trials these runs are.
    """
    several = len(runs) > 1
    html_of = {f"sweep-{place}": sweep.sweep(folder) for place, folder in enumerate(sweeps)}
    heads = (run_head.head(run, colour=colour(number) if several else "") for number, run in enumerate(runs))
    html_of |= {
        "heads": "".join(heads),
        "differences": compare.differences(runs) if several else "",
        "losses": _grid("large", curves.loss_charts(runs)),
        "curves": curves.small_charts(runs),
        "marks": curves.texts_of_marks(runs),
    }
    if several:
        html_of["answers"] = rollouts.side_by_side(runs)
    # The charts of preferences and rewards, of which there may be many, get the room that is left by now.
    task_charts = _task_charts(runs, _MOST_BYTES - _num_bytes(html_of))
    html_of["curves"] = _grid("small", task_charts + html_of["curves"])
    if several:
        html_of |= {f"run-{number}": _folded(run, number) for number, run in enumerate(runs)}
        notes = _notes_of_runs(runs)
    else:
        html_of |= {name: part(run) for run in runs for name, part in _PARTS.items()}
        notes = _notes_of_parts()
    _shorten(html_of, notes | _notes_of_sweeps(sweeps))
    return html_of


def page(runs: Sequence[RunFiles], html_of: dict[str, str], *, events: str | None = None) -> str:
    """Give the whole page as HTML.

    Args:
        runs: the runs that the page is about.
        html_of: the result of `parts`.
        events: the address at which a served page hears of changes; None: the page stays as it is.
    """
    style, script = _asset("style.css"), _asset("script.js")
    hears = "'none'" if events is None else "'self'"
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        f"connect-src {hears}; base-uri 'none'; form-action 'none'"
    )
    names = list_first((run.name for run in runs), 4)
    body = "".join(f'<section id="{name}">{html}</section>' for name, html in html_of.items())
    live = "" if events is None else f' data-events="{escaped(events)}"'
    written = f"written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    note = written if events is None else '<span id="live">connecting</span>'
    several = ' class="several"' if len(runs) > 1 else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f'<title>{escaped(names)} - hfdist</title><link rel="icon" href="data:,"><style>{style}</style></head>'
        f"<body{live}{several}><h1>hfdist report <small>{note}</small></h1><main>{body}</main>{_MARKS}"
        f'<div id="tip" role="status" hidden></div><script>{script}</script></body></html>\n'
    )


def _task_charts(runs: Sequence[RunFiles], room: int) -> str:
    """Draw the first charts of preferences and rewards that fit into `room` bytes, and say how many are left out."""
    charts = figures.task_charts(runs)
    sizes_so_far = accumulate(len(chart.encode()) for chart in charts)
    shown = [chart for chart, size in zip(charts, sizes_so_far, strict=True) if size <= room]
    note = ""
    if len(shown) < len(charts):
        left_out = count(len(charts) - len(shown), "more chart")
        where = "A page of fewer runs has" if len(runs) > 1 else "metrics.jsonl has the figures of"
        note = f"<p>{where} {left_out}.</p>"
    return "".join(shown) + note


def _shorten(html_of: dict[str, str], notes: Mapping[str, str]) -> None:
    """Replace parts by their notes, in the order of the notes, until the page is small enough."""
    for name, note in notes.items():
        if html_of[name] and _num_bytes(html_of) > _MOST_BYTES:
            html_of[name] = note


def _notes_of_runs(runs: Sequence[RunFiles]) -> dict[str, str]:
    """Give the notes for parts of several runs by their ids: those about one run first, from the last run on."""
    notes = {
        f"run-{number}": f"<p>What else there is of {escaped(run.name)}, the report of that run alone has.</p>"
        for number, run in reversed([*enumerate(runs)])
    }
    fewer = "<p>A page of fewer runs has {}.</p>"
    return notes | {"answers": fewer.format("their answers"), "curves": fewer.format("more charts")}


def _notes_of_parts() -> dict[str, str]:
    """Give the notes for the large parts of one run by their ids."""
    return {
        name: f"<h2>{part.title}</h2><p>{part.content} would make this page too large: see {part.file}.</p>"
        for name, part in _LARGE_PARTS.items()
    }


def _notes_of_sweeps(sweeps: Sequence[Path]) -> dict[str, str]:
    """Give the notes for all sweeps but the first by the ids of their parts, from the last sweep on."""
    return {
        f"sweep-{place}": f"<h2>Sweep</h2><p>The report of {escaped(sweeps[place].name)} alone has its trials.</p>"
        for place in reversed(range(1, len(sweeps)))
    }


def _num_bytes(html_of: Mapping[str, str]) -> int:
    return sum(len(html.encode()) for html in html_of.values())


def _grid(size: str, drawn: str) -> str:
    return f'<div class="charts {size}">{drawn}</div>' if drawn else ""


def _folded(run: RunFiles, number: int) -> str:
    """Give all parts about one run as an element that a reader opens, for a page of several runs."""
    content = _grid("small", curves.own_charts(run)) + "".join(part(run) for part in _PARTS.values())
    title = f'<i class="{colour(number)}"></i>{escaped(run.name)}'
    return f'<details class="run" id="more-{number}"><summary>{title}</summary>{content}</details>'


@cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Give the hash of a style or a script as a policy of the page names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
