"""The search's layout beside each public one: its plan, that of the published layout, and the published speed.

Both are planned by the same formulas, on the same devices. The search may take layouts that fit into their memory only,
and the published layout is planned even where hfdist would hold more. `proofs/public_runs.py` writes the table.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.table import markdown
from hfdist.config.checks.preflight import plan_run
from hfdist.config.composition.compose import compose_config
from hfdist.config.run import RunConfig
from hfdist.planning.candidates import describe_layout
from hfdist.planning.searching.constants import ModelConstants
from hfdist.planning.searching.evaluate import Candidate, Machines
from hfdist.planning.searching.search import search_layouts
from hfdist.units import share, short, size

GOAL = 0.9
"""The least share of the published layout's plan that the search must reach."""


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The fastest layout that fits, by the search."""

    best: Candidate
    tokens_per_second: float
    """Of one device."""
    of_plan: float
    """Its speed, as a share of the planned one of the published layout."""
    of_published: float
    seconds: float
    """CPU seconds of the search, without the traces of the model's parts."""


def search_beside(
    command: Sequence[str],
    config: RunConfig,
    model: ModelConstants,
    machines: Machines,
    *,
    devices: int,
    planned: float,
    published: float,
) -> Searched | None:
    """Search the layouts of a public run's model on its devices; None: none fits.

    Args:
        command: the overrides that `config` is composed of.
        config: of the run in its published layout.
        model: from `measure`.
        machines: its devices, of any memory.
        devices: how many.
        planned: tokens a second of one device that the published layout would have.
        published: those that it had.

    Raises:
        ConfigError: the run refuses the layout that the search has found: a mistake of the search.
    """
    begin = time.process_time()
    own = replace(machines, usable_bytes=machines.hardware.memory_bytes)
    found = search_layouts(config, model, own, processes=devices, best=3).candidates
    seconds = time.process_time() - begin
    if not found:
        return None
    best = found[0]
    # What it prints must give that very layout, and a run must take it.
    composed = compose_config([*command, *best.overrides])
    assert composed == best.config, best.overrides
    plan_run(composed, world_size=devices)
    speed = config.train.global_batch_size * config.data.sequence_length / best.time.seconds / devices
    return Searched(
        best=best,
        tokens_per_second=speed,
        of_plan=speed / planned,
        of_published=speed / published,
        seconds=seconds,
    )


def table(rows: Iterable[tuple[str, int, Searched | None]]) -> str:
    """The rows of the page: of each run its name with a link, its devices, and what the search has found."""
    head = ["run", "on", "the search's layout", "memory", "planned", "of the published layout's plan", "of published",
            "CPU seconds"]  # fmt: skip
    return markdown(head, [_row(*row) for row in rows])


def _row(name: str, devices: int, found: Searched | None) -> list[str]:
    if found is None:
        return [name, f"{devices:,}", "none fits", "", "", "", "", ""]
    return [
        name,
        f"{devices:,}",
        describe_layout(found.best.layout),
        size(found.best.memory.use.total),
        f"{short(found.tokens_per_second)}, MFU {share(found.best.mfu or 0)}",
        f"{found.of_plan:.2f}",
        f"{found.of_published:.2f}",
        f"{found.seconds:.0f}",
    ]
