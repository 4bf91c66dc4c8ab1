"""The head of a run on its page: its state, its first figures, and what stands out."""

from __future__ import annotations

from hfdist.records import Event, RunFolder, State
from hfdist.tools.report import event_words, rank_words
from hfdist.tools.report.event_words import events_of
from hfdist.tools.report.reading.metric_lines import HELD_OUT, LOSS
from hfdist.tools.report.reading.rank_steps import DATA
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.sections import stall_share
from hfdist.tools.report.text import escaped, instant, number
from hfdist.units import count, duration, energy, mass, money, share, short

_SILENT_SECONDS = 180.0
"""A run whose record is older is silent."""
_STALL_SHARE = 0.05
"""Share of the training's time from which on a stop for saves stands out."""
_DATA_SHARE = 0.1
"""Share of a step from which on the wait for data stands out."""
_LEAST_FILLED = 0.95
"""Share of sequences that is filled, below which tokens count padding."""
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
    step = run.metrics.steps[-1] if run.metrics.steps else None
    if record is not None:
        done, most = number(record.step), number(record.max_steps)
        step = done or step
        if step is not None:
            found.append(("step", f"{step:,.0f}" + (f" <small>of {most:,.0f}</small>" if most else "")))
        tokens = number(record.tokens) or (run.metrics.tokens[-1] if run.metrics.tokens else 0.0)
        # The part `data` counts tokens without padding.
        is_padded = any(pool.get("filled", 1.0) < _LEAST_FILLED for pool in run.metrics.shares.values())
        found.append(("tokens", short(tokens) + (" <small>with padding</small>" if is_padded else "")))
    elif step is not None:
        found.append(("step", f"{step:,.0f}"))
    found += _losses(run)
    for key, name, form in (("tokens_per_second", "tokens a second", short), ("mfu", "MFU", share)):
        recent = [value for _, value in run.metrics.curve(key)[-50:] if value is not None]
        if recent:
            found.append((name, form(sum(recent) / len(recent))))
    if record is not None:
        found.append(("duration", duration(number(record.total("seconds")) or 0.0)))
        if record.state is State.running and (left := _seconds_left(run)) is not None:
            found.append(("left", f"about {duration(left)}"))
    return found + _energy(run)


def _losses(run: RunFiles) -> list[tuple[str, str]]:
    if run.task.traits.is_reinforcement:
        curves = {
            "reward": run.metrics.figures.get("reward", []),
            "held-out reward": run.metrics.held_out_figures.get("reward", []),
        }
    else:
        curves = {"loss": run.metrics.curve(LOSS), "held-out loss": run.metrics.held_out.get(HELD_OUT, [])}
    known = {name: [value for _, value in points if value is not None] for name, points in curves.items()}
    found = [(name, f"{values[-1]:.4g}") for name, values in known.items() if values]
    for key in ("accuracies", "rewards/accuracies"):
        right = [value for _, value in run.metrics.held_out_figures.get(key, []) if value is not None]
        found += [("held-out accuracy", share(right[-1]))] if right else []
    return found


def _seconds_left(run: RunFiles) -> float | None:
    most = None if run.record is None else number(run.record.max_steps)
    recent = [value for _, value in run.metrics.curve("step_seconds")[-50:] if value is not None]
    if most is None or not recent or not run.metrics.steps:
        return None
    return max(most - run.metrics.steps[-1], 0.0) * sum(recent) / len(recent)


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
    texts, wait = [*slow], rank_words.share_of_step(run, DATA)
    if wait > _DATA_SHARE:
        texts.append(f"Ranks wait for their data for {share(wait)} of the step, on average")
    for kind, words in ((Event.skip, "skipped step"), (Event.rollback, "rollback"), (Event.lost_rank, "lost rank")):
        if own := events_of(run, kind):
            texts.append(f"{count(len(own), words)}; the last: {event_words.style_of(own[-1]).words(own[-1])}")
    # An alert of a slow rank is about some steps, and `slow` above about the whole run.
    alerts = [event for event in events_of(run, Event.alert) if not (slow and event.get("kind") == "slow_rank")]
    texts += [event_words.style_of(event).words(event) for event in alerts[-3:]]
    if len(alerts) > 3:
        texts.append(f"{len(alerts) - 3} earlier alerts: see the events")
    texts += _past_the_best(run)
    if stall_share(run) > _STALL_SHARE:
        texts.append(f"Saves make training stand still for {share(stall_share(run))} of its time")
    items = "".join(f"<li>{escaped(text, 500)}</li>" for text in texts)
    return f'<ul class="findings">{items}</ul>' if items else ""


def _past_the_best(run: RunFiles) -> list[str]:
    """Say at which step a run was best, if its held-out measure is worse now."""
    known = [(value, step) for step, value in run.metrics.held_out.get(HELD_OUT, []) if value is not None]
    if not known:
        return []
    (best, step), last = min(known), known[-1][0]
    if run.task.traits.is_reinforcement:
        words = f"The held-out reward was highest at step {step:,.0f}, {-best:.4g}, and has fallen since"
        return [words] if last - best > _FALL * abs(best) else []
    words = f"The held-out loss was lowest at step {step:,.0f}, {best:.4g}, and has risen since"
    return [words] if best > 0 and last - best > _RISE * best else []
