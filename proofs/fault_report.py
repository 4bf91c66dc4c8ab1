"""Every moment, victim and layout of a kill; `python -m proofs.fault_report FILE` writes the table."""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
import transformers

from proofs.fault_points import Moment, Place
from proofs.faults import (
    LAYOUTS,
    MAX_STEPS,
    NUM_RANKS,
    SAVE_EVERY,
    Case,
    Outcome,
    Reference,
    Victim,
    make_config,
    run_case,
    run_whole,
)
from tests.imports import import_all


def all_cases() -> Iterator[Case]:
    """Every moment, victim and layout; a third of the kills falls before the first checkpoint."""
    for number, (moment, victim, layout) in enumerate(product(Moment, Victim, LAYOUTS)):
        place, is_early = moment.place, number % 3 == 0 and moment is not Moment.prune
        if place in (Place.end, Place.export):
            step = MAX_STEPS
        elif place is Place.step:
            step = 1 if is_early else 2 * SAVE_EVERY + 1
        else:
            step = SAVE_EVERY if is_early else 2 * SAVE_EVERY
        yield Case(layout, moment, victim, step, rank=(number + number // len(LAYOUTS)) % NUM_RANKS)


def write_report(path: Path, cases: list[Case]) -> bool:
    """Run all cases, write what came out as a Markdown table, and give whether all runs became equal."""
    begin = time.monotonic()
    cells: dict[tuple[Moment, Victim, str], str] = {}
    seconds: dict[Moment, float] = dict.fromkeys(Moment, 0.0)
    references: dict[str, Reference] = {}
    num_equal = 0
    for case in cases:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if case.layout not in references:
                references[case.layout] = run_whole(folder, make_config(folder / "whole", case.layout))
            try:
                outcome = run_case(folder, case, references[case.layout])
                num_equal += outcome.is_equal
                cell = _cell(case, outcome)
                seconds[case.moment] += outcome.seconds
            except AssertionError as error:
                cell = f"**{str(error).splitlines()[0]}**"
                sys.stderr.write(f"{error}\n")
        cells[case.moment, case.victim, case.layout] = cell
        sys.stderr.write(f"{case}: {cell}\n")
    lines = _head(num_equal, len(cases), time.monotonic() - begin)
    for moment, victim in product(Moment, Victim):
        row = [cells.get((moment, victim, layout), "") for layout in LAYOUTS]
        total = f"{seconds[moment]:.0f}" if victim is list(Victim)[-1] else ""
        lines.append(f"| {moment.title} | {victim.value} | {' | '.join(row)} | {total} |")
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return num_equal == len(cases)


def _cell(case: Case, outcome: Outcome) -> str:
    whole = "" if outcome.whole is None else f"{_name(outcome.whole)} whole, "
    who = f"rank {case.rank}, " if case.victim is Victim.rank else ""
    end = "equal" if outcome.is_equal else "**differs**"
    return f"{who}step {case.step}: {whole}from {_name(outcome.resumed)}, {end}"


def _name(step: int) -> str:
    return str(step) if step else "none"


def _head(num_equal: int, num_cases: int, seconds: float) -> list[str]:
    return [
        "# Runs that are killed",
        "",
        f"A run of {MAX_STEPS} steps on {NUM_RANKS} gloo ranks, with dropout, that saves every {SAVE_EVERY} steps and",
        "keeps one checkpoint. Someone is killed (SIGKILL) at a named moment of a step, or of the save of a step; then",
        "the same command goes on. A cell says the step, the newest checkpoint all bytes of which verified after the",
        "kill, the one that the run went on from, and whether it became *equal* to the run that nobody killed: the",
        "same training and held-out losses, SHA-256 of the exported weights, and ledger, byte by byte. When the",
        "launcher is killed the ranks live on, as under torchrun, and finish the run; the start that follows at once",
        "waits until they have let go of the folder.",
        "",
        f"{num_equal} of {num_cases} became equal, in {seconds / 60:.0f} minutes. Written by `make faults` with torch "
        f"{torch.__version__.partition('+')[0]}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}.",
        "",
        "```\nmake faults\n```",
        "",
        f"| moment | killed | {' | '.join(LAYOUTS)} | seconds |",
        f"|---|---|{'---|' * len(LAYOUTS)}---|",
    ]


if __name__ == "__main__":
    import_all()
    torch.set_num_threads(1)
    sys.exit(0 if write_report(Path(sys.argv[1]), list(all_cases())) else 1)
