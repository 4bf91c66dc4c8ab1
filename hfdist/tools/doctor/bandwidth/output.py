"""The output of `hfdist bandwidth`: the figures and the links that they show, as tables for people or as JSON."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from hfdist.tools.doctor.bandwidth.figures import Figure, Link, describe_seconds, table


def as_json(figures: Sequence[Figure], links: Mapping[str, Link], backend: str, hosts: Sequence[str]) -> str:
    """Give the figures and the links as JSON.

    Args:
        figures: figures of all groups.
        links: links by the name of their group.
        backend: `gloo` or `nccl`.
        hosts: host of each rank.
    """
    content = {
        "backend": backend,
        "version": _version_of(backend),
        "hosts": hosts,
        "links": {group: link._asdict() for group, link in links.items()},
        "figures": [figure.to_json() for figure in figures],
    }
    return json.dumps(content, indent=1)


def as_text(figures: Sequence[Figure], links: Mapping[str, Link], backend: str, hosts: Sequence[str]) -> str:
    """Give the figures as a table for each group, and the links as a line each; the arguments are as in `as_json`."""
    machines = ", ".join(f"{host} ({ranks})" for host, ranks in Counter(hosts).items())
    lines = [f"{_version_of(backend)}, {len(hosts)} ranks: {machines}", "", *table(figures)]
    lines += [
        f"a rank's link {group}: {link.gbs:.3g} GB/s, {describe_seconds(link.latency_seconds)} a message"
        for group, link in links.items()
    ]
    return "\n".join(lines)


def _version_of(backend: str) -> str:
    """Give the name of a backend with its version, and with the variables that change how it works."""
    if backend == "gloo":
        return f"gloo of torch {torch.__version__}"
    settings = [f"{name}={os.environ[name]}" for name in ("NCCL_ALGO", "NCCL_PROTO") if name in os.environ]
    return " ".join(["NCCL", ".".join(map(str, torch.cuda.nccl.version())), *settings])
