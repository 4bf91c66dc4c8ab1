"""What goes with what, asked of the checks themselves: `python -m proofs.pages.goes_with docs/what-goes-with-what.md`.

Each option is composed once, each pair of two is put together and checked as before a run: no process group, no step.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from hfdist.config.checks.preflight import plan_run
from hfdist.config.checks.values import check_config
from hfdist.config.composition.compose import compose_config
from hfdist.config.conf_folder import list_options, shipped_folder
from hfdist.config.model import Attention
from hfdist.config.run import RunConfig
from hfdist.config.train import Compile, Precision
from hfdist.errors import ConfigError
from hfdist.verify.check.questions import needed_values

HEAD = """\
# What goes with what

Each table pairs two choices: *yes*, or the number of a [reason](#the-reasons). `adapter=lora` goes with
`strategy=tensor`, so this run trains:

```
hfdist pretrain model=tiny train.max_steps=20 adapter=lora adapter.merge=false strategy=tensor \\
    launch.processes=2 run.name=goes
```

All else is as in `model=tiny`, with 8 processes (`single`: 1) and `adapter.merge=false`; `moe` has a small Qwen3-MoE.
Micro batches have one sequence, which FlashAttention needs for packed documents. The default of a choice
(`adapter=none`, `train.precision=fp32`, `train.compile=auto`, `task=causal_lm`, `model.attention=auto`) goes with all.

The answers are those of the checks that a run makes before its processes know each other. A model, a device or a
package may refuse more, and then the run says so before its first step. `make docs` writes this page.
"""
_MODEL = ("model=tiny", "train.global_batch_size=64", "train.micro_batch_size=1", "data.lanes=8")
_ROWS = ("data=files", "data.sources.files.path=rows.jsonl", "train.epochs=null", "train.max_steps=20")
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
PROCESSES = 8
_SLOW = ("strategy", "adapter")
"""The pair that is also tried on the model, since what an adapter changes is seen on its layers alone."""

Pair = tuple[tuple[str, str], tuple[str, str]]


def axes() -> dict[str, list[str]]:
    """The choices with their values, but those that are defaults."""
    folder = shipped_folder()
    groups = {"strategy": None, "adapter": "none", "task": "causal_lm"}
    found = {group: [name for name in list_options(folder, group) if name != groups[group]] for group in groups}
    enums: dict[str, Any] = {"train.precision": Precision, "train.compile": Compile, "model.attention": Attention}
    defaults = (Precision.fp32, Compile.auto, Attention.auto)
    return found | {key: [one.value for one in kind if one not in defaults] for key, kind in enums.items()}


def refusal(pair: Pair, *, tries_model: bool = False) -> str | None:
    """Say why a pair is refused, as the message does; None: it goes."""
    chosen = dict(pair)
    try:
        config = _put_together(**{name.rpartition(".")[2]: value for name, value in chosen.items()})
        processes = 1 if config.strategy.data == 1 else PROCESSES
        strategy = _check(config, processes)
        if tries_model:
            _make(config, strategy)
    except ConfigError as error:
        what, hint = error.what.rstrip("."), f" Instead: {error.hint}." if error.hint else ""
        return f"{what[0].upper()}{what[1:]} (`{error.where}`).{hint}"
    return None


def page() -> str:
    """The whole page."""
    reasons = _Reasons()
    together: list[str] = []
    lines: list[str] = []
    for one, other in combinations(axes(), 2):
        table = list(_table(one, other, reasons))
        if any(set(row[1:]) - {"yes"} for row in table[1:]):
            lines += [f"## {one} and {other}\n", *_markdown(table), ""]
        else:
            together.append(f"* {one} and {other}")
    lines += ["## All others\n", "Each value goes with each:\n", *together, "", "## The reasons\n"]
    lines += [f"{number}. {reason}" for reason, number in reasons.numbers.items()]
    return HEAD + "\n" + "\n".join(lines) + "\n"


@dataclass
class _Reasons:
    """Reasons by their numbers, in the order in which they are met."""

    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, reason: str) -> str:
        return str(self.numbers.setdefault(reason, len(self.numbers) + 1))


def _table(one: str, other: str, reasons: _Reasons) -> Iterator[list[str]]:
    known = axes()
    yield [one, *(f"`{name}`" for name in known[other])]
    for value in known[one]:
        found = [refusal(((one, value), (other, name)), tries_model=(one, other) == _SLOW) for name in known[other]]
        yield [f"`{value}`", *("yes" if reason is None else reasons.number(reason) for reason in found)]


def _markdown(table: list[list[str]]) -> Iterator[str]:
    head, *rows = table
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _put_together(
    strategy: str = "single",
    adapter: str = "none",
    task: str = "causal_lm",
    precision: str = "fp32",
    compile: str = "auto",
    attention: str = "auto",
) -> RunConfig:
    config = _with_task(task)
    model = replace(config.model, attention=Attention(attention))
    if strategy == "moe":
        model = replace(model, type="qwen3_moe", config=model.config | _EXPERTS)
    return replace(
        config,
        model=model,
        strategy=_with(f"strategy={strategy}").strategy,
        adapter=_with(f"adapter={adapter}", *["adapter.merge=false"] * (adapter != "none")).adapter,
        train=replace(config.train, precision=Precision(precision), compile=Compile(compile)),
    )


@cache
def _with(*overrides: str) -> RunConfig:
    return compose_config([*_MODEL, *overrides])


@cache
def _with_task(task: str) -> RunConfig:
    if task == "causal_lm":
        return _with()
    return compose_config([*_MODEL, *_ROWS, f"task={task}", *needed_values(task)], name="tune")


def _check(config: RunConfig, processes: int) -> Any:
    """Check as a run does before it looks for its model; give its strategy."""
    from hfdist.models.peft_config import check_adapter
    from hfdist.strategies.select import select_strategy

    check_config(config)
    topology, batch = plan_run(config, world_size=processes)
    strategy = select_strategy(config.strategy, config.train, topology=topology, batch=batch, device_type="cuda")
    check_adapter(config.adapter, config.model, strategy)
    return strategy


def _make(config: RunConfig, strategy: Any) -> None:
    """Make the model without memory, and what the layout makes of it, as one rank of others that do not exist."""
    from hfdist.planning.planned_architecture import find_planned_architecture
    from hfdist.planning.tracing.fake_model import make_fake_model, quantize_fake
    from hfdist.planning.tracing.fake_ranks import deepspeed_of, fake_ranks, fake_tensors

    architecture = find_planned_architecture(config)
    with warnings.catch_warnings(), fake_ranks(strategy.topology), fake_tensors(strategy), deepspeed_of(strategy):
        warnings.simplefilter("ignore")
        model = make_fake_model(config, architecture, strategy)
        quantize_fake(model, config)
        strategy.build(model)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
