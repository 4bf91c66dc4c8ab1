"""Every command that README, docs and conf show composes, and fits the processes that its launcher starts."""

import re
import shlex

import pytest
import yaml

from hfdist.config.checks.preflight import plan_run
from hfdist.config.composition.compose import compose_config
from hfdist.config.run import AUTO
from tests.e2e.follow_readme import ELSEWHERE
from tests.unit.config.shipped import CONF

ROOT = CONF.parent
TEXTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*.py")),
    *sorted(CONF.rglob("*.yaml")),
]
# A line goes on behind a backslash, and in the comments of conf/ on a line that stands further in.
COMMAND = re.compile(
    r"(?:accelerate launch [^\n]*--config_file (?P<launch>conf/launch/\w+\.yaml) recipes/(?P<recipe>\w+)\.py"
    r"|(?<![\w/])(?<!\$ )hfdist (?P<command>pretrain|finetune|prove|pretokenize))"
    r"(?P<arguments>(?: (?:[^\n`]*\\\n)*[^\n`]*(?:\n#   [^\n]*)*)?)"
)
GPUS = 8


def commands(path):
    """Launch file (None: `hfdist`), recipe and overrides of each, but of those that leave it to the reader."""
    for found in COMMAND.finditer(path.read_text(encoding="utf-8")):
        words = shlex.split(re.sub(r"\\\n|\n#", " ", found["arguments"]), comments=True)
        # Without words it is only named.
        if words and not any(word.startswith(("...", "--help", "--cfg")) for word in words):
            yield found["launch"], found["recipe"] or found["command"], words


COMMANDS = [
    pytest.param(*command, id=f"{path.relative_to(ROOT)}: {command[1]} {' '.join(command[2])}")
    for path in TEXTS
    for command in commands(path)
]


def test_there_are_commands():
    assert len(COMMANDS) >= 20
    pages = {path.name for path in TEXTS if path.suffix == ".md" and any(commands(path))}
    assert pages >= {
        "README.md", "getting-started.md", "layouts.md", "data.md", "fine-tuning.md", "pipelines.md", "checkpoints.md",
        "faults.md", "machines.md", "optimizers.md",
    }  # fmt: skip


@pytest.mark.parametrize(("launch", "recipe", "words"), COMMANDS)
def test_a_command_fits_its_processes(launch, recipe, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["data=chats.jsonl" if word == "data=..." else word for word in words]
    words = [word for word in words if not word.startswith("checkpoint.resume=")]  # of a run that comes before
    config = compose_config(words, name="finetune" if recipe == "finetune" else "pretrain")
    if launch is not None:
        num_processes = yaml.safe_load((ROOT / launch).read_text())["num_processes"]
    else:
        num_processes = GPUS if config.launch.processes == AUTO else int(config.launch.processes)
    topology, batch = plan_run(config, world_size=num_processes)
    assert topology.world_size == num_processes
    assert batch.global_batch_size % topology.data_size == 0


@pytest.mark.parametrize("path", [path for path in TEXTS if path.suffix == ".md"], ids=lambda path: path.name)
def test_no_two_commands_of_a_page_share_a_run(path):
    """The second would go on where the first has stopped, with another config."""
    runs = [
        next((word for word in words if word.startswith(("run.name=", "+experiment="))), recipe)
        for _, recipe, words in commands(path)
        if recipe != "prove" and (path.parent == ROOT or not any(part in " ".join(words) for part in ELSEWHERE))
    ]
    assert len(runs) == len({*runs})
