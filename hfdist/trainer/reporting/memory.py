"""The most memory that each rank has used."""

from __future__ import annotations

import resource
import sys

import torch

from hfdist.collectives import gather_json


def describe_peak_memory(device: torch.device) -> str:
    """Give one line for people, such as `host 974, 932 MiB by rank`. A collective.

    Host memory is the process's largest resident size, pages of mapped files included.
    """
    # In KiB, but in bytes on macOS.
    unit_bytes = 1 if sys.platform == "darwin" else 2**10
    peaks_bytes = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes}
    if device.type == "cuda":
        peaks_bytes["GPU"] = torch.cuda.max_memory_allocated(device)
    every = gather_json(peaks_bytes)
    parts = [f"{kind} {', '.join(f'{peaks[kind] / 2**20:,.0f}' for peaks in every)}" for kind in peaks_bytes]
    return f"{'; '.join(parts)} MiB by rank"
