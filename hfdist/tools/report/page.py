"""The page: parts with names, style and script inside one file that asks nobody for anything.

Its policy lets the browser load nothing and run only the one script, by its hash: should a text of a run escape from
its place after all, it does nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from itertools import accumulate
from pathlib import Path

from hfdist.tools.report import compare, curves, figures, sections
from hfdist.tools.report.drawing.chart import colour
from hfdist.tools.report.plan import plan
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.rollouts import rollouts
from hfdist.tools.report.text import escaped
from hfdist.units import count

_PARTS = (
    plan,
    sections.ranks,
    sections.pipeline,
    sections.traffic,
    sections.checkpoints,
    sections.events,
    sections.data,
    sections.samples,
    rollouts,
    sections.details,
)
_MOST_CHARACTERS = 260_000
"""Most characters of all parts together, so that the page with style and script stays below 300 KB."""
_MARKS = (
    "<footer>Marks in the curves: R a resume, S a skipped step, B a rollback, A an alert, L a lost rank, $ a budget "
    "that is used up, E an end that is no good one. Of many points, the lowest and the highest of each stretch are "
    "drawn, and their mean.</footer>"
)


def parts(runs: Sequence[RunFiles]) -> dict[str, str]:
    """Give the HTML of each part of the page by its id; a part that has nothing to say is empty."""
    several = len(runs) > 1
    heads = (sections.head(run, colour=colour(number) if several else "") for number, run in enumerate(runs))
    found = {
        "heads": "".join(heads),
        "differences": compare.differences(runs) if several else "",
        "losses": _grid("large", curves.loss_charts(runs)),
        "curves": curves.small_charts(runs),
        "marks": curves.texts_of_marks(runs),
    }
    room = _MOST_CHARACTERS - sum(map(len, found.values()))
    found["curves"] = _grid("small", _fitting(figures.task_charts(runs), room) + found["curves"])
    for number, run in enumerate(runs):
        if several:
            found[f"run-{number}"] = _folded(run, number)
        else:
            found |= {part.__name__: part(run) for part in _PARTS}
    if several:
        _shorten(found, runs)
    return found


def page(runs: Sequence[RunFiles], html_of: dict[str, str], *, events: str | None = None) -> str:
    """Give the whole page.

    Args:
        runs: that it is about.
        html_of: as `parts` gives it.
        events: where a page that is served hears of changes; None: it stays as it is.
    """
    style, script = _asset("style.css"), _asset("script.js")
    hears = "'none'" if events is None else "'self'"
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        f"connect-src {hears}; base-uri 'none'; form-action 'none'"
    )
    names = ", ".join(run.name for run in runs[:4]) + (" ..." if len(runs) > 4 else "")
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


def _fitting(charts: Sequence[str], room: int) -> str:
    """Give the first charts, as many as have so many characters at the most."""
    sizes = accumulate(map(len, charts))
    shown = [chart for chart, size in zip(charts, sizes, strict=True) if size <= room]
    left_out = f"<p>A page of fewer runs has {count(len(charts) - len(shown), 'more chart')}.</p>"
    return "".join(shown) + (left_out if shown != [*charts] else "")


def _shorten(html_of: dict[str, str], runs: Sequence[RunFiles]) -> None:
    """Leave out what is of one run alone, of the last runs first, until the page is small enough."""
    for number in reversed(range(len(runs))):
        if sum(map(len, html_of.values())) > _MOST_CHARACTERS:
            note = f"<p>What else there is of {escaped(runs[number].name)}, the report of that run alone has.</p>"
            html_of[f"run-{number}"] = note


def _grid(size: str, drawn: str) -> str:
    return f'<div class="charts {size}">{drawn}</div>' if drawn else ""


def _folded(run: RunFiles, number: int) -> str:
    own = "".join((_grid("small", curves.own_charts(run)), *(part(run) for part in _PARTS)))
    title = f'<i class="{colour(number)}"></i>{escaped(run.name)}'
    return f'<details class="run" id="more-{number}"><summary>{title}</summary>{own}</details>'


@cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
