"""CPU time of an optimizer step in hfdist's Trainer and in others, over that of a bare loop, for a tiny model.

python -m benchmarks.loop --write
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.loop.contenders import BARE, LIGHTNING, LOOPS, OURS, RECIPE, Train, recipe_config, recipe_data
from benchmarks.loop.work import BATCHES, LOG_EVERY, MICRO_BATCH_SIZE, MODEL, SEQUENCE_LENGTH, Gate, Work
from benchmarks.overlay import UnavailableError, peer_environment
from benchmarks.rounds import interleave, medians
from benchmarks.table import Measure, describe_run, markdown, publish, read_options
from hfdist.testing import forget_parent

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
                         "num_key_value_heads": 4, "max_position_embeddings": SEQUENCE_LENGTH}  # fmt: skip
GOAL = 1.08
SAME_LOSS = 1e-4
"""Relative difference of losses in float32, whose sums are taken in other orders."""
_SECONDS_OF_BURST = {1: 0.1, 8: 0.2}
_SECONDS_OF_MICRO_BATCH = 0.0022


class FailedError(RuntimeError):
    """One of our own loops did not run."""


class Running:
    """A process that trains a burst of steps when it is asked to."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._receive()

    def burst(self) -> float:
        """Train, and give its CPU seconds."""
        self._connection.send_bytes(b"go")
        return float(self._receive())

    def end(self) -> dict[str, Any]:
        """Train the last burst, which is not measured as it holds the end of the training; give losses, version."""
        self._connection.send_bytes(b"go")
        ended: dict[str, Any] = self._receive()
        return ended

    def _receive(self) -> Any:
        try:
            return json.loads(self._connection.recv_bytes())
        except EOFError as error:
            raise FailedError("a loop has ended before its time: see its traceback above") from error


@dataclass(frozen=True)
class Result:
    """Result of one number of micro batches a step."""

    seconds: dict[str, float | str]
    """Seconds of a step, by loop; or why there is none."""
    versions: dict[str, str]
    largest_difference: float
    """Largest relative difference of any loss of any loop from that of the bare loop."""
    final_loss: float


def measure(work: Work, num_rounds: int, *, only: Sequence[str] = (), with_lightning: bool = True) -> Result:
    """Run all loops side by side, a burst of each in turn.

    Raises:
        FailedError: a loop of this environment fails, or the losses differ.
    """
    missing: dict[str, float | str] = {}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(_forked(train, work)) for name, train in LOOPS.items() if not only or name in only
        }
        try:
            if with_lightning:
                running[LIGHTNING] = stack.enter_context(_lightning(work))
            elif not only:
                missing[LIGHTNING] = "not asked for by --quick"
        except (UnavailableError, FailedError) as error:
            missing[LIGHTNING] = str(error)
        bursts: dict[str, Callable[[], float]] = {name: loop.burst for name, loop in running.items()}
        figures = medians(interleave(bursts, num_rounds))
        ends = {name: loop.end() for name, loop in running.items()}
    expected = ends[BARE]["losses"]
    differences = {name: _largest_difference(end["losses"], expected) for name, end in ends.items()}
    if max(differences.values()) > SAME_LOSS:
        raise FailedError(f"the loops did not train the same: relative differences of losses {differences}")
    seconds: dict[str, float | str] = {name: figure / work.steps_per_burst for name, figure in figures.items()}
    versions = {name: end["version"] for name, end in ends.items()}
    return Result(seconds | missing, versions, max(differences.values()), expected[-1])


def _largest_difference(losses: list[float], expected: list[float]) -> float:
    return max(abs(one - other) / other for one, other in zip(losses, expected, strict=True))


