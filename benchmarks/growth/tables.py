"""What growth was measured to be, in words, tables and rows of the one table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TypeVar

from benchmarks.growth import control, corpora, files, runs, saves, theory
from benchmarks.growth.plots import activation_bytes, mean, ring_bytes, state_bytes
from benchmarks.growth.training import Costs
from benchmarks.table import Measure, markdown

_MOST_FIRST_SECONDS, _MOST_LATER_SECONDS, _MOST_SAVE_MB = 2.0, 0.2, 200
_MOST_INDEXED_SECONDS = 0.1
_MOST_OF_FORMULA, _MOST_EXPONENT_OF_LAYERS, _MOST_EXPONENT_OF_CORPUS = 1.05, 1.1, 0.2
_CONTROL_GOALS = {
    ("control group", "descriptors"): 0.35,
    ("control group", "reduce_bytes"): 0.35,
    ("watch", "messages"): 0.35,
    ("watch", "cpu_seconds"): 0.35,
}
_MB = 1e6

Of = TypeVar("Of")
"""What was measured at one size."""
Described = tuple[str, list[Measure]]


def ranks_section(costs: runs.ByRanks) -> Described:
    """By the number of ranks."""
    (alone,) = next(iter(costs.values()))[1]
    parameters, small = alone.num_parameters, alone.num_small_parameters
    rows, measures = [], []
    for name, by_ranks in costs.items():
        for num_ranks, ranks in by_ranks.items():
            if num_ranks == 1 and name != "ddp":
                continue
            expected = theory.sent_bytes(name, num_ranks, parameters, activation_bytes())
            state = theory.state_bytes(name, num_ranks, parameters, small)
            rows.append([name if num_ranks > 1 else "one process", str(num_ranks), *_cells(ranks, expected, state)])
        last = max(by_ranks)
        measures += _rank_measures(name, last, by_ranks[last], alone)
    header = ["layout", "ranks", "CPU ms", "sent MB", "x formula", "by sockets", "state MB", "x formula",
              "peak heap MB", "save s", "save CPU s", "saved MB"]  # fmt: skip
    text = (
        f"A Llama of {parameters / 1e6:.1f} M parameters in float32, {4 * parameters / _MB:.1f} MB, through "
        f"`hfdist.Trainer`; a global batch of {runs.GLOBAL_BATCH_SIZE} sequences of {runs.SEQUENCE_TOKENS} tokens at "
        "every number of ranks. Means over the ranks. CPU: of all threads of a rank, the median step. Sent: what a "
        "rank sends in a step, counted at each collective that any library starts, as a ring would run it; by "
        "sockets: what the kernel has counted that gloo has sent (its reduce-scatter is an all-reduce, and so sends "
        "twice as much). Formula: 2(N-1)/N times the parameters for DDP and ZeRO-1/2, and for ZeRO-3 while it may "
        "keep what it has gathered, 3(N-1)/N where it may not; in a pipeline the hidden states, forward and "
        "backward. State: weights and optimizer between steps; ZeRO-3 keeps small tensors whole besides. Peak heap: "
        "the most that C and C++ had allocated in a step, above what there was before the model, whether touched or "
        "not: with DeepSpeed its two buckets of 50 M elements, 400 MB at any size of the model (one under ZeRO-3). A "
        "save: all ranks' CPU time, into one checkpoint.\n\n" + markdown(header, rows)
    )
    return text, measures


def layers_section(costs: runs.ByLayers) -> Described:
    """By the number of layers."""
    figures: dict[str, Callable[[list[Costs]], float]] = {
        "a step": lambda ranks: mean(ranks, lambda rank: rank.step_cpu_seconds),
        "the start": lambda ranks: mean(ranks, lambda rank: rank.start_cpu_seconds),
    }
    layers = list(next(iter(costs.values())))
    judged = {what: f"CPU time of {what} by layers" for what in figures}
    rows, measures = _growths(costs, figures, judged, _MOST_EXPONENT_OF_LAYERS, digits=".3f", fitted=layers[-2:])
    text = (
        f"Llamas of {layers[0]} to {layers[-1]} thin layers (hidden size {runs.THIN_SIZES['hidden_size']}) on "
        f"{runs.NUM_LAYER_RANKS} ranks: CPU seconds of a rank, of the median step, and of the start: from before the "
        "model is made to the end of the first step, less a step. All modules are imported before. The last column is "
        "the exponent from the last but one number of layers to the last; linear is 1.\n\n"
        + markdown(["layout", "CPU s of", *(f"{n} layers" for n in layers), "exponent"], rows)
    )
    return text, measures


def corpora_section(costs: runs.ByTimes) -> Described:
    """By the size of the corpus."""
    figures: dict[str, Callable[[corpora.Costs], float]] = {
        "first open, CPU ms": lambda one: 1e3 * one.open_cpu_seconds,
        "open again, CPU ms": lambda one: 1e3 * one.open_again_cpu_seconds,
        "first batch, CPU ms": lambda one: 1e3 * one.first_batch_cpu_seconds,
        "later batches, CPU ms each": lambda one: 1e3 * one.batch_cpu_seconds,
        "resume, CPU ms": lambda one: 1e3 * one.resume_cpu_seconds,
        "cursor, bytes": lambda one: one.cursor_bytes,
        "heap, MB": lambda one: one.heap_bytes / _MB,
    }
    times = list(next(iter(costs.values())))
    bounded = ("first batch", "later", "resume", "cursor")
    judged = {what: f"{what} by corpus size" for what in figures if what.startswith(bounded)}
    rows, measures = _growths(costs, figures, judged, _MOST_EXPONENT_OF_CORPUS, digits=".3g", fitted=times)
    text = (
        "Corpora of one size, and of 10 and 100 times as many documents: token files (8, of 2,500 documents of 50 "
        "tokens each, and larger), parquet (2 files of 100 rows, and more of them), JSON lines (2 files of 100 rows, "
        f"and larger). Sequences of {corpora.SEQUENCE_TOKENS}, batches of {corpora.MICRO_BATCH_SIZE}, "
        f"{corpora.LANES} lanes, no loader process. A resume comes after {corpora.NUM_BATCHES} batches, with the "
        "corpus open. Heap: what C and C++ hold after all of that; a lane reads a block of rows at a time, of up to "
        "1,024 once there are that many for each of 16 blocks a lane.\n\n"
        + markdown(["corpus", "what", *(f"{factor}x" for factor in times), "exponent"], rows)
    )
    return text, measures


def files_section(costs: runs.ByFiles) -> Described:
    """By the number of files."""
    figures: dict[str, Callable[[files.Costs], float]] = {
        "hfdist index, CPU s": lambda one: one.index_cpu_seconds,
        "a start that opens the files, CPU s": lambda one: one.opened_cpu_seconds,
        "a start with the index, CPU s": lambda one: one.indexed_cpu_seconds,
        "its heap, MB": lambda one: one.indexed_heap_bytes / _MB,
        "the index, MB": lambda one: one.index_bytes / _MB,
    }
    rows, measures = [], []
    for kind, by_files in costs.items():
        for what, value in figures.items():
            points = {num_files: value(one) for num_files, one in by_files.items()}
            slope = theory.exponent(points)
            rows.append([kind, what, *(f"{figure:.3g}" for figure in points.values()), f"{slope:.2f}"])
        last = max(by_files)
        seconds = by_files[last].indexed_cpu_seconds
        measures.append(
            Measure(
                what=f"a start with an index of {last:,} files, {kind}",
                unit="CPU s",
                ours=seconds,
                goal=f"<= {_MOST_INDEXED_SECONDS:g}",
                is_met=seconds <= _MOST_INDEXED_SECONDS,
            )
        )
    counts = list(next(iter(costs.values())))
    text = (
        "More and more files of four rows on a local disk. A start is that of each rank: the corpus open, and the "
        "first documents of a lane known; without an index it finds what an earlier start has left in the cache. Heap: "
        "what C and C++ hold after it, without what is mapped. Both ways have one fingerprint. The last column is the "
        "fitted exponent; linear is 1.\n\n"
        + markdown(["files", "what", *(f"{count:,} files" for count in counts), "exponent"], rows)
    )
    return text, measures


def saves_section(costs: runs.BySaves) -> Described:
    """By thousands of ranks."""
    figures: dict[str, tuple[Callable[[saves.Costs], float], float]] = {
        "first plan, CPU s": (lambda one: one.first_cpu_seconds, _MOST_FIRST_SECONDS),
        "later plan, CPU s": (lambda one: one.later_cpu_seconds, _MOST_LATER_SECONDS),
        "hashes told, CPU s": (lambda one: one.told_cpu_seconds, _MOST_LATER_SECONDS),
        "manifest on rank 0, CPU s": (lambda one: one.manifest_cpu_seconds, math.inf),
        "received, MB": (lambda one: one.received_bytes / _MB, math.inf),
        "peak, MB": (lambda one: one.peak_bytes / _MB, _MOST_SAVE_MB),
    }
    rows, measures = [], []
    for name, by_ranks in costs.items():
        for what, (value, most) in figures.items():
            points = {num_ranks: value(one) for num_ranks, one in by_ranks.items()}
            slope = theory.exponent(points)
            rows.append([name, what, *(f"{figure:.3g}" for figure in points.values()), f"{slope:.2f}"])
            last = max(points)
            if most < math.inf:
                what = f"save of 405B, {name}, {last:,} ranks: {what}"
                goal, is_met = f"<= {most:g}", points[last] <= most
                measures.append(Measure(what=what, unit="", ours=points[last], goal=goal, is_met=is_met))
    ranks = list(next(iter(costs.values())))
    text = (
        "The plan of a save of a Llama of 405 billion parameters with Adam's moments, on one rank of many: the one "
        "that is asked about most tensors. The other ranks are faked by the messages that they would send, so this is "
        "all that a rank computes, without the transport. Peak: of Python's objects. Hashes told: a rank hears that "
        "all have written. The manifest is that of rank 0, in its thread. The last column is the fitted exponent; "
        "linear is 1.\n\n" + markdown(["layout", "what", *(f"{n:,} ranks" for n in ranks), "exponent"], rows)
    )
    return text, measures


def control_section(costs: runs.ByControl) -> Described:
    """By ranks, and by thousands of them."""
    units = {"cpu_seconds": ("CPU ms", 1e3)}
    text = (
        f"Rank 0 of ranks with {control.MACHINE_RANKS} on a machine; machines are names of hosts. In a control group: "
        "connections and other descriptors once it was used in each way, the flags of a step, a gather of short texts. "
        "Of the watch: what comes in a second in which all is well, and the CPU time for that, without transport; the "
        "other ranks are faked. Beside each what a mesh and a star cost. The last column is the fitted exponent."
    )
    tables, measures = [], []
    for name, by_ranks in costs.items():
        rows = []
        for field in fields(next(iter(by_ranks.values()))):
            unit, times = next((units[end] for end in units if field.name.endswith(end)), ("", 1))
            points = {n: times * getattr(one, field.name) for n, one in by_ranks.items()}
            slope = theory.exponent(points)
            words = field.name.removesuffix("_cpu_seconds").replace("_", " ").replace("cpu seconds", "a second")
            what = f"{words}{f', {unit}' if unit else ''}"
            rows.append([what, *(f"{figure:.3g}" for figure in points.values()), f"{slope:.2f}"])
            if (name, field.name) in _CONTROL_GOALS:
                goal = _CONTROL_GOALS[name, field.name]
                what = f"exponent: {what} by ranks, {name}"
                measures.append(Measure(what=what, unit="", ours=slope, goal=f"<= {goal:g}", is_met=slope <= goal))
        tables.append(markdown([name, *(f"{n:,} ranks" for n in by_ranks), "exponent"], rows))
    return "\n\n".join([text, *tables]), measures


def _cells(ranks: list[Costs], expected_bytes: float, expected_state: float) -> list[str]:
    sent, state = mean(ranks, ring_bytes), mean(ranks, state_bytes)
    return [
        f"{1e3 * mean(ranks, lambda rank: rank.step_cpu_seconds):.0f}",
        f"{sent / _MB:.2f}",
        f"{sent / expected_bytes:.3f}" if expected_bytes else "-",
        f"{mean(ranks, lambda rank: rank.sent_bytes) / _MB:.2f}",
        f"{state / _MB:.1f}",
        f"{state / expected_state:.3f}",
        f"{mean(ranks, lambda rank: rank.peak_bytes) / _MB:.0f}",
        f"{max(rank.checkpoint_seconds for rank in ranks):.2f}",
        f"{sum(rank.checkpoint_cpu_seconds for rank in ranks):.2f}",
        f"{ranks[0].checkpoint_bytes / _MB:.1f}",
    ]


def _rank_measures(name: str, num_ranks: int, ranks: list[Costs], alone: Costs) -> list[Measure]:
    parameters = alone.num_parameters
    sent, state = mean(ranks, ring_bytes), mean(ranks, state_bytes)
    sent_limit = theory.sent_bytes(name, num_ranks, parameters, activation_bytes())
    state_limit = theory.state_bytes(name, num_ranks, parameters, alone.num_small_parameters)
    goal = f"<= {_MOST_OF_FORMULA:g} x formula"
    return [
        Measure(
            what=f"bytes that a rank sends in a step, {name}, {num_ranks} ranks",
            unit="MB",
            ours=sent / _MB,
            limits={"formula": sent_limit / _MB, "gloo's sockets": mean(ranks, lambda rank: rank.sent_bytes) / _MB},
            goal=goal,
            is_met=sent <= _MOST_OF_FORMULA * sent_limit,
        ),
        Measure(
            what=f"weights and optimizer on a rank, {name}, {num_ranks} ranks",
            unit="MB",
            ours=state / _MB,
            limits={"formula": state_limit / _MB},
            goal=goal,
            is_met=state <= _MOST_OF_FORMULA * state_limit,
        ),
    ]


def _growths(
    costs: Mapping[str, Mapping[int, Of]],
    figures: Mapping[str, Callable[[Of], float]],
    judged: Mapping[str, str],
    most: float,
    *,
    digits: str,
    fitted: Sequence[int],
) -> tuple[list[list[str]], list[Measure]]:
    """Rows of a table with the exponent of each figure, fitted at these sizes, and measures of those to be judged."""
    rows, measures = [], []
    for name, by_size in costs.items():
        for what, value in figures.items():
            points = {size: value(one) for size, one in by_size.items()}
            slope = theory.exponent({size: points[size] for size in fitted})
            rows.append([name, what, *(f"{figure:{digits}}" for figure in points.values()), f"{slope:.2f}"])
            if what in judged:
                exponent = f"exponent: {judged[what]}, {name}"
                measures.append(Measure(what=exponent, unit="", ours=slope, goal=f"<= {most:g}", is_met=slope <= most))
    return rows, measures
