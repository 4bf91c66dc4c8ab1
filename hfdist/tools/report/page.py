"""The page: parts with names, style and script inside one file that asks nobody for anything.

Its policy lets the browser load nothing and run only the one script, by its hash: a text of a run that escapes its
place cannot run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from itertools import accumulate
from pathlib import Path

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
_MAY_BE_LEFT_OUT = {
    "pipeline": ("Pipeline", "The recorded step", "timeline.json"),
    "rollouts": ("Answers and their rewards", "Answers", "rollouts.jsonl"),
    "samples": ("Samples", "Samples", "samples.jsonl"),
}
"""Parts of a page of one run that may be left out, in this order, by their ids: title, content and file."""
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
    of_sweeps = {f"sweep-{place}": sweep.sweep(folder) for place, folder in enumerate(sweeps)}
    heads = (run_head.head(run, colour=colour(number) if several else "") for number, run in enumerate(runs))
    found = (
        of_sweeps
        | {
            "heads": "".join(heads),
            "differences": compare.differences(runs) if several else "",
            "losses": _grid("large", curves.loss_charts(runs)),
            "curves": curves.small_charts(runs),
            "marks": curves.texts_of_marks(runs),
        }
        | ({"answers": rollouts.side_by_side(runs)} if several else {})
    )
    room = _MOST_BYTES - _num_bytes(found)
    shown, num_left_out = _fitting(figures.task_charts(runs), room)
    left_out = count(num_left_out, "more chart")
    note = f"A page of fewer runs has {left_out}." if several else f"metrics.jsonl has the figures of {left_out}."
    found["curves"] = _grid("small", shown + (f"<p>{note}</p>" if num_left_out else "") + found["curves"])
    for number, run in enumerate(runs):
        if several:
            found[f"run-{number}"] = _folded(run, number)
        else:
            found |= {name: part(run) for name, part in _PARTS.items()}
    _shorten(found, (_notes_of_runs(runs) if several else _notes_of_parts()) | _notes_of_sweeps(sweeps))
    return found


def page(runs: Sequence[RunFiles], html_of: dict[str, str], *, events: str | None = None) -> str:
    """Give the whole page.

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


def _fitting(charts: Sequence[str], room: int) -> tuple[str, int]:
    """Join the first charts that fit into `room` bytes, and give the number of the others."""
    sizes = accumulate(len(chart.encode()) for chart in charts)
    shown = [chart for chart, size in zip(charts, sizes, strict=True) if size <= room]
    return "".join(shown), len(charts) - len(shown)


def _shorten(html_of: dict[str, str], notes: Mapping[str, str]) -> None:
    """Put notes in the place of their parts, in order, until the page is small enough."""
    for name, note in notes.items():
        if html_of[name] and _num_bytes(html_of) > _MOST_BYTES:
            html_of[name] = note


def _notes_of_runs(runs: Sequence[RunFiles]) -> dict[str, str]:
    """Give notes in place of the parts about one run, the last run first, and then of the smaller charts."""
    notes = {
        f"run-{number}": f"<p>What else there is of {escaped(run.name)}, the report of that run alone has.</p>"
        for number, run in reversed([*enumerate(runs)])
    }
    fewer = "<p>A page of fewer runs has {}.</p>"
    return notes | {"answers": fewer.format("their answers"), "curves": fewer.format("more charts")}


def _notes_of_parts() -> dict[str, str]:
    return {
        name: f"<h2>{title}</h2><p>{what} would make this page too large: see {file}.</p>"
        for name, (title, what, file) in _MAY_BE_LEFT_OUT.items()
    }


def _notes_of_sweeps(sweeps: Sequence[Path]) -> dict[str, str]:
    """Give notes in place of all sweeps but the first, the last one first."""
    return {
        f"sweep-{place}": f"<h2>Sweep</h2><p>The report of {escaped(sweeps[place].name)} alone has its trials.</p>"
        for place in reversed(range(1, len(sweeps)))
    }


def _num_bytes(html_of: Mapping[str, str]) -> int:
    return sum(len(html.encode()) for html in html_of.values())


def _grid(size: str, drawn: str) -> str:
    return f'<div class="charts {size}">{drawn}</div>' if drawn else ""


def _folded(run: RunFiles, number: int) -> str:
    own = "".join((_grid("small", curves.own_charts(run)), *(part(run) for part in _PARTS.values())))
    title = f'<i class="{colour(number)}"></i>{escaped(run.name)}'
    return f'<details class="run" id="more-{number}"><summary>{title}</summary>{own}</details>'


@cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
