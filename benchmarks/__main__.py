"""All benchmarks, one after the other, and their one table: hfdist beside its peers and the machine's limits.

python -m benchmarks --write
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.table import (
    MEASURED,
    RESULTS,
    Measure,
    describe_run,
    last_said,
    read_measures,
    remember,
    table,
    write_section,
)

LINES = {
    "Trainer loop": "benchmarks.loop",
    "pipeline, emulated": "benchmarks.pipeline",
    "pipeline, a small Llama": "benchmarks.pipeline_llama",
    "a small Llama, two ranks": "benchmarks.mesh",
    "small models, by axis": "benchmarks.mesh.costs",
    "131,072 tokens, four ranks": "benchmarks.mesh.memory",
    "loader": "benchmarks.loader",
    "resume": "benchmarks.resume",
    "text": "benchmarks.data",
    "packing": "benchmarks.packing",
    "packed documents": "benchmarks.packed",
    "checkpoint": "benchmarks.checkpoint",
    "replicas": "benchmarks.replicas",
    "mirror": "benchmarks.mirror",
    "loss head": "benchmarks.head",
    "LoRA of experts": "benchmarks.experts",
    "evaluation": "benchmarks.evaluation",
    "one GPU": "benchmarks.gpu",
    "rollouts": "benchmarks.rollouts",
    "uneven answers": "benchmarks.answers",
    "start": "benchmarks.start",
    "growth": "benchmarks.growth",
    "fine-tuning": "benchmarks.finetune",
}
_ROOT = Path(__file__).resolve().parents[1]
_SHOWN_LINES = 2
_MOST_SECONDS = 1800
"""A line that takes longer hangs."""


def main() -> None:
    """Run all lines or those that are named; one that fails does not stop the others, but the exit status tells."""
    options = _options()
    lines: dict[str, list[Measure] | str] = {}
    failed = []
    for name, module in LINES.items():
        short = module.removeprefix("benchmarks.")
        if not options.only or short in options.only:
            try:
                lines[name] = _run(module, _passed_on(options))
            except RuntimeError as error:
                lines[name] = str(error)
                failed.append(name)
        if options.write and (name in lines or (MEASURED / f"{short}.json").is_file()):
            lines[name] = remember(short, lines.get(name, "not in this run"))
    days = "Each row is of the day that it names; the versions of its peers stand in its own section."
    section = f"## All lines\n\n{days}\n\n{describe_run('benchmarks', 'torch')}\n\n{table(lines)}"
    sys.stdout.write(f"\n{section}\n")
    if options.write:
        write_section(RESULTS, "table", section)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _run(module: str, arguments: Sequence[str]) -> list[Measure] | str:
    """Rows of one benchmark, run in a process of its own, or why this machine cannot run it.

    Raises:
        RuntimeError: it failed, with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        measures = Path(folder) / "measures.json"
        command = [sys.executable, "-m", module, "--measures", str(measures), *arguments]
        sys.stdout.write(f"\n$ python -m {module} {' '.join(arguments)}\n")
        sys.stdout.flush()
        log = Path(folder) / "log"
        # A file, not a pipe: a process that outlives its line would keep a pipe open, and this one waiting.
        with log.open("w") as errors:
            process = subprocess.Popen(command, cwd=_ROOT, stderr=errors, start_new_session=True)
            try:
                status = f"exit status {process.wait(_MOST_SECONDS)}"
            except subprocess.TimeoutExpired:
                status = f"not done after {_MOST_SECONDS} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode == 0 and measures.is_file():
            return read_measures(measures)
        said = log.read_text()
        sys.stderr.write(said)
        raise RuntimeError(f"{status}: {last_said(said, _SHOWN_LINES)}")


def _passed_on(options: argparse.Namespace) -> list[str]:
    return [flag for flag, is_given in (("--quick", options.quick), ("--write", options.write)) if is_given]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="the smallest sizes and one round: do they all run")
    how.add_argument("--write", action="store_true", help=f"put the table and all sections into {RESULTS.name}")
    names = [module.removeprefix("benchmarks.") for module in LINES.values()]
    parser.add_argument("--only", nargs="+", choices=names, default=[], help="these lines alone")
    return parser.parse_args()


if __name__ == "__main__":
    main()
