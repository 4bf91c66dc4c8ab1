"""What `hfdist bandwidth` prints: its figures and the links that they show, as a table for people or as JSON."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from hfdist.tools.doctor.bandwidth.figures import Figure, Link, describe_seconds, table


def as_json(figures: Sequence[Figure], links: Mapping[str, Link], backend: str, hosts: Sequence[str]) -> str:
    """Give the figures, the links by group, and of which backend and hosts, by rank, they are, as JSON."""
    content = {
        "backend": backend,
        "version": _version_of(backend),
        "hosts": hosts,
        "links": {group: link._asdict() for group, link in links.items()},
        "figures": [figure.to_json() for figure in figures],
    }
    return json.dumps(content, indent=1)


def as_text(figures: Sequence[Figure], links: Mapping[str, Link], backend: str, hosts: Sequence[str]) -> str:
    """Give the same as a table for each group, and a line for each link."""
    machines = ", ".join(f"{host} ({ranks})" for host, ranks in Counter(hosts).items())
    lines = [f"{_version_of(backend)}, {len(hosts)} ranks: {machines}", "", *table(figures)]
    lines += [
        f"a rank's link {group}: {link.gbs:.3g} GB/s, {describe_seconds(link.latency_seconds)} a message"
        for group, link in links.items()
    ]
    return "\n".join(lines)


def _version_of(backend: str) -> str:
    """Give the backend with its version, and what its variables say of how it works."""
    if backend == "gloo":
        return f"gloo of torch {torch.__version__}"
    settings = [f"{name}={os.environ[name]}" for name in ("NCCL_ALGO", "NCCL_PROTO") if name in os.environ]
    return " ".join(["NCCL", ".".join(map(str, torch.cuda.nccl.version())), *settings])
