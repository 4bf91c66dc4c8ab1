"""A picture of the bus bandwidth of each collective by size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure as Drawing

from hfdist.doctor.bandwidth.figures import KINDS, Figure, describe_size
from hfdist.errors import ConfigError, ResourceError


def draw(figures: Sequence[Figure], path: Path) -> None:
    """Draw it, with a part for each group of ranks.

    Raises:
        ConfigError: the ending of the file is that of no kind of picture.
        ResourceError: the file cannot be written.
    """
    groups = list(dict.fromkeys(one.group for one in figures))
    drawing = Drawing(figsize=(6 * len(groups), 4.5), layout="constrained")
    for place, group in enumerate(groups, start=1):
        axes = drawing.add_subplot(1, len(groups), place)
        own = [one for one in figures if one.group == group]
        for kind in KINDS:
            points = [(one.size_bytes, one.bus_gbs) for one in own if one.kind == kind]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=kind)
        sizes = sorted({one.size_bytes for one in own})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, list(map(describe_size, sizes)))
        axes.minorticks_off()
        axes.set_title(f"{group}: {own[0].num_ranks} ranks")
        axes.set_ylabel("bus bandwidth, GB/s")
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path)
    except OSError as error:
        raise ResourceError("the picture cannot be written", where=str(path), found=error.strerror) from error
    except ValueError as error:
        where, hint = "picture", f"picture={path.with_suffix('.svg')}"
        raise ConfigError("no such kind of picture", where=where, found=path.suffix, hint=hint) from error
