"""The parts of the page about one run: a function a part, which gives HTML, or an empty text if there is nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hfdist.records import Event
from hfdist.tools.report import event_words, rank_words
from hfdist.tools.report.drawing import rank_map, schedule
from hfdist.tools.report.event_words import describe_layout, events_of
from hfdist.tools.report.reading.rank_steps import WAIT
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped, escaped_lines, instant, number, wide_table
from hfdist.tools.report.time_line import time_line
from hfdist.units import count, duration, list_first, share, short, size

_MOST_SAVES, _MOST_AXES, _MOST_POOLS, _MOST_SAMPLES = 12, 12, 32, 8
"""Most rows of the tables of saves, axes and pools, and most samples that are seen at once."""
_LONGEST_SAMPLE = 800
"""Characters of a sample's prompt, and of its text."""


class _PlannedTraffic(NamedTuple):
    """What a plan says of a rank's traffic in a step, by axis of the mesh."""

    sent_bytes: dict[str, float]
    exposed_shares: dict[str, float]
    """Share of the step in which computing does not hide the traffic; empty: the plan does not say it."""


def stall_share(run: RunFiles) -> float:
    """Give the share of the training's time in which it stands still for saves, from 0 to 1."""
    stalls = sum(number(event.get("stall_seconds")) or 0.0 for event in events_of(run, Event.save))
    trained = run.metrics.seconds[-1] if run.metrics.seconds else 0.0
    return stalls / (stalls + trained) if trained > 0 else 0.0


def ranks(run: RunFiles) -> str:
    """Give times and memory by rank, as a table and a map."""
    parts = rank_words.table(run) + rank_map.draw(run.ranks.stretches, rank_words.rank_names(run))
    return f"<h2>Ranks</h2>{parts}" if parts else ""


def pipeline(run: RunFiles) -> str:
    """Give a picture of the measured schedule of a pipeline."""
    drawn = schedule.draw(run.spans)
    return f"<h2>Pipeline</h2>{drawn}" if drawn else ""


def traffic(run: RunFiles) -> str:
    """Give the traffic of a rank in a step, by axis of the mesh, beside the planned traffic."""
    counted = None if run.record is None else run.record.traffic
    axes = counted.get("axes") if isinstance(counted, dict) else None
    if not isinstance(counted, dict) or not isinstance(axes, dict):
        return ""
    planned = _planned_traffic(run.plan)
    rows = []
    for axis, sent in list(axes.items())[:_MOST_AXES]:
        if isinstance(sent, dict) and number(sent.get("sent_bytes")) is not None:
            rows.append((axis, _traffic_cells(axis, sent, planned)))
    if not rows:
        return ""
    waits = rank_words.share_of_step(run, WAIT)
    words = f"Counted in step {number(counted.get('step')) or 0.0:,.0f}, for the rank that sends most, as a ring sends."
    if waits:
        exposed = planned.exposed_shares
        beside = f"; planned: {share(sum(exposed.values()))}" if exposed else ""
        words += f" The mean rank waits for others in {share(waits)} of a step{beside}."
    titles = ("sent in a step", "planned", "calls", "of which", "planned share of the step")
    return f"<h2>Traffic</h2><p>{words}</p>{wide_table(titles, rows)}"


def _traffic_cells(axis: str, sent: Mapping[str, object], planned: _PlannedTraffic) -> list[str]:
    """Give an axis's bytes, planned bytes, calls, largest kinds of calls and planned share of the step."""
    kinds = sent.get("kinds")
    known = [(number(num_bytes) or 0.0, kind) for kind, num_bytes in kinds.items()] if isinstance(kinds, dict) else []
    largest = sorted(((num_bytes, kind) for num_bytes, kind in known if num_bytes), key=lambda one: -one[0])[:3]
    return [
        size(number(sent.get("sent_bytes")) or 0.0),
        size(planned.sent_bytes[axis]) if axis in planned.sent_bytes else "",
        f"{number(sent.get('calls')) or 0.0:,.0f}",
        ", ".join(f"{escaped(kind, 20)} {size(num_bytes)}" for num_bytes, kind in largest),
        share(planned.exposed_shares[axis]) if axis in planned.exposed_shares else "",
    ]


def _planned_traffic(plan: Mapping[str, object]) -> _PlannedTraffic:
    sent_bytes: dict[str, float] = {}
    listed, time = plan.get("traffic"), plan.get("time")
    for item in listed if isinstance(listed, list) else []:
        num_bytes = number(item.get("sent_bytes")) if isinstance(item, dict) else None
        if num_bytes is not None:
            axis = str(item.get("axis"))
            sent_bytes[axis] = sent_bytes.get(axis, 0.0) + num_bytes
    if not isinstance(time, dict) or not isinstance(time.get("exposed"), dict):
        return _PlannedTraffic(sent_bytes, {})
    exposed = {str(axis): number(seconds) or 0.0 for axis, seconds in time["exposed"].items()}
    step = (number(time.get("compute")) or 0.0) + (number(time.get("bubble")) or 0.0) + sum(exposed.values())
    shares = {axis: seconds / step for axis, seconds in exposed.items()} if step > 0 else {}
    return _PlannedTraffic(sent_bytes, shares)


