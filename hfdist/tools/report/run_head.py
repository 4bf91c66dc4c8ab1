"""The head of a run on its page: its state, its first figures, and what stands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from hfdist.records import Event, RunFolder, State
from hfdist.tools.report import event_words, rank_words
from hfdist.tools.report.event_words import events_of
from hfdist.tools.report.reading.downsample import Point
from hfdist.tools.report.reading.metric_lines import HELD_OUT, LOSS
from hfdist.tools.report.reading.rank_steps import DATA
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.sections import stall_share
from hfdist.tools.report.text import escaped, instant, number
from hfdist.units import count, duration, energy, mass, money, share, short

_SILENT_SECONDS = 180.0
"""A running run whose record is older than this is silent: something may be wrong."""
_STALL_SHARE = 0.05
"""The time in which training stands still for saves stands out above this share of the training's time."""
_DATA_SHARE = 0.1
"""The wait for data stands out above this share of a step."""
_LEAST_FILLED = 0.95
"""Tokens are called padded if a smaller share than this of a pool's sequences is filled."""
_RISE, _FALL = 0.02, 0.1
"""Shares by which a held-out loss must lie above its lowest, or a reward below its highest, to stand out."""
_RECENT = 50
"""Number of the last training lines over which figures are means."""
_MOST_ALERTS = 3


class StateWords(NamedTuple):
    """The state of a run, as a page shows it."""

    kind: str
    """Class of the page's style: good, bad, running or unknown."""
    words: str
    """Words for the reader, escaped."""


class _Figure(NamedTuple):
    """A figure of a run, with its name, as escaped HTML."""

    name: str
    value: str


def state(run: RunFiles) -> StateWords:
    """Give the state of a run; a run that has written nothing for some minutes is silent."""
    record = run.record
    if record is None:
        has_record = RunFolder(run.folder).record.exists()
        return StateWords("unknown", "run.json cannot be read" if has_record else "no run.json")
    words = record.state.value
    if record.state is State.running:
        updated = instant(record.updated)
        silent = 0.0 if updated is None else (run.read_at - updated).total_seconds()
        if silent > _SILENT_SECONDS:
            return StateWords("bad", f"silent for {duration(silent)}")
        return StateWords("running", words)
    if record.exit_code is not None:
        words += f", exit code {escaped(record.exit_code)}"
    is_good = record.state in (State.finished, State.stopped)
    return StateWords("good" if is_good else "bad", words)


def _figures(run: RunFiles) -> list[_Figure]:
    """Give the first figures of a run: progress, losses, speed, time, energy and cost, where they are known."""
    found = [*_progress(run), *_losses(run)]
    for key, name, form in (("tokens_per_second", "tokens a second", short), ("mfu", "MFU", share)):
        recent = _known(run.metrics.curve(key)[-_RECENT:])
        if recent:
            found.append(_Figure(name, form(fmean(recent))))
    if run.record is not None:
        found.append(_Figure("duration", duration(number(run.record.total("seconds")) or 0.0)))
        seconds_left = _seconds_left(run)
        if run.record.state is State.running and seconds_left is not None:
            found.append(_Figure("left", f"about {duration(seconds_left)}"))
    return found + _energy(run)


def _known(points: Sequence[Point]) -> list[float]:
    return [y for _, y in points if y is not None]


def _progress(run: RunFiles) -> list[_Figure]:
    """Give the steps that are done and, with a record, the tokens."""
    record, metrics = run.record, run.metrics
    last_step = metrics.steps[-1] if metrics.steps else None
    if record is None:
        return [] if last_step is None else [_Figure("step", f"{last_step:,.0f}")]
    found = []
    step, max_steps = number(record.step) or last_step, number(record.max_steps)
    if step is not None:
        limit = f" <small>of {max_steps:,.0f}</small>" if max_steps else ""
        found.append(_Figure("step", f"{step:,.0f}{limit}"))
    tokens = number(record.tokens) or (metrics.tokens[-1] if metrics.tokens else 0.0)
    # The part about data counts tokens without padding: the reader is told why both differ.
    is_padded = any(pool.get("filled", 1.0) < _LEAST_FILLED for pool in metrics.shares.values())
    note = " <small>with padding</small>" if is_padded else ""
    return [*found, _Figure("tokens", f"{short(tokens)}{note}")]


def _losses(run: RunFiles) -> list[_Figure]:
    """Give the last loss, or the last reward of reinforcement learning, in training and held out."""
    if run.task.traits.is_reinforcement:
        curves = {
            "reward": run.metrics.figures.get("reward", []),
            "held-out reward": run.metrics.held_out_figures.get("reward", []),
        }
    else:
        curves = {"loss": run.metrics.curve(LOSS), "held-out loss": run.metrics.held_out.get(HELD_OUT, [])}
    known = {name: _known(points) for name, points in curves.items()}
    found = [_Figure(name, f"{values[-1]:.4g}") for name, values in known.items() if values]
    for key in ("accuracies", "rewards/accuracies"):
        accuracies = _known(run.metrics.held_out_figures.get(key, []))
        if accuracies:
            found.append(_Figure("held-out accuracy", share(accuracies[-1])))
    return found


