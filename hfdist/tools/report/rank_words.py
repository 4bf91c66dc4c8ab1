"""The times of ranks, in words and as a table: which ranks are slow, because they compute or wait for data longer."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median, median_low

from hfdist.tools.report.drawing.rank_map import busy_ratios
from hfdist.tools.report.reading.rank_steps import COMPUTE, DATA, PARTS, STEP, WAIT, Stretch
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import wide_table
from hfdist.units import duration, share, size

_SLOW = 1.2
"""A slow rank is busy at least this many times as long as the median."""
_SLOW_SHARE = 0.05
"""A slow rank is busy longer than the median by at least this share of a step."""
_SLOW_FOR_A_TIME = 1.5
"""A rank was slow for a time if it was busy at least this many times as long as the median."""
_MOST_NAMED = 4
_MOST_ROWS = 16
"""Most slow ranks that are named, and most ranks in the table."""


def rank_names(run: RunFiles) -> list[str]:
    """Give `rank 3 on HOST` for each rank, or `rank 3` if the host is not known."""
    hosts = run.record.hosts if run.record is not None and isinstance(run.record.hosts, list) else []
    num_ranks = max((stretch.num_ranks for stretch in run.ranks.stretches), default=0)
    return [f"rank {rank} on {hosts[rank]}" if rank < len(hosts) else f"rank {rank}" for rank in range(num_ranks)]


def find_slow(run: RunFiles) -> list[str]:
    """Say which ranks are slow on average, the slowest first; if none is, which ranks were slow for a time."""
    total, names = run.ranks.total(), rank_names(run)
    if total is None or len(names) < 2:
        return []
    found = [*_slow_in(total, names, COMPUTE, "computes"), *_slow_in(total, names, DATA, "waits for its data")]
    return found or _slow_for_a_time(run.ranks.stretches, names)


def _slow_in(total: Stretch, names: Sequence[str], part: str, verb: str) -> list[str]:
    """Say which ranks take much longer than the median for one part of a step; `verb` says what a rank does in it."""
    means = total.means(part)
    known = _known(means)
    steps = _known(total.means(STEP))
    if len(known) < 2 or not steps:
        return []
    # The lower of two middle values: of two ranks, the quicker one is the measure.
    middle, step = median_low(known), median(steps)
    slow = [
        (value, rank)
        for rank, value in enumerate(means)
        if value is not None and value > _SLOW * middle and value - middle > _SLOW_SHARE * step
    ]
    texts = []
    for value, rank in sorted(slow, reverse=True)[:_MOST_NAMED]:
        # Beside a median of about 0, the number of times says nothing.
        times = f"{value / middle:.1f} times as long as" if middle > 0.01 * value else "longer than"
        texts.append(
            f"{names[rank]} {verb} {duration(value)} a step, {times} the median of ranks ({duration(middle)}): "
            f"the others wait for it, {share(min((value - middle) / step, 1.0))} of the step"
        )
    if len(slow) > _MOST_NAMED:
        texts.append(f"{len(slow) - _MOST_NAMED} more ranks are as slow")
    return texts


def _slow_for_a_time(stretches: Sequence[Stretch], names: Sequence[str]) -> list[str]:
    """Say which ranks were slow in two or more stretches in a row, after the first, in which all ranks warm up."""
    texts, later = [], stretches[1:]
    ratios_of_ranks = [busy_ratios(stretch) for stretch in later]
    for rank, name in enumerate(names):
        ratios = [_at(ratios, rank) or 0.0 for ratios in ratios_of_ranks]
        slow = [number for number, ratio in enumerate(ratios) if ratio > _SLOW_FOR_A_TIME]
        begins_of_pairs = [number for number in slow if number + 1 in slow]
        if begins_of_pairs:
            first, last = later[begins_of_pairs[0]].first_step, later[begins_of_pairs[-1] + 1].last_step
            worst = max(ratios[number] for number in slow)
            texts.append(f"{name} was slow between step {first:.0f} and {last:.0f}: up to {worst:.1f} times the median")
    return texts[:_MOST_NAMED]


def share_of_step(run: RunFiles, part: str) -> float:
    """Give the share of the step that the mean rank spends in one of PARTS, from 0 to 1; 0 if it is not known."""
    total = run.ranks.total()
    if total is None:
        return 0.0
    spent, steps = _known(total.means(part)), _known(total.means(STEP))
    if not spent or sum(steps) <= 0:
        return 0.0
    return fmean(spent) / fmean(steps)


def table(run: RunFiles) -> str:
    """Give a table as HTML of mean times and peak memory by rank; with many ranks it has only the busiest."""
    total, names = run.ranks.total(), rank_names(run)
    if total is None or not names:
        return ""
    columns = [total.means(part) for part in PARTS]
    seconds_of_ranks = [[_at(column, rank) for column in columns] for rank in range(len(names))]
    longest = max(sum(_known(seconds)) for seconds in seconds_of_ranks)
    busy = total.busy()
    # All ranks are in their order; the busiest of many, by their busy time.
    shown: Sequence[int] = range(len(names))
    if len(names) > _MOST_ROWS:
        shown = sorted(shown, key=lambda rank: -(_at(busy, rank) or 0.0))[:_MOST_ROWS]
    rows = []
    for rank in shown:
        seconds, peak = seconds_of_ranks[rank], _at(total.peak_bytes, rank)
        cells = ["" if value is None else duration(value) for value in seconds]
        rows.append((names[rank], [*cells, size(peak) if peak else "", _bar(seconds, longest)]))
    note = f"<p>The {len(shown)} busiest of {len(names):,} ranks.</p>" if len(shown) < len(names) else ""
    if not _known(total.means(WAIT)):
        note += "<p>On these devices the wait for other ranks is not told apart from computing.</p>"
    return wide_table(("compute", "data", "wait", "peak memory", "of a step"), rows) + note


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _at(values: Sequence[float | None], rank: int) -> float | None:
    """Give a rank's value; None: it is not known. The last ranks may be missing, as not all lines have all ranks."""
    return values[rank] if rank < len(values) else None


def _bar(values: Sequence[float | None], longest: float) -> str:
    """Draw the parts of a rank's step side by side; `longest` is the time of a bar of the full width, in seconds."""
    drawn, left = [], 0.0
    for number, value in enumerate(values):
        width = 100 * max(value or 0.0, 0.0) / longest if longest > 0 else 0.0
        drawn.append(f'<rect class="fill c{number}" x="{left:.1f}%" width="{width:.1f}%" height="10"/>')
        left += width
    return f'<svg class="bar" height="10" aria-hidden="true">{"".join(drawn)}</svg>'
