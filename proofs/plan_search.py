"""Is the search's first choice the fastest? `python -m proofs.plan_search docs/plan.md` runs all layouts.

Each layout of the space that can be run trains for a few steps. The fastest of them and the search's choice do so again
in turns, so that what else the machine does falls on all alike. The table between the marks of the page is new then.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import deepspeed  # noqa: F401  # once, and not in each rank: it takes seconds

from hfdist.config.composition.compose import compose_config
from hfdist.config.strategy import Offload
from hfdist.models.architecture import find_architecture
from hfdist.planning.searching.evaluate import Candidate, Evaluator, Machines
from hfdist.planning.searching.layout_space import Space
from hfdist.planning.searching.search import measure
from hfdist.planning.timing.hardware import measure_cpu
from hfdist.records import RunFolder, read_lines
from hfdist.run import prepare_run  # noqa: F401  # as above
from hfdist.testing import RankFailed, run_ranks
from recipes.pretrain import main

BEGIN, END = "<!-- search: begin -->", "<!-- search: end -->"
NUM_STEPS, NUM_UNSTEADY, NUM_TURNS, NUM_FASTEST = 8, 3, 3, 4
COMMON = (
    "model=tiny", "train.global_batch_size=8", "train.micro_batch_size=1", "data.lanes=8", "data.workers=0",
    "data.eval_fraction=0", "checkpoint=none", "report=quiet", "optimizer.warmup_steps=1",
    f"train.max_steps={NUM_STEPS}",
)  # fmt: skip
_FIELDS = "num_attention_heads: 4, num_key_value_heads: 4, vocab_size: 2048, max_position_embeddings: 512"


@dataclass(frozen=True)
class Case:
    """A model on so many ranks."""

    name: str
    ranks: int
    overrides: tuple[str, ...]
    most: int | None = None
    """Of very many layouts so many of the fastest by the search run, and as many that are spread over the others."""


def _llama(width: int, inner: int, blocks: int, length: int) -> tuple[str, ...]:
    fields = f"hidden_size: {width}, intermediate_size: {inner}, num_hidden_layers: {blocks}, {_FIELDS}"
    return f"model.config={{{fields}}}", f"data.sequence_length={length}"


CASES = (
    Case("wide, 2 ranks", 2, _llama(256, 704, 2, 128)),
    Case("deep, 2 ranks", 2, _llama(128, 352, 8, 64), most=6),
    Case("long, 4 ranks", 4, _llama(128, 352, 4, 256), most=8),
)


@dataclass(frozen=True)
class Outcome:
    """What the search chose, beside what was fastest."""

    case: Case
    chosen: Candidate
    num_run: int
    num_all: int
    chosen_seconds: float
    best_seconds: float
    best: str

    @property
    def loss(self) -> float:
        """By what share a step of the choice takes longer than one of the fastest."""
        return self.chosen_seconds / self.best_seconds - 1


def prove(case: Case) -> Outcome:
    """Run the layouts of a case."""
    config = compose_config([*COMMON, *case.overrides])
    hardware = measure_cpu(case.ranks)
    machines = Machines(hardware=hardware, usable_bytes=hardware.memory_bytes)
    architecture = find_architecture(config.model, sequence_length=config.data.sequence_length)
    model = measure(config, architecture, machines, processes=case.ranks)
    evaluator = Evaluator(config, model, machines)
    layouts = Space(config, model, case.ranks, machines.per_machine).layouts()
    fitting = [one for layout in layouts if (one := evaluator.evaluate(layout)) is not None]
    ranked = every = sorted(fitting, key=lambda one: one.time.seconds)
    if case.most is not None:
        ranked = every[: case.most] + every[case.most :: max(1, len(every) // case.most)]
    # What refuses to run is no choice.
    once = {number: median(times) for number, times in _run_in_turns(case, dict(enumerate(ranked)), 1).items()}
    first = min(once)
    again = {first, *sorted(once, key=once.__getitem__)[:NUM_FASTEST]}
    seconds = _run_in_turns(case, {number: ranked[number] for number in again}, NUM_TURNS)
    runs = {number: median(times) for number, times in seconds.items()}
    best = min(runs, key=runs.__getitem__)
    return Outcome(
        case=case,
        chosen=ranked[first],
        num_run=len(once),
        num_all=len(every),
        chosen_seconds=runs[first],
        best_seconds=runs[best],
        best=" ".join(ranked[best].overrides) or "as asked",
    )


def _run_in_turns(case: Case, candidates: Mapping[int, Candidate], num_turns: int) -> dict[int, list[float]]:
    seconds: dict[int, list[float]] = defaultdict(list)
    for _ in range(num_turns):
        for number, one in candidates.items():
            with tempfile.TemporaryDirectory() as folder:
                seconds[number] += _step_seconds(case, one, Path(folder) / "run")
    return {number: times for number, times in seconds.items() if times}


def _step_seconds(case: Case, candidate: Candidate, folder: Path) -> list[float]:
    """Seconds of steady steps; none: the run refused the layout."""
    assert candidate.layout.offload is Offload.none
    config = compose_config([*COMMON, *case.overrides, *candidate.overrides, f"run.dir={folder}"])
    try:
        run_ranks(main.__wrapped__, case.ranks, config, group=case.ranks > 1)
    except RankFailed:
        return []
    lines = [line["step_seconds"] for line in read_lines(RunFolder(folder).metrics) if "step_seconds" in line]
    return lines[NUM_UNSTEADY:]


def table(outcomes: Iterable[Outcome]) -> str:
    """The rows of the page."""
    lines = ["| model | layouts run | the search's choice | its step | fastest | its step | choice is slower by |"]
    lines.append("|---|---|---|---|---|---|---|")
    for one in outcomes:
        chosen = " ".join(one.chosen.overrides) or "as asked"
        cells = [
            one.case.name,
            f"{one.num_run} of {one.num_all}",
            f"`{chosen}`",
            f"{1000 * one.chosen_seconds:.0f} ms",
            f"`{one.best}`",
            f"{1000 * one.best_seconds:.0f} ms",
            f"{100 * one.loss:.1f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Put a text between the marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    done: list[Outcome] = []
    for one in CASES:
        done.append(prove(one))
        write(Path(sys.argv[1]), table(done))
