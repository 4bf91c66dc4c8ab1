"""The language-model head and its loss, forward and backward: time and memory beside eager, compiled and torch's own.

python -m benchmarks.head --write
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from benchmarks.overlay import UnavailableError
from benchmarks.rounds import medians, medians_or_reasons
from benchmarks.table import Measure, describe_run, markdown, publish, read_options
from hfdist.models.loss.chunked import ChunkedLoss
from hfdist.models.loss.deferred_rows import SumOfLosses
from hfdist.models.loss.lazy_logits import deferring
from hfdist.testing import run_ranks

OURS, EAGER, COMPILED, TORCH, LIMIT = "hfdist", "eager", "torch.compile", "torch's chunks", "the three products"
LIGER, CUT = "liger-kernel", "cut-cross-entropy"
PACKAGES = {LIGER: "liger_kernel", CUT: "cut_cross_entropy"}
MIB = 2**20


class Size(NamedTuple):
    """Size of one head and one batch."""

    tokens: int
    width: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, width {self.width:,}, vocabulary {self.vocabulary:,}"


ON_CPU = (Size(4096, 256, 32_000), Size(1024, 256, 128_256))
ON_GPU = (Size(8192, 2048, 32_000), Size(16_384, 2048, 128_256))
QUICK = (Size(256, 64, 4000),)

Loss = Callable[[nn.Linear, torch.Tensor, torch.Tensor], torch.Tensor]
"""(head, hidden states [tokens, width], targets [tokens]) -> mean loss."""


def main() -> None:
    """Measure all, and print or write the section."""
    options = read_options("head", __doc__, rounds=3)
    is_gpu = torch.cuda.is_available()
    sizes = QUICK if options.quick else (ON_GPU if is_gpu else ON_CPU)
    sections, measures = [], []
    for size in sizes:
        seconds, peaks = _measure_all(size, options.rounds, options.quick)
        sections.append(f"{size}:\n\n{_table(seconds, peaks)}")
        measures += _measures(size, seconds, peaks)
    publish(options, "head", "\n\n".join([_preamble(options, is_gpu), *sections]), measures)


def _measure_all(size: Size, num_rounds: int, is_quick: bool) -> tuple[dict[str, Any], dict[str, float]]:
    """Median seconds of each contender, or why it has none, and its peak in MiB."""
    is_gpu = torch.cuda.is_available()
    reasons: dict[str, Any] = {name: reason for name in PACKAGES if (reason := _refusal(name, is_gpu))}
    if not hasattr(functional, "linear_cross_entropy"):
        reasons[TORCH] = f"torch {torch.__version__} has none"
    if is_quick:
        reasons[COMPILED] = "not in a quick run"
    peaks: dict[str, list[float]] = {}

    def contender(name: str) -> Callable[[], float]:
        def call() -> float:
            try:
                # A process of its own, in which nothing is left of the others; a GPU's memory is counted by itself.
                seconds, peak = measure(name, size) if is_gpu else _measure_apart(name, size)
            except Exception as error:
                if name in (OURS, EAGER, LIMIT):
                    raise
                raise UnavailableError(_said_last(error)) from error
            peaks.setdefault(name, []).append(peak)
            return seconds

        return call

    names = [name for name in (OURS, EAGER, COMPILED, TORCH, LIGER, CUT, LIMIT) if name not in reasons]
    # What another program has left in inductor's cache may be damaged, or spare it the work.
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache):
        figures = medians_or_reasons({name: contender(name) for name in names}, num_rounds, num_warm_up=int(is_gpu))
    found = {**figures, **reasons}
    return found, medians({name: peaks[name] for name, value in found.items() if not isinstance(value, str)})


def _measure_apart(name: str, size: Size) -> tuple[float, float]:
    found: tuple[float, float] = run_ranks(measure, 1, name, size, group=False, timeout_seconds=600)[0]
    return found


def _said_last(error: Exception) -> str:
    """The line that names the error: the last that does, as torch's hints follow it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return [type(error).__name__, *lines[-1:], *named][-1]


def _refusal(name: str, is_gpu: bool) -> str | None:
    if not is_gpu:
        return "its kernels need a GPU"
    return None if find_spec(PACKAGES[name]) else "not installed"


