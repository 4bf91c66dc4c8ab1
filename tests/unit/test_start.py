"""What a start may cost: modules that must not be loaded before they are needed, and CPU time beside the libraries'."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RUN = """
with quick_imports():
    from hfdist.run.builder import Run
"""

# Of one process, so that both meet the same machine and the same caches: what the libraries cost, then hfdist on top.
MEASURE = f"""
import json, sys, time
def spend(code):
    begin, before = time.process_time(), set(sys.modules)
    exec(code, globals())
    return time.process_time() - begin, sorted(set(sys.modules) - before)
spent = {{
    "config": spend("import hfdist, hfdist.config.run, hfdist.topology"),
    "recipe": spend("from hfdist.garbage_collector import quick_imports; import recipes.pretrain"),
    "libraries": spend("with quick_imports(): from transformers import Trainer, TrainingArguments"),
    "run": spend({RUN!r}),
    "strategy": spend("import hfdist.strategies.select"),
}}
print(json.dumps(spent))
"""


@pytest.fixture(scope="module")
def spent():
    ended = subprocess.run([sys.executable, "-c", MEASURE], check=True, cwd=ROOT, capture_output=True, text=True)
    return json.loads(ended.stdout.splitlines()[-1])


def packages(modules):
    return {name.partition(".")[0] for name in modules}


def test_the_config_room_loads_nothing_large(spent):
    assert packages(spent["config"][1]).isdisjoint({"torch", "numpy", "transformers", "hydra", "omegaconf", "pyarrow"})
    assert len(spent["config"][1]) < 150


def test_the_command_line_loads_hydra_and_no_torch(spent):
    assert packages(spent["recipe"][1]).isdisjoint({"torch", "numpy", "transformers", "pyarrow", "datasets"})
    assert len(spent["recipe"][1]) < 600


def test_a_run_on_one_process_loads_hfdist_and_little_else(spent):
    modules = [*spent["run"][1], *spent["strategy"][1]]
    heavy = "deepspeed matplotlib sklearn scipy pydantic peft trl lm_eval wandb tensorboard mlflow trackio"
    assert packages(modules).isdisjoint(heavy.split())
    assert "torch.distributed.pipelining" not in modules
    others = [name for name in modules if packages([name]) != {"hfdist"}]
    assert len(others) < 40, others


def test_it_costs_a_fraction_of_the_libraries(spent):
    assert spent["run"][0] + spent["strategy"][0] < 0.4 * spent["libraries"][0]


KEPT = """
import gc
from hfdist.garbage_collector import quick_imports
before = gc.get_freeze_count()
with quick_imports():
    assert not gc.isenabled()
    import torch, transformers
assert gc.isenabled()
assert gc.get_freeze_count() > before + 10_000, "nothing was kept out"
kept = gc.get_freeze_count()
with quick_imports():
    garbage = [[] for _ in range(1000)]
assert gc.get_freeze_count() <= kept, "what was made since may be garbage, and would stay"
gc.disable()
with quick_imports():
    pass
assert not gc.isenabled()
"""


def test_imports_are_kept_out_of_collections_and_collecting_goes_on():
    """In a process of its own: this one has torch already."""
    subprocess.run([sys.executable, "-c", KEPT], check=True, cwd=ROOT)
