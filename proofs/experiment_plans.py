"""The page of experiments: each named run with its plan, by the command in its file.

python -m proofs.experiment_plans docs/experiments.md
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.table import markdown
from hfdist.units import duration, share, short, size
from proofs.follow_readme import ROOT, shown_programs
from tests.unit.config.shipped import EXPERIMENTS, plan_of

PRICE = 2.5
"""Of an hour of one GPU, in USD: an example. Those on a CPU have no price."""
PUBLISHED = {
    "gpt3_175b": "34 days on 1,024 A100, estimated by [Narayanan et al. 2021](https://arxiv.org/abs/2104.04473)",
    "llama3_8b": "1.3 M hours of H100, [Meta's model card](https://huggingface.co/meta-llama/Meta-Llama-3-8B)",
    "llama3_70b": "6.4 M hours of H100, [Meta's model card](https://huggingface.co/meta-llama/Meta-Llama-3-70B)",
}
"""What others took or estimated for the same model and tokens, in layouts and kernels of their own."""
_HEAD = f"""\
# Named experiments

```
hfdist plan +experiment=demo plan.processes=2
```

`+experiment=NAME` adds a whole named run of `conf/experiment/`: model, data, layout, batch, rate. The first lines of
each file are the commands that start it and plan it, and the paper that its numbers come from. It goes on other
machines, too: [plan](plan.md) it for them first.

This page is what `make plan` got from the plan in each file. No such run was made for it but those on a CPU: these are
predictions, and [plan](plan.md#how-right-it-is) says how right such predictions were. *Cost* is at {PRICE:g} USD for an
hour of a GPU, which is an example. The figures of a CPU are those of the machine that wrote this page.
"""


def plan(experiment: str, folder: Path) -> dict[str, Any] | str:
    """Give what `hfdist plan --json` says in a folder; a text: why there is no plan."""
    words = [*plan_of(experiment), "--json"]
    if _is_elsewhere(experiment):
        words.append(f"cost.price_per_hour={PRICE}")
    done = subprocess.run(
        [sys.executable, "-m", "hfdist", "plan", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        # The head of hfdist's own message.
        return next((line for line in done.stderr.splitlines() if "error:" in line), "it said nothing")


_PROGRAMS = {"image-text.md": "shapes.py", "encoders-and-decoders.md": "replaced.py", "embeddings.md": "library.py"}
"""Programs that write the models and rows of experiments, by their pages."""


def _is_elsewhere(experiment: str) -> bool:
    return any(word.startswith("plan.hardware=") for word in plan_of(experiment))


def plan_all() -> dict[str, dict[str, Any] | str]:
    """Plan each, in a folder with the small models that pages make."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for page, program in _PROGRAMS.items():
            code = shown_programs(ROOT / "docs" / page)[program]
            subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
        # First those of this machine, which is measured for them.
        here = {name: plan(name, folder) for name in EXPERIMENTS if not _is_elsewhere(name)}
        others = [name for name in EXPERIMENTS if name not in here]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found_of_others = dict(zip(others, pool.map(lambda name: plan(name, folder), others), strict=True))
    return {name: (here | found_of_others)[name] for name in EXPERIMENTS}


def page() -> str:
    """The whole page."""
    plans = plan_all()
    made = {name: found for name, found in plans.items() if not isinstance(found, str)}
    needs = [[f"`{name}`", _machines(found), *_memory(found), found["binds"]] for name, found in made.items()]
    times = [[f"`{name}`", *_time(found), *_whole_run(found)] for name, found in made.items()]
    parts = [
        _HEAD,
        "## Layout and memory\n",
        markdown(["experiment", "on", "layout", "a rank needs", "between", "of", "bound by"], needs),
        "\n## Time and cost\n",
        markdown(["experiment", "a step", "tokens a second", "MFU", "steps", "the run", "GPU-hours", "cost"], times),
        "\nRuns without a number of steps make passes over the data that you give. Some plans leave something out\n"
        "([what a plan does not know](plan.md#what-it-does-not-know)):\n",
        *(f"* `{name}`: {found['not_counted']}" for name, found in made.items() if found["not_counted"]),
        "",
        "## Beside published figures\n",
        markdown(["experiment", "planned", "published"], _beside_published(made)),
        "\nThe others have layouts and kernels of their own.\n",
        "## Commands\n",
        *(f"* `hfdist plan {shlex.join(plan_of(name))}`" for name in EXPERIMENTS),
    ]
    missing = {name: found for name, found in plans.items() if isinstance(found, str)}
    parts += ["\n## Not planned\n", *(f"* `{name}`: {why}" for name, why in sorted(missing.items()))]
    return "\n".join(parts) + "\n"


def _machines(found: dict[str, Any]) -> str:
    return f"{found['processes']:,} x {found['hardware']}"


def _memory(found: dict[str, Any]) -> list[str]:
    memory = found["memory"]
    layout = found["layout"].partition(": ")[2] or found["layout"]
    between = f"{size(memory['low_bytes'])} and {size(memory['high_bytes'])}"
    needed = size(sum(memory["use"].values()))
    return [layout, needed if found["fits"] else f"**{needed}**, too much", between, size(found["usable_bytes"])]


def _time(found: dict[str, Any]) -> list[str]:
    seconds = found["tokens_per_step"] / found["tokens_per_second"]
    return [duration(seconds), short(found["tokens_per_second"]), "" if found["mfu"] is None else share(found["mfu"])]


def _whole_run(found: dict[str, Any]) -> list[str]:
    if found["hours"] is None:
        return ["by the data", "", "", ""]
    on_cpu = found["mfu"] is None
    cost = "" if found["cost"] is None else f"{short(found['cost'])} {found['currency']}"
    return [
        f"{found['max_steps']:,}",
        duration(3600 * found["hours"]),
        "" if on_cpu else short(found["hours"] * found["processes"]),
        cost,
    ]


def _beside_published(made: dict[str, Any]) -> list[list[str]]:
    return [
        [f"`{name}`", f"{duration(3600 * found['hours'])}, {short(found['hours'] * found['processes'])} hours", words]
        for name, words in PUBLISHED.items()
        if (found := made.get(name)) is not None and found["hours"] is not None
    ]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