def measure(name: str, size: Size) -> tuple[float, float]:
    """Seconds of one forward and backward (CPU time; on a GPU by the clock), and its peak above weights and batch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    head = nn.Linear(size.width, size.vocabulary, bias=False, device=device)
    hidden = torch.randn(size.tokens, size.width, device=device, dtype=dtype).requires_grad_()
    targets = torch.randint(size.vocabulary, (size.tokens,), device=device)
    step = _products if name == LIMIT else _step(LOSSES[name]())

    def call() -> float:
        head.weight.grad = hidden.grad = None
        begin = _clock(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            step(head, hidden, targets)
        return _clock(device) - begin

    if name == COMPILED or device.type == "cuda":
        # What is compiled, and libraries that set themselves up.
        call()
        give_back()
    # Memory in a first call: on a CPU, later ones use again what it has freed, unseen. Time in a second one.
    with Peak(device) as peak:
        call()
    return call(), peak.mib


def _step(loss: Loss) -> Callable[..., None]:
    def step(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> None:
        loss(head, hidden, targets).backward()

    return step


def _products(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> None:
    """The least that there is to compute: no loss, no softmax, and nothing read that is not a factor."""
    weight, gradient = head.weight.detach().to(hidden.dtype), torch.zeros_like(head.weight)
    for rows in hidden.detach().split(1024):
        logits = rows @ weight.T
        logits @ weight
        gradient += logits.T @ rows


def _eager(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(head(hidden).float(), targets)


def _torchs_own(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    # By name: torch 2.11 and 2.12 have neither.
    options = vars(nn)["LinearCrossEntropyOptions"]()
    own: Any = vars(functional)["linear_cross_entropy"]
    weight = head.weight.to(hidden.dtype)
    return own(hidden, weight, targets, options=options)


def _liger(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(head.weight.to(hidden.dtype), hidden, targets)


def _cut_cross_entropy(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, head.weight.to(hidden.dtype), targets)


def _deferred(loss: SumOfLosses) -> Loss:
    def run(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with deferring(head, head.out_features, loss):
            return _eager(head, hidden, targets)

    return run


def _ours() -> Loss:
    return _deferred(ChunkedLoss(torch.device("cuda" if torch.cuda.is_available() else "cpu")))


LOSSES: dict[str, Callable[[], Loss]] = {
    OURS: _ours,
    EAGER: lambda: _eager,
    COMPILED: lambda: torch.compile(_eager),
    TORCH: lambda: _torchs_own,
    LIGER: lambda: _liger,
    CUT: lambda: _cut_cross_entropy,
}


class Peak:
    """The most memory above what there was at the beginning: of the process, or allocated on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self.mib = 0.0

    def __enter__(self) -> Peak:
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated() / MIB
        else:
            # Linux: the peak is what there is now.
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _resident("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        after = torch.cuda.max_memory_allocated() / MIB if self._is_gpu else _resident("VmHWM")
        self.mib = after - self._before


def give_back() -> None:
    """Freed memory to the system, so that what is used next is seen."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def _measures(size: Size, seconds: dict[str, Any], peaks: dict[str, float]) -> list[Measure]:
    others = (EAGER, COMPILED, TORCH, LIGER, CUT)
    ours = seconds[OURS]
    return [
        Measure(
            what=f"head and loss, {size}",
            unit="s",
            ours=ours,
            peers={name: seconds[name] for name in others},
            limits={LIMIT: seconds[LIMIT]},
            goal="<= 1.1x limit",
            is_met=ours <= 1.1 * seconds[LIMIT],
        ),
        Measure(
            what=f"head and loss, peak memory, {size}",
            unit="MiB",
            ours=peaks[OURS],
            peers={name: peaks.get(name, seconds[name]) for name in others},
            goal="<= 0.25x eager",
            is_met=peaks[OURS] <= 0.25 * peaks[EAGER],
        ),
    ]


def _table(seconds: dict[str, Any], peaks: dict[str, float]) -> str:
    rows = []
    for name, value in seconds.items():
        if isinstance(value, str):
            rows.append([name, value, "-", "-"])
        else:
            rows.append([name, f"{value:.3f}", f"{value / seconds[LIMIT]:.2f}", f"{peaks[name]:,.0f}"])
    return markdown(["loss", "s", "x limit", "peak MiB"], rows)


def _preamble(options: argparse.Namespace, is_gpu: bool) -> str:
    arithmetic = "bfloat16 autocast on float32 weights, times by the clock" if is_gpu else "float32, CPU time"
    device = torch.cuda.get_device_name() if is_gpu else "one thread"
    return (
        "## The loss head\n\n"
        f"One forward and backward of an output embedding and its cross entropy, {arithmetic}, {device}. Peak: above "
        "the weights, the hidden states and the targets, and with the gradients of the first two. Limit: the three "
        "products alone. eager: what a model of transformers does. torch's chunks: its linear_cross_entropy "
        f"with default options. Medians of {options.rounds} interleaved rounds, on a CPU each in a process of its own: "
        "the peak of a first call (of what is compiled: after it), the time of the next.\n\n"
        f"{describe_run('benchmarks.head', 'torch')}"
    )


if __name__ == "__main__":
    main()
