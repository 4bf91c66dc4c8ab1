"""The parts of a report about one run: each function makes HTML of the run's files, or an empty text."""

from __future__ import annotations

from collections.abc import Mapping

from hfdist.records import Event
from hfdist.tools.report import event_words, rank_words
from hfdist.tools.report.drawing import rank_map, schedule
from hfdist.tools.report.event_words import describe_layout, events_of
from hfdist.tools.report.reading.rank_steps import WAIT
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import escaped, escaped_lines, instant, number, wide_table
from hfdist.tools.report.time_line import time_line
from hfdist.units import count, duration, list_first, share, short, size

_MOST_SAVES = 12
_MOST_AXES = 12
_MOST_SAMPLES = 8
_LONGEST_SAMPLE = 800


def stall_share(run: RunFiles) -> float:
    """Give the share of the training's time in which it stands still for saves, from 0 to 1."""
    stalls = sum(number(event.get("stall_seconds")) or 0.0 for event in events_of(run, Event.save))
    trained = run.metrics.seconds[-1] if run.metrics.seconds else 0.0
    return stalls / (stalls + trained) if trained > 0 else 0.0


def ranks(run: RunFiles) -> str:
    """Give times and memory by rank."""
    parts = rank_words.table(run) + rank_map.draw(run.ranks.stretches, rank_words.rank_names(run))
    return f"<h2>Ranks</h2>{parts}" if parts else ""


def pipeline(run: RunFiles) -> str:
    """Give the measured schedule of a pipeline."""
    drawn = schedule.draw(run.spans)
    return f"<h2>Pipeline</h2>{drawn}" if drawn else ""


def traffic(run: RunFiles) -> str:
    """Give the traffic of a rank in a step, by axis of the mesh, beside the plan's."""
    counted = None if run.record is None else run.record.traffic
    axes = counted.get("axes") if isinstance(counted, dict) else None
    if not isinstance(counted, dict) or not isinstance(axes, dict):
        return ""
    planned, exposed = _planned_traffic(run.plan)
    rows = []
    for axis, found in [*axes.items()][:_MOST_AXES]:
        sent = number(found.get("sent_bytes")) if isinstance(found, dict) else None
        if sent is None:
            continue
        kinds, calls = found.get("kinds"), number(found.get("calls")) or 0.0
        shares = {name: value for name, of in kinds.items() if (value := number(of))} if isinstance(kinds, dict) else {}
        most = sorted(shares.items(), key=lambda item: -item[1])[:3]
        cells = [size(sent), size(planned[axis]) if axis in planned else "", f"{calls:,.0f}"]
        cells += [", ".join(f"{escaped(name, 20)} {size(value)}" for name, value in most)]
        rows.append((axis, [*cells, share(exposed[axis]) if axis in exposed else ""]))
    if not rows:
        return ""
    waits = rank_words.share_of_step(run, WAIT)
    words = f"Counted in step {number(counted.get('step')) or 0.0:,.0f}, for the rank that sends most, as a ring sends."
    if waits:
        theory = f"; planned: {share(sum(exposed.values()))}" if exposed else ""
        words += f" The mean rank waits for others in {share(waits)} of a step{theory}."
    titles = ("sent in a step", "planned", "calls", "of which", "planned share of the step")
    return f"<h2>Traffic</h2><p>{words}</p>{wide_table(titles, rows)}"


def _planned_traffic(plan: Mapping[str, object]) -> tuple[dict[str, float], dict[str, float]]:
    """Give the planned bytes by axis, and the share of the step in which nothing hides them."""
    planned: dict[str, float] = {}
    listed, time = plan.get("traffic"), plan.get("time")
    for one in listed if isinstance(listed, list) else []:
        sent = number(one.get("sent_bytes")) if isinstance(one, dict) else None
        if sent is not None:
            planned[str(one.get("axis"))] = planned.get(str(one.get("axis")), 0.0) + sent
    if not isinstance(time, dict) or not isinstance(time.get("exposed"), dict):
        return planned, {}
    exposed = {str(axis): number(seconds) or 0.0 for axis, seconds in time["exposed"].items()}
    step = (number(time.get("compute")) or 0.0) + (number(time.get("bubble")) or 0.0) + sum(exposed.values())
    return planned, {axis: seconds / step for axis, seconds in exposed.items()} if step > 0 else {}


def checkpoints(run: RunFiles) -> str:
    """Give times and sizes of saves."""
    saves = events_of(run, Event.save)
    if not saves:
        return ""
    totals = {key: [number(e.get(key)) or 0.0 for e in saves] for key in ("seconds", "stall_seconds", "bytes")}
    words = (
        f"{count(len(saves), 'save')}, {duration(sum(totals['seconds']) / len(saves))} each, the longest "
        f"{duration(max(totals['seconds']))}. Training stood still for {duration(sum(totals['stall_seconds']))} in "
        f"all, {share(stall_share(run))} of its time."
    )
    columns = (("step", "{:,.0f}".format), ("bytes", size), ("seconds", duration), ("stall_seconds", duration))
    rows = "".join(
        f"<tr>{''.join(f'<td>{show(number(event.get(key)) or 0.0)}</td>' for key, show in columns)}</tr>"
        for event in saves[: -_MOST_SAVES - 1 : -1]
    )
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
    """Give the share of each pool of documents that was read, at the last save."""
    rows = []
    for name, pool in list(run.metrics.shares.items())[:32]:
        of_all = pool.get("share", 0.0)
        fill = f'<rect class="fill c0" width="{100 * min(max(of_all, 0.0), 1.0):.1f}%" height="10"/>'
        cells = [share(of_all), short(pool.get("tokens", 0.0)), f"{pool.get('epochs', 0.0):.2f}"]
        cells += [share(pool.get("filled", 0.0)), f'<svg class="bar" height="10" aria-hidden="true">{fill}</svg>']
        rows.append((name, cells))
    drawn = wide_table(("sequences", "tokens", "epochs", "filled", ""), rows)
    return f"<h2>Data</h2>{drawn}" if rows else ""


def samples(run: RunFiles) -> str:
    """Give the newest text of each prompt, and after them some earlier ones."""
    newest: dict[str, Mapping[str, object]] = {}
    for line in run.samples:
        newest[repr(line.get("prompt"))] = line
    last = list(newest.values())[-_MOST_SAMPLES:]
    earlier = [line for line in run.samples if line not in last][: -_MOST_SAMPLES - 1 : -1]
    if not last:
        return ""
    shown = "".join(map(_sample, last))
    more = (
        f'<details id="earlier"><summary>earlier ones</summary>{"".join(map(_sample, earlier))}</details>'
        if earlier
        else ""
    )
    return f"<h2>Samples</h2>{shown}{more}"


def _sample(line: Mapping[str, object]) -> str:
    step = number(line.get("step"))
    place = "" if step is None else f"step {step:,.0f}"
    prompt, text = (escaped_lines(line.get(key) or "", _LONGEST_SAMPLE) for key in ("prompt", "text"))
    return f"<blockquote><small>{place}</small><pre><b>{prompt}</b>{text}</pre></blockquote>"


def details(run: RunFiles) -> str:
    """Give layout, hosts and versions."""
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
