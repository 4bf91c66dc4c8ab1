"""The parts of a report about one run: each function makes HTML of the run's files, or an empty text."""

from __future__ import annotations

from collections.abc import Mapping

from hfdist.records import Event, RunFolder, State
from hfdist.tools.report import history, rank_words
from hfdist.tools.report.drawing import rank_map, schedule
from hfdist.tools.report.history import describe_layout, events_of
from hfdist.tools.report.reading.rank_steps import PARTS
from hfdist.tools.report.reading.run_files import HELD_OUT, LOSS, RunFiles
from hfdist.tools.report.text import escaped, escaped_lines, instant, number, wide_table
from hfdist.units import count, duration, energy, mass, money, share, short, size

_SILENT_SECONDS = 180.0
_MOST_SAVES = 12
_MOST_AXES = 12
_MOST_SAMPLES = 8
_LONGEST_SAMPLE = 800
_STALL_SHARE = 0.05
_DATA_SHARE = 0.1
_LEAST_FILLED = 0.95
_RISE, _FALL = 0.02, 0.1
"""A held-out loss that is by such a share above the lowest has risen; a reward that is below the highest, fallen."""


def state(run: RunFiles) -> tuple[str, str]:
    """Give the class of a run's state, and the state in words."""
    record = run.record
    if record is None:
        return "unknown", "run.json cannot be read" if RunFolder(run.folder).record.exists() else "no run.json"
    words = record.state.value
    if record.state is State.running:
        updated = instant(record.updated)
        silent = 0.0 if updated is None else (run.read_at - updated).total_seconds()
        if silent > _SILENT_SECONDS:
            return "bad", f"silent for {duration(silent)}"
        return "running", words
    code = "" if record.exit_code is None else f", exit code {escaped(record.exit_code)}"
    return ("good" if record.state in (State.finished, State.stopped) else "bad"), f"{words}{code}"


def figures(run: RunFiles) -> list[tuple[str, str]]:
    """Give the first figures of a run, each with its name; escaped."""
    found: list[tuple[str, str]] = []
    record = run.record
    step = run.steps[-1] if run.steps else None
    if record is not None:
        done, most = number(record.step), number(record.max_steps)
        step = done or step
        if step is not None:
            found.append(("step", f"{step:,.0f}" + (f" <small>of {most:,.0f}</small>" if most else "")))
        tokens = number(record.tokens) or (run.tokens[-1] if run.tokens else 0.0)
        # The part `data` counts tokens without padding.
        is_padded = any(pool.get("filled", 1.0) < _LEAST_FILLED for pool in run.shares.values())
        found.append(("tokens", short(tokens) + (" <small>with padding</small>" if is_padded else "")))
    elif step is not None:
        found.append(("step", f"{step:,.0f}"))
    found += [(name, value) for name, value in _losses(run)]
    for key, name, form in (("tokens_per_second", "tokens a second", short), ("mfu", "MFU", share)):
        recent = [value for _, value in run.curve(key)[-50:] if value is not None]
        if recent:
            found.append((name, form(sum(recent) / len(recent))))
    if record is not None:
        found.append(("duration", duration(number(record.total("seconds")) or 0.0)))
        if record.state is State.running and (left := _seconds_left(run)) is not None:
            found.append(("left", f"about {duration(left)}"))
    return found + _energy(run)


def _losses(run: RunFiles) -> list[tuple[str, str]]:
    if run.task.traits.is_reinforcement:
        curves = {"reward": run.figures.get("reward", []), "held-out reward": run.held_out_figures.get("reward", [])}
    else:
        curves = {"loss": run.curve(LOSS), "held-out loss": run.held_out.get(HELD_OUT, [])}
    known = {name: [value for _, value in points if value is not None] for name, points in curves.items()}
    found = [(name, f"{values[-1]:.4g}") for name, values in known.items() if values]
    for key in ("accuracies", "rewards/accuracies"):
        right = [value for _, value in run.held_out_figures.get(key, []) if value is not None]
        found += [("held-out accuracy", share(right[-1]))] if right else []
    return found


def _seconds_left(run: RunFiles) -> float | None:
    most = None if run.record is None else number(run.record.max_steps)
    recent = [value for _, value in run.curve("step_seconds")[-50:] if value is not None]
    if most is None or not recent or not run.steps:
        return None
    return max(most - run.steps[-1], 0.0) * sum(recent) / len(recent)


