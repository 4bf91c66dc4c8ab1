"""A cold start: from the first line of Python to the end of the first optimizer step, beside that of peers.

python -m benchmarks.start --write
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.overlay import UnavailableError, peer_environment, pinned
from benchmarks.rounds import medians_or_reasons
from benchmarks.table import Measure, describe_run, last_said, markdown, publish, read_options

OURS, HF, ACCELERATE, LIGHTNING = "hfdist", "HF Trainer", "accelerate", "lightning"
LIBRARIES = "imports of torch and transformers.Trainer"
CONFIG, HELP = "import hfdist.config", "--help"
COMPILED = {"blocks": "train.compile=blocks", "model": "train.compile=model"}
MOST_COLD, LEAST_STEADY = 0.8, 0.93
"""The goals of compiling by blocks: the first step's CPU time, and the steady speed, of those of the whole model."""

_ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Measure all, show the tables, and write them down if asked to."""
    options = read_options("start", __doc__, rounds=3)
    starts: dict[str, list[dict[str, list[float]]]] = {}
    missing: dict[str, str] = {}
    environments = {name: dict(os.environ) for name in (OURS, HF, ACCELERATE, LIBRARIES, CONFIG, HELP)}
    try:
        if options.quick:
            raise UnavailableError("not installed for --quick")
        environments[LIGHTNING] = peer_environment("lightning")
    except UnavailableError as error:
        missing[LIGHTNING] = str(error)

    def contender(name: str) -> float:
        stages = _start(name, environments[name])
        starts.setdefault(name, []).append(stages)
        return sum(cpu for cpu, _ in stages.values())

    contenders = {name: (lambda name=name: contender(name)) for name in environments}
    num_warm_up = 0 if options.quick else 1
    totals = medians_or_reasons(contenders, options.rounds, num_warm_up=num_warm_up)
    missing |= {name: total for name, total in totals.items() if isinstance(total, str)}
    if lost := set(missing) - {HF, ACCELERATE, LIGHTNING}:
        sys.exit("; ".join(f"{name}: {missing[name]}" for name in sorted(lost)))
    medians = {name: _median(runs[num_warm_up:]) for name, runs in starts.items() if name not in missing}
    compiled = {} if options.quick else {name: _compile(name) for name in COMPILED}
    publish(
        options, "start", _section(medians, missing, compiled, options.rounds), _measures(medians, missing, compiled)
    )


def _start(name: str, environment: Mapping[str, str]) -> dict[str, list[float]]:
    """CPU and wall seconds of the stages of one start, in a fresh process.

    Raises:
        UnavailableError: it fails.
    """
    if name == HELP:
        return {HELP: _command([sys.executable, "recipes/pretrain.py", "--help"], environment)}
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder) / "marks.json"
        command = [sys.executable, "-m", "benchmarks.starts", name, str(marks), str(Path(folder) / "run")]
        # No network: nothing that is measured may wait for one.
        ended = subprocess.run(
            command,
            cwd=_ROOT,
            env={**environment, "HF_HUB_OFFLINE": "1", "PYTHONPATH": _path(environment), "BEGAN": str(time.time())},
            check=False,
            capture_output=True,
            text=True,
        )
        if ended.returncode != 0:
            raise UnavailableError(last_said(ended.stderr) or f"exit status {ended.returncode}")
        stages: dict[str, list[float]] = json.loads(marks.read_text())
        return stages


def _path(environment: Mapping[str, str]) -> str:
    return os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(_ROOT)]))


def _command(command: list[str], environment: Mapping[str, str]) -> list[float]:
    before, begin = os.times(), time.perf_counter()
    subprocess.run(
        command, cwd=_ROOT, env={**environment, "PYTHONPATH": _path(environment)}, check=True, stdout=subprocess.DEVNULL
    )
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return [cpu, time.perf_counter() - begin]


def _compile(name: str) -> dict[str, float] | str:
    """First step and steady step of a compiled model in CPU seconds, with no cache from before."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": _path(os.environ), "TORCHINDUCTOR_CACHE_DIR": folder}
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.starts", "compile", f"{folder}/marks.json", name],
            cwd=_ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode != 0:
            return last_said(ended.stderr) or f"exit status {ended.returncode}"
        figures: dict[str, float] = json.loads(Path(f"{folder}/marks.json").read_text())
        return figures


