"""A Llama of 1B shape trained on one GPU: tokens/s, MFU, memory and losses beside the HF Trainer and its options.

python -m benchmarks.gpu --write
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_contender import CONTENDERS, OURS, QUICK, SIZES, Shape, matrix_products
from benchmarks.table import Measure, describe_run, last_said, markdown, publish, publish_reason, read_options

HF, HF_LIGER, HF_COMPILED, TITAN, PRODUCTS = (
    "HF Trainer", "HF Trainer, liger", "HF Trainer, torch_compile", "torchtitan", "matrix products",
)  # fmt: skip
PEERS = (HF, HF_LIGER, HF_COMPILED, TITAN)
NEEDS = {"liger": "liger_kernel"}
SECONDS_OF_ONE = 240
LOSS_BOUND = 0.01


def main() -> None:
    """Measure all contenders that time allows, and print or write the section."""
    options = read_options(
        "gpu",
        __doc__,
        minutes={"type": float, "default": 9.0, "help": "no contender is started or goes on afterwards"},
        only={"nargs": "+", "default": [], "help": "these contenders, hfdist and the HF Trainer"},
    )
    if not torch.cuda.is_available() and not options.quick:
        publish_reason(options, "no CUDA device is at hand")
        return
    shape = QUICK if options.quick else SIZES
    found = _run_all(shape, options)
    measures = _measures(found)
    publish(options, "gpu", _section(options, shape, found), measures)


def _run_all(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """What each contender gives in a process of its own, or why it gives nothing; the most important ones first."""
    end = time.monotonic() + 60 * options.minutes
    found: dict[str, Any] = {PRODUCTS: matrix_products()}
    sys.stderr.write(f"{PRODUCTS}: {found[PRODUCTS]}\n")
    for name in CONTENDERS:
        if options.only and name not in (OURS, HF, *options.only):
            continue
        until = min(end, time.monotonic() + SECONDS_OF_ONE)
        refusal = "not in a quick run" if options.quick and name not in (OURS, HF) else None
        found[name] = refusal or run_one(name, shape, until)
        sys.stderr.write(f"{name}: {found[name]}\n")
    # It brings a trainer, a loader and a model of its own: what it prints could not be compared loss by loss.
    installed = find_spec("torchtitan") is not None
    found[TITAN] = "installed, but has no driver here" if installed else "not installed"
    return found


def run_one(name: str, shape: Shape, end: float) -> Any:
    """Give the figures of a contender, run in a process of its own until a time at most; or why there are none."""
    missing = [package for word, package in NEEDS.items() if word in name and find_spec(package) is None]
    if missing:
        return f"{missing[0]} is not installed"
    seconds = end - time.monotonic()
    if seconds < 1:
        return "no time was left"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.gpu_contender", name, json.dumps(shape._asdict()), str(out)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=_ROOT)
        except subprocess.TimeoutExpired:
            return f"not done after {seconds:.0f} s"
        if ended.returncode == 0 and out.is_file():
            return json.loads(out.read_text())
        said = last_said(ended.stderr) or f"exit status {ended.returncode}"
        return said[:200]


_ROOT = Path(__file__).resolve().parents[1]


def _measures(found: dict[str, Any]) -> list[Measure]:
    ours, products = found[OURS], found[PRODUCTS]
    if isinstance(ours, str):
        sys.exit(f"hfdist: {ours}")
    best = max((found[n]["tokens_per_second"] for n in PEERS if isinstance(found.get(n), dict)), default=None)
    hf = found.get(HF)
    is_gpu = torch.cuda.is_available()
    speed_goal = is_gpu and isinstance(hf, dict) and best is not None
    return [
        Measure(
            what="a Llama of 1B shape, 4k tokens a sequence, bf16",
            unit="tokens/s",
            ours=ours["tokens_per_second"],
            peers=_figures(found, "tokens_per_second"),
            goal=">= 1.5x HF Trainer, >= 1.03x the best",
            is_met=(
                ours["tokens_per_second"] >= max(1.5 * hf["tokens_per_second"], 1.03 * best) if speed_goal else None
            ),
        ),
        Measure(
            what="its MFU",
            unit="TFLOP/s",
            ours=ours["flops_per_second"] / 1e12,
            limits={"device by its data sheet": _peak(ours), PRODUCTS: products["flops_per_second"] / 1e12},
            goal=">= 0.52 of the data sheet",
            is_met=ours["mfu"] >= 0.52 if is_gpu and ours["mfu"] is not None else None,
        ),
        Measure(
            what="its peak memory",
            unit="GiB",
            ours=ours["peak_bytes"] / 2**30,
            peers={n: v / 2**30 if isinstance(v, float) else v for n, v in _figures(found, "peak_bytes").items()},
            goal="<= 0.6x HF Trainer",
            is_met=ours["peak_bytes"] <= 0.6 * hf["peak_bytes"] if is_gpu and isinstance(hf, dict) else None,
        ),
    ]


def _peak(ours: dict[str, Any]) -> float | str:
    return "unknown" if ours["mfu"] is None else ours["flops_per_second"] / ours["mfu"] / 1e12


def _figures(found: dict[str, Any], key: str) -> dict[str, float | str]:
    return {n: found[n] if isinstance(found[n], str) else float(found[n][key]) for n in PEERS if n in found}


def _section(options: argparse.Namespace, shape: Shape, found: dict[str, Any]) -> str:
    products, reference = found[PRODUCTS], found.get(HF)
    rows = []
    for name, figures in found.items():
        if isinstance(figures, str):
            rows.append([name, figures, *["-"] * 5])
        elif name != PRODUCTS:
            rows.append([name, *_cells(figures, found[OURS], products, reference)])
    header = ["trainer", "tokens/s", "x hfdist", "MFU", "of the products", "peak GiB", "losses differ by"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU, to show that it runs"
    return (
        "## One GPU\n\n"
        f"{shape.describe()}, on {device}. Each trainer in a process of its own, all from the same weights and "
        f"tokens, {shape.warm_up_steps} steps not counted. MFU: 6 x (parameters that are multiplied) + 12 x layers x "
        "width x tokens of a sequence, in FLOP a token (attention counted whole), of the data sheet. Products: "
        "bfloat16 matrix products of 8192 x 8192, in the same run. Peak: torch.cuda.max_memory_allocated. Losses: "
        f"largest relative difference from the HF Trainer's, means of {shape.steps_of_a_mean} steps; equal is under "
        f"{LOSS_BOUND}. "
        "hfdist, KEY=VALUE: its defaults but for this key.\n\n"
        f"{describe_run('benchmarks.gpu', 'torch', 'transformers')}\n\n"
        f"{markdown(header, rows)}"
    )


def _cells(figures: dict[str, Any], ours: Any, products: Any, reference: Any) -> list[str]:
    difference = "-"
    if isinstance(reference, dict):
        pairs = zip(figures["losses"], reference["losses"], strict=True)
        difference = f"{max(abs(one - other) / other for one, other in pairs):.1e}"
    return [
        f"{figures['tokens_per_second']:,.0f}",
        "-" if isinstance(ours, str) else f"{figures['tokens_per_second'] / ours['tokens_per_second']:.3f}",
        "-" if figures["mfu"] is None else f"{figures['mfu']:.1%}",
        f"{figures['flops_per_second'] / products['flops_per_second']:.1%}",
        f"{figures['peak_bytes'] / 2**30:.1f}",
        difference,
    ]


if __name__ == "__main__":
    main()
