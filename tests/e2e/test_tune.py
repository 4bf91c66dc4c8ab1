"""Tasks of `hfdist tune` from the command line, with two processes; of a real launcher: test_launch.py."""

import json
from pathlib import Path

import pytest

from hfdist import __main__ as command
from hfdist.records import RunFolder, read_lines
from tests.e2e.forked import run_forked
from tests.e2e.test_launch import forked_ranks  # noqa: F401
from tests.marks import many

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

SMALL = ("model=tiny", "data.sequence_length=64", "data.lanes=4", "data.eval_fraction=0.1", "train.epochs=null",
         "train.max_steps=4", "train.global_batch_size=4", "train.micro_batch_size=1", "report=quiet",
         "optimizer.lr=1e-3")  # fmt: skip
ROWS = {
    "dpo": {"prompt": "{n} is ", "chosen": "a number", "rejected": "a word"},
    "kto": {"prompt": "{n} is ", "completion": "a number", "label": True},
    "grpo": {"prompt": "{n} + 1 = ", "completion": "{n}1"},
}
REWARD = ("task.rewards={arithmetic: 1.0}", "task.num_generations=2", "task.max_new_tokens=4")
TASKS = {
    "dpo": ("dpo", "pipeline", ()),
    "kto": ("kto", "zero2", ()),
    "reward": ("dpo", "fsdp2", ()),
    "grpo": ("grpo", "ddp", REWARD),
    "rloo": ("grpo", "zero3", REWARD),
    "ppo": ("grpo", "fsdp2", (REWARD[0], REWARD[2])),
    "online_dpo": ("grpo", "tensor", REWARD),
}


@pytest.mark.parametrize("task", ["grpo", *(many(task) for task in TASKS if task != "grpo")])
def test_a_task_trains_on_two_processes(tmp_path, cache_dir, task, forked_ranks):  # noqa: F811
    kind, strategy, more = TASKS[task]
    rows = [{name: v.format(n=n) if isinstance(v, str) else v for name, v in ROWS[kind].items()} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ("tune", f"task={task}", f"strategy={strategy}", "data=rows.jsonl", "run.name=tuned", "launch.processes=2")
    done = run_forked(*own, *SMALL, *more, cwd=tmp_path, script=Path(command.__file__))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_lines(RunFolder(tmp_path / "runs" / "tuned").metrics)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert all("eval_loss" in line for line in lines if line["step"] == 0)
    assert (tmp_path / "runs" / "tuned" / "model" / "model.safetensors").is_file()