def checkpoints(run: RunFiles) -> str:
    """Give times and sizes of saves, in words and as a table of the last ones."""
    saves = events_of(run, Event.save)
    if not saves:
        return ""
    seconds = [number(event.get("seconds")) or 0.0 for event in saves]
    stall = sum(number(event.get("stall_seconds")) or 0.0 for event in saves)
    words = (
        f"{count(len(saves), 'save')}, {duration(sum(seconds) / len(saves))} each, the longest "
        f"{duration(max(seconds))}. Training stood still for {duration(stall)} in all, "
        f"{share(stall_share(run))} of its time."
    )
    columns = (("step", "{:,.0f}".format), ("bytes", size), ("seconds", duration), ("stall_seconds", duration))
    rows = ""
    for event in reversed(saves[-_MOST_SAVES:]):
        cells = [show(number(event.get(key)) or 0.0) for key, show in columns]
        rows += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    titles = "".join(f"<th>{word}</th>" for word in ("step", "size", "time", "stood still"))
    more = f"<p>The last {_MOST_SAVES}.</p>" if len(saves) > _MOST_SAVES else ""
    table = f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<h2>Checkpoints</h2><p>{words}</p>{table}{more}"


def events(run: RunFiles) -> str:
    """Give the events, as a time line and in words."""
    if not run.events:
        return ""
    return f"<h2>Events</h2>{time_line(run)}{event_words.table(run)}"


def data(run: RunFiles) -> str:
    """Give what was read of each pool of documents up to the last save."""
    if not run.metrics.shares:
        return ""
    rows = []
    for name, pool in list(run.metrics.shares.items())[:_MOST_POOLS]:
        share_of_sequences = pool.get("share", 0.0)
        percent = 100 * min(max(share_of_sequences, 0.0), 1.0)
        fill = f'<rect class="fill c0" width="{percent:.1f}%" height="10"/>'
        cells = [
            share(share_of_sequences),
            short(pool.get("tokens", 0.0)),
            f"{pool.get('epochs', 0.0):.2f}",
            share(pool.get("filled", 0.0)),
            f'<svg class="bar" height="10" aria-hidden="true">{fill}</svg>',
        ]
        rows.append((name, cells))
    return f"<h2>Data</h2>{wide_table(('sequences', 'tokens', 'epochs', 'filled', ''), rows)}"


def samples(run: RunFiles) -> str:
    """Give the newest sample of each prompt, and below them some earlier samples."""
    if not run.samples:
        return ""
    newest = {repr(line.get("prompt")): line for line in run.samples}
    last = list(newest.values())[-_MOST_SAMPLES:]
    shown = "".join(map(_sample, last))
    others = [line for line in run.samples if line not in last]
    earlier = "".join(map(_sample, reversed(others[-_MOST_SAMPLES:])))
    if earlier:
        earlier = f'<details id="earlier"><summary>earlier ones</summary>{earlier}</details>'
    return f"<h2>Samples</h2>{shown}{earlier}"


def _sample(line: Mapping[str, object]) -> str:
    step = number(line.get("step"))
    place = "" if step is None else f"step {step:,.0f}"
    prompt, text = (escaped_lines(line.get(key) or "", _LONGEST_SAMPLE) for key in ("prompt", "text"))
    return f"<blockquote><small>{place}</small><pre><b>{prompt}</b>{text}</pre></blockquote>"


def details(run: RunFiles) -> str:
    """Give folder, layout, hosts, times and versions."""
    record = run.record
    if record is None:
        return ""
    rows = [("folder", str(run.folder))]
    if isinstance(record.layout, dict):
        rows.append(("layout", describe_layout(record.layout)))
    rows.append(("ranks", str(record.processes)))
    if isinstance(record.hosts, list) and record.hosts:
        rows.append(("hosts", list_first(dict.fromkeys(map(str, record.hosts)), 16)))
    began, last = instant(record.started), instant(record.updated)
    if began is not None and last is not None:
        rows.append(("this start", f"{began:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC, number {record.start}"))
    if isinstance(record.versions, dict):
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())))
    items = "".join(f"<div><dt>{name}</dt><dd>{escaped(value, 600)}</dd></div>" for name, value in rows)
    return f'<h2>Run</h2><dl class="details">{items}</dl>'