def _seconds_left(run: RunFiles) -> float | None:
    """Estimate the seconds to the last step, by the mean of the last steps; None: not known."""
    max_steps = None if run.record is None else number(run.record.max_steps)
    recent = _known(run.metrics.curve("step_seconds")[-_RECENT:])
    if max_steps is None or not recent or not run.metrics.steps:
        return None
    return max(max_steps - run.metrics.steps[-1], 0.0) * fmean(recent)


def _energy(run: RunFiles) -> list[_Figure]:
    """Give energy, emissions and cost of all starts, where they are known."""
    record, found = run.record, []
    if record is None:
        return []
    source = escaped(record.energy_source or "", 40)
    note = "an estimate" if source == "estimate" else source
    kwh, grams, cost = (number(record.total(key)) for key in ("energy_kwh", "gco2e", "cost"))
    if kwh is not None:
        found.append(_Figure("energy", f"{energy(kwh)} <small>{note}</small>"))
    if grams is not None:
        found.append(_Figure("emissions", f"{mass(grams)} CO2e"))
    if cost is not None:
        found.append(_Figure("cost", money(cost, "").rstrip()))
    return found


def head(run: RunFiles, *, colour: str = "") -> str:
    """Give name, state, error, first figures of a run, and what stands out, as HTML.

    Args:
        run: the run.
        colour: class of the run's colour; empty: the page has no other run.
    """
    kind, words = state(run)
    error = ""
    if run.record is not None and run.record.error:
        error = f'<p class="error">{escaped(run.record.error, 600)}</p>'
    items = "".join(f"<div><dt>{figure.name}</dt><dd>{figure.value}</dd></div>" for figure in _figures(run))
    dot = f'<i class="{colour}"></i>' if colour else ""
    return (
        f'<article class="head"><h2>{dot}{escaped(run.name)} <span class="state {kind}">{words}</span></h2>{error}'
        f'<dl class="figures">{items}</dl>{_findings(run)}</article>'
    )


def _findings(run: RunFiles) -> str:
    """Give a list as HTML of what stands out in a run, or an empty text."""
    texts = rank_words.find_slow(run)
    has_slow, wait = bool(texts), rank_words.share_of_step(run, DATA)
    if wait > _DATA_SHARE:
        texts.append(f"Ranks wait for their data for {share(wait)} of the step, on average")
    texts += _findings_of_events(run, has_slow=has_slow)
    texts += _past_the_best(run)
    if stall_share(run) > _STALL_SHARE:
        texts.append(f"Saves make training stand still for {share(stall_share(run))} of its time")
    items = "".join(f"<li>{escaped(text, 500)}</li>" for text in texts)
    return f'<ul class="findings">{items}</ul>' if items else ""


def _findings_of_events(run: RunFiles, *, has_slow: bool) -> list[str]:
    """Say what stands out in a run's events; `has_slow`: the page says already which ranks are slow."""
    texts = []
    for kind, words in ((Event.skip, "skipped step"), (Event.rollback, "rollback"), (Event.lost_rank, "lost rank")):
        if events := events_of(run, kind):
            texts.append(f"{count(len(events), words)}; the last: {_in_words(events[-1])}")
    # An alert about a slow rank is about some steps. It says nothing new if a rank is slow in the whole run.
    alerts = [event for event in events_of(run, Event.alert) if not (has_slow and event.get("kind") == "slow_rank")]
    texts += map(_in_words, alerts[-_MOST_ALERTS:])
    if len(alerts) > _MOST_ALERTS:
        texts.append(f"{len(alerts) - _MOST_ALERTS} earlier alerts: see the events")
    return texts


def _in_words(event: Mapping[str, object]) -> str:
    return event_words.style_of(event).words(event)


def _past_the_best(run: RunFiles) -> list[str]:
    """Say at which step a run was best, if its held-out measure is worse now."""
    known = [(value, step) for step, value in run.metrics.held_out.get(HELD_OUT, []) if value is not None]
    if not known:
        return []
    (best, best_step), (last, _) = min(known), known[-1]
    if run.task.traits.is_reinforcement:
        # The held-out loss of reinforcement learning is the reward with the other sign.
        has_fallen = last - best > _FALL * abs(best)
        words = f"The held-out reward was highest at step {best_step:,.0f}, {-best:.4g}, and has fallen since"
        return [words] if has_fallen else []
    has_risen = best > 0 and last - best > _RISE * best
    words = f"The held-out loss was lowest at step {best_step:,.0f}, {best:.4g}, and has risen since"
    return [words] if has_risen else []
