"""Slow ranks, in words and as a table: ranks that compute longer, wait for data, or wait for others."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, median_low

from hfdist.tools.report.drawing.rank_map import ratios_of
from hfdist.tools.report.reading.rank_steps import COMPUTE, DATA, PARTS, STEP, WAIT, Stretch
from hfdist.tools.report.reading.run_files import RunFiles
from hfdist.tools.report.text import wide_table
from hfdist.units import duration, share, size

_SLOW = 1.2
"""A slow rank is busy at least this many times as long as the median."""
_SLOW_SHARE = 0.05
"""A slow rank is busy longer than the median by at least this share of a step."""
_SLOW_FOR_A_TIME = 1.5
"""A rank was slow for a time where it was busy at least this many times as long as the median."""
_MOST_NAMED = 4
_MOST_ROWS = 16


def rank_names(run: RunFiles) -> list[str]:
    """Give `rank 3 on HOST` for each rank."""
    hosts = run.record.hosts if run.record is not None and isinstance(run.record.hosts, list) else []
    num_ranks = max((stretch.num_ranks for stretch in run.ranks.stretches), default=0)
    return [f"rank {rank} on {hosts[rank]}" if rank < len(hosts) else f"rank {rank}" for rank in range(num_ranks)]


def find_slow(run: RunFiles) -> list[str]:
    """Say which ranks are slow, the slowest first; one that was slow for a time only, if none is always."""
    total, names = run.ranks.total(), rank_names(run)
    if total is None or len(names) < 2:
        return []
    found = [*_slow_in(total, names, COMPUTE, "computes"), *_slow_in(total, names, DATA, "waits for its data")]
    return found or _for_a_time(run.ranks.stretches, names)


def _slow_in(total: Stretch, names: Sequence[str], part: str, verb: str) -> list[str]:
    """Say which ranks take much longer than the median for one part of a step."""
    means = total.means(part)
    known = [value for value in means if value is not None]
    steps = [value for value in total.means(STEP) if value is not None]
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
        times = f"{value / middle:.1f} times as long as" if middle > 0.01 * value else "longer than"
        texts.append(
            f"{names[rank]} {verb} {duration(value)} a step, {times} the median of ranks ({duration(middle)}): "
            f"the others wait for it, {share(min((value - middle) / step, 1.0))} of the step"
        )
    if len(slow) > _MOST_NAMED:
        texts.append(f"{len(slow) - _MOST_NAMED} more ranks are as slow")
    return texts


def _for_a_time(stretches: Sequence[Stretch], names: Sequence[str]) -> list[str]:
    """Name ranks that were slow in two or more stretches in a row; the first one is warming up."""
    texts, ratios = [], [ratios_of(stretch) for stretch in stretches[1:]]
    for rank, name in enumerate(names):
        own = [ratio[rank] if rank < len(ratio) else None for ratio in ratios]
        slow = [number for number, ratio in enumerate(own) if ratio is not None and ratio > _SLOW_FOR_A_TIME]
        # Numbers of `ratios`, which lack the first stretch.
        followed = [number for number in slow if number + 1 in slow]
        if followed:
            first, last = stretches[followed[0] + 1].first_step, stretches[followed[-1] + 2].last_step
            worst = max(own[number] or 0.0 for number in slow)
            texts.append(f"{name} was slow between step {first:.0f} and {last:.0f}: up to {worst:.1f} times the median")
    return texts[:_MOST_NAMED]


def share_of_step(run: RunFiles, part: str) -> float:
    """Give the share of the step that the mean rank spends in one of PARTS, from 0 to 1."""
    total = run.ranks.total()
    if total is None:
        return 0.0
    spent = [value for value in total.means(part) if value is not None]
    steps = [value for value in total.means(STEP) if value is not None]
    return sum(spent) / len(spent) / (sum(steps) / len(steps)) if spent and sum(steps) > 0 else 0.0


def table(run: RunFiles) -> str:
    """Give a table of mean times and peak memory by rank; of many ranks, only the busiest."""
    total, names = run.ranks.total(), rank_names(run)
    if total is None or not names:
        return ""
    columns = {part: total.means(part) for part in PARTS}
    # A rank may lack, as not all lines have all ranks.
    busy = dict(enumerate(total.busy()))
    longest = max(
        (sum(own[rank] or 0.0 for own in columns.values() if rank < len(own)) for rank in range(len(names))), default=0
    )
    order = sorted(range(len(names)), key=lambda rank: -(busy.get(rank) or 0.0))[:_MOST_ROWS]
    rows = []
    for rank in sorted(order) if len(names) <= _MOST_ROWS else order:
        values = [own[rank] if rank < len(own) else None for own in columns.values()]
        peak = total.peak_bytes[rank] if rank < len(total.peak_bytes) else 0.0
        cells = ["" if value is None else duration(value) for value in values]
        rows.append((names[rank], [*cells, size(peak) if peak else "", _bar(values, longest)]))
    note = f"<p>The {len(order)} busiest of {len(names):,} ranks.</p>" if len(order) < len(names) else ""
    if not any(value is not None for value in columns[WAIT]):
        note += "<p>On these devices the wait for other ranks is not told apart from computing.</p>"
    return wide_table(("compute", "data", "wait", "peak memory", "of a step"), rows) + note


def _bar(values: Sequence[float | None], longest: float) -> str:
    drawn, left = [], 0.0
    for number, value in enumerate(values):
        width = 100 * max(value or 0.0, 0.0) / longest if longest > 0 else 0.0
        drawn.append(f'<rect class="fill c{number}" x="{left:.1f}%" width="{width:.1f}%" height="10"/>')
        left += width
    return f'<svg class="bar" height="10" aria-hidden="true">{"".join(drawn)}</svg>'