def _median(runs: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {stage: [statistics.median(run[stage][clock] for run in runs) for clock in range(2)] for stage in runs[0]}


def _total(stages: dict[str, list[float]], clock: int = 0) -> float:
    return sum(seconds[clock] for seconds in stages.values())


def _measures(
    medians: dict[str, dict[str, list[float]]], missing: dict[str, str], compiled: dict[str, dict[str, float] | str]
) -> list[Measure]:
    peers: dict[str, float | str] = {
        name: missing[name] if name in missing else _total(medians[name]) for name in (HF, ACCELERATE, LIGHTNING)
    }
    ours = _total(medians[OURS])
    measures = [
        Measure(
            what="CPU time of a cold start up to the end of the first optimizer step",
            unit="s",
            ours=ours,
            peers=peers,
            limits={LIBRARIES: _total(medians[LIBRARIES])},
            goal="<= HF Trainer",
            is_met=ours <= _total(medians[HF]) if HF in medians else None,
        ),
        Measure(what="CPU time of `import hfdist.config`", unit="s", ours=_total(medians[CONFIG])),
        Measure(what="CPU time of `recipes/pretrain.py --help`", unit="s", ours=_total(medians[HELP])),
    ]
    blocks, model = compiled.get("blocks"), compiled.get("model")
    if isinstance(blocks, dict) and isinstance(model, dict):
        ratio = blocks["cold"] / model["cold"]
        measures += [
            Measure(
                what="CPU time of the first step, compiled by blocks",
                unit="s",
                ours=blocks["cold"],
                peers={"whole model": model["cold"]},
                goal=f"<= {MOST_COLD:g}x the whole model",
                is_met=ratio <= MOST_COLD,
            ),
            Measure(
                what="CPU time of a steady step, compiled by blocks",
                unit="s",
                ours=blocks["steady"],
                peers={"whole model": model["steady"], "not compiled": blocks["eager"]},
                goal=f"speed >= {LEAST_STEADY:g}x the whole model",
                is_met=model["steady"] / blocks["steady"] >= LEAST_STEADY,
            ),
        ]
    return measures


def _section(
    medians: dict[str, dict[str, list[float]]],
    missing: dict[str, str],
    compiled: dict[str, dict[str, float] | str],
    rounds: int,
) -> str:
    rows = []
    for name, stages in medians.items():
        detail = "; ".join(f"{stage} {cpu:.2f}" for stage, (cpu, _) in stages.items())
        rows.append([name, f"{_total(stages):.2f}", f"{_total(stages, 1):.2f}", detail])
    rows += [[name, "-", "-", reason] for name, reason in missing.items()]
    parts = [
        "## Cold start",
        "A fresh process each time, to the end of the first optimizer step of a Llama of 0.14 M parameters on one "
        "process. hfdist runs the steps of `recipes/pretrain.py` with `strategy=single model=tiny`: config, the "
        "standard "
        "library's source as data with tokenizer and tokens in the cache, held-out set, model, Trainer. The peers get "
        "sequences of token ids that are there, and read nothing: the HF Trainer, a loop with accelerate, and "
        "lightning, each in a plain script. CPU time of the process, files in the page cache; wall clock beside it. "
        f"Medians of {rounds} interleaved rounds, after one to warm up.",
        describe_run(
            "benchmarks.start", "torch", "transformers", "accelerate", pinned=pinned("lightning", "lightning")
        ),
        markdown(["start", "CPU s", "wall s", "CPU s of its stages"], rows),
    ]
    if compiled:
        parts.append(
            "A Llama of 8 layers (hidden 256, 2 x 128 tokens), forward and backward, compiled by inductor for the CPU "
            "with no cache from before; once each. CPU time, compilers it starts included."
        )
        table = [
            [COMPILED[name], *([f"{figures[key]:.3f}" for key in ("cold", "steady", "eager")]
                               if isinstance(figures, dict) else [figures, "-", "-"])]
            for name, figures in compiled.items()
        ]  # fmt: skip
        parts.append(markdown(["compiled", "first step s", "steady step s", "the same not compiled s"], table))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