def _energy(run: RunFiles) -> list[tuple[str, str]]:
    """Give energy, emissions and cost of all starts, where they are known."""
    record, found = run.record, []
    if record is None:
        return []
    source = escaped(record.energy_source or "", 40)
    note = f" <small>{'an estimate' if source == 'estimate' else source}</small>"
    kwh, grams, cost = (number(record.total(key)) for key in ("energy_kwh", "gco2e", "cost"))
    found += [] if kwh is None else [("energy", f"{energy(kwh)}{note}")]
    found += [] if grams is None else [("emissions", f"{mass(grams)} CO2e")]
    found += [] if cost is None else [("cost", money(cost, "").rstrip())]
    return found


def head(run: RunFiles, *, colour: str = "") -> str:
    """Give name, state, error and first figures of a run."""
    kind, words = state(run)
    error = (
        "" if run.record is None or not run.record.error else f'<p class="error">{escaped(run.record.error, 600)}</p>'
    )
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures(run))
    dot = f'<i class="{colour}"></i>' if colour else ""
    return (
        f'<article class="head"><h2>{dot}{escaped(run.name)} <span class="state {kind}">{words}</span></h2>{error}'
        f'<dl class="figures">{items}</dl>{findings(run)}</article>'
    )


def findings(run: RunFiles) -> str:
    """Give what stands out, in words; empty if nothing does."""
    slow = rank_words.find_slow(run)
    texts, wait = [*slow], rank_words.share_of_step(run, PARTS[1])
    if wait > _DATA_SHARE:
        texts.append(f"Ranks wait for their data for {share(wait)} of the step, on average")
    for kind, words in ((Event.skip, "skipped step"), (Event.rollback, "rollback"), (Event.lost_rank, "lost rank")):
        if own := events_of(run, kind):
            texts.append(f"{count(len(own), words)}; the last: {history.style_of(own[-1]).words(own[-1])}")
    # An alert of a slow rank is about some steps, and `slow` above about the whole run.
    alerts = [event for event in events_of(run, Event.alert) if not (slow and event.get("kind") == "slow_rank")]
    texts += [history.style_of(event).words(event) for event in alerts[-3:]]
    if len(alerts) > 3:
        texts.append(f"{len(alerts) - 3} earlier alerts: see the events")
    texts += _past_the_best(run)
    if _stall_share(run) > _STALL_SHARE:
        texts.append(f"Saves make training stand still for {share(_stall_share(run))} of its time")
    items = "".join(f"<li>{escaped(text, 500)}</li>" for text in texts)
    return f'<ul class="findings">{items}</ul>' if items else ""


def _past_the_best(run: RunFiles) -> list[str]:
    """Say at which step a run was best, if its held-out measure is worse now."""
    known = [(value, step) for step, value in run.held_out.get(HELD_OUT, []) if value is not None]
    if not known:
        return []
    (best, step), last = min(known), known[-1][0]
    if run.task.traits.is_reinforcement:
        words = f"The held-out reward was highest at step {step:,.0f}, {-best:.4g}, and has fallen since"
        return [words] if last - best > _FALL * abs(best) else []
    words = f"The held-out loss was lowest at step {step:,.0f}, {best:.4g}, and has risen since"
    return [words] if best > 0 and last - best > _RISE * best else []


def _stall_share(run: RunFiles) -> float:
    stalls = sum(number(event.get("stall_seconds")) or 0.0 for event in events_of(run, Event.save))
    trained = run.seconds[-1] if run.seconds else 0.0
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
    waits = rank_words.share_of_step(run, PARTS[2])
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
        f"all, {share(_stall_share(run))} of its time."
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
    return f"<h2>Events</h2>{history.time_line(run)}{history.table(run)}"


def data(run: RunFiles) -> str:
    """Give the share of each pool of documents that was read, at the last save."""
    rows = []
    for name, pool in list(run.shares.items())[:32]:
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
        hosts = [str(host) for host in dict.fromkeys(map(str, record.hosts))]
        rows.append(("hosts", ", ".join(hosts[:16]) + (f" and {len(hosts) - 16} more" if len(hosts) > 16 else "")))
    began, last = instant(record.started), instant(record.updated)
    if began is not None and last is not None:
        rows.append(("this start", f"{began:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC, number {record.start}"))
    if isinstance(record.versions, dict):
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())))
    items = "".join(f"<div><dt>{name}</dt><dd>{escaped(value, 600)}</dd></div>" for name, value in rows)
    return f'<h2>Run</h2><dl class="details">{items}</dl>'