@contextmanager
def _forked(train: Train, work: Work) -> Iterator[Running]:
    """A fork has imported everything already."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_in_fork, args=(train, work, theirs))
    process.start()
    theirs.close()
    try:
        yield Running(ours)
    finally:
        process.kill()
        process.join()


def _in_fork(train: Train, work: Work, connection: Connection) -> None:
    forget_parent()
    try:
        train(work, Gate(connection, work.steps_per_burst))
    except BaseException:
        traceback.print_exc()
    finally:
        # The parent reads the end of the file.
        connection.close()


@contextmanager
def _lightning(work: Work) -> Iterator[Running]:
    work.write()
    ours, theirs = multiprocessing.Pipe()
    descriptor = theirs.fileno()
    command = [sys.executable, "-m", "benchmarks.loop.lightning_loop", work.folder, str(descriptor)]
    process = subprocess.Popen(command, env=peer_environment("lightning"), pass_fds=[descriptor])
    theirs.close()
    try:
        yield Running(ours)
    finally:
        process.kill()
        process.wait()


def prepare(folder: Path, accumulation: int, num_rounds: int, num_steps: int) -> Work:
    """Write the model, and the batches that the recipe's own stream gives."""
    folder.mkdir()
    work = Work(
        folder=str(folder),
        accumulation=accumulation,
        # One burst to warm up before the rounds, and one after them.
        num_bursts=num_rounds + 2,
        steps_per_burst=num_steps,
    )
    config = recipe_config(work)
    data = recipe_data(config)
    batches = iter(data.stream.loader(batch_size=MICRO_BATCH_SIZE))
    taken = [next(batches) for _ in range(work.num_steps * accumulation)]
    save_file({name: torch.stack([batch[name] for batch in taken]) for name in taken[0]}, folder / BATCHES)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(data.tokenizer), **SIZES)).save_pretrained(folder / MODEL)
    return work


def main() -> None:
    """Measure with one micro batch a step, and with eight."""
    accumulation = {"type": int, "nargs": "+", "choices": sorted(_SECONDS_OF_BURST), "default": [1, 8]}
    options = read_options("loop", __doc__, rounds=25, accumulation=accumulation)
    logging.getLogger("hfdist").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for accumulation in options.accumulation:
            num_steps = _num_steps(accumulation, options)
            work = prepare(Path(folder) / str(accumulation), accumulation, options.rounds, num_steps)
            results[accumulation] = measure(work, options.rounds, with_lightning=not options.quick)
    section = _section(results, options)
    publish(options, "loop", section, [_measure(accumulation, result) for accumulation, result in results.items()])


def _num_steps(accumulation: int, options: argparse.Namespace) -> int:
    """Steps of a burst: a multiple of `LOG_EVERY`, so that all bursts do the same."""
    seconds = 0.02 if options.quick else _SECONDS_OF_BURST[accumulation]
    return max(1, round(seconds / (_SECONDS_OF_MICRO_BATCH * accumulation) / LOG_EVERY)) * LOG_EVERY


def _measure(accumulation: int, result: Result) -> Measure:
    milliseconds = {name: 1000 * value if isinstance(value, float) else value for name, value in result.seconds.items()}
    ours, bare = milliseconds.pop(OURS), milliseconds.pop(BARE)
    assert isinstance(ours, float)
    assert isinstance(bare, float)
    return Measure(
        what=f"CPU time of a step, {accumulation} micro batch{'es' * (accumulation > 1)}",
        unit="ms",
        ours=ours,
        peers={name: milliseconds[name] for name in milliseconds if name != RECIPE},
        limits={BARE: bare},
        goal=f"at most {GOAL} of the bare loop",
        is_met=ours / bare <= GOAL,
    )


def _section(results: dict[int, Result], options: argparse.Namespace) -> str:
    header = ["loop"]
    for accumulation in results:
        header += [f"{accumulation} micro: ms a step", "x bare"]
    versions = {name: v for result in results.values() for name, v in result.versions.items()}
    rows = []
    for name in next(iter(results.values())).seconds:
        row = [f"{name} ({versions[name]})" if name in versions else name]
        for result in results.values():
            value, bare = result.seconds[name], result.seconds[BARE]
            if isinstance(value, str):
                row += [value, "-"]
            else:
                row += [f"{1000 * value:.3f}", f"{value / float(bare):.3f}"]
        rows.append(row)
    difference = max(result.largest_difference for result in results.values())
    return (
        "## Trainer loop\n\n"
        f"A Llama of one layer of width {SIZES['hidden_size']}, micro batches of {MICRO_BATCH_SIZE} x "
        f"{SEQUENCE_LENGTH} tokens, fused AdamW, a linear schedule, clipping by the norm, a loss read every "
        f"{LOG_EVERY} steps, float32. All loops train the same model on the same batches; all but the recipe read "
        "them from memory, with no loader. The recipe is the shipped one: stream, ledger, metrics, bar and watch, all "
        "of its reading in this process. CPU time of the process, bursts of "
        f"{' and '.join(str(_num_steps(one, options)) for one in results)} steps of each in turn, medians of "
        f"{options.rounds} rounds after one to warm up. All loops gave the same losses to a relative {difference:.1g}."
        "\n\n"
        f"{describe_run('benchmarks.loop', 'torch', 'transformers', 'accelerate')}\n\n"
        f"{markdown(header, rows)}"
    )


if __name__ == "__main__":
    main()
