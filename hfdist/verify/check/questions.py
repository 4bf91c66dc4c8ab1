"""The questions of `hfdist check`: each task, layout, adapter, attention and packing, as the overrides of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hfdist.config.cli.recipe_names import NAMES, RECIPES
from hfdist.config.composition.compose import compose_config
from hfdist.config.conf_folder import list_options, shipped_folder
from hfdist.config.data import Packing
from hfdist.config.model import AdapterPart, Attention
from hfdist.config.run import RunConfig
from hfdist.config.task import TaskName

NUM_STEPS = 2
"""Optimizer steps of a small run."""
NUM_SEQUENCES = 8
"""Sequences in each step of a small run."""
_SEQUENCE_TOKENS = 128
"""Tokens of a sequence in the config; few, so that each model has positions for them."""
_SIZES = (
    "data=files",
    "data.sources.files.path=rows.jsonl",
    f"data.sequence_length={_SEQUENCE_TOKENS}",
    f"data.lanes={NUM_SEQUENCES}",
    "train.epochs=null",
    f"train.max_steps={NUM_STEPS}",
    f"train.global_batch_size={NUM_SEQUENCES}",
    "train.micro_batch_size=1",
    "train.eval_every=null",
    "optimizer=adamw",
    "optimizer.lr=1e-3",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    # So large that a gradient of rounding alone does not become a whole step.
    "optimizer.eps=1e-4",
    "checkpoint=none",
    "report=quiet",
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question whether a model goes with one choice."""

    about: str
    """Kind of the choice: task, layout, adapter, attention or packing."""
    choice: str
    """Name of the choice in the answer."""
    overrides: tuple[str, ...] = ()
    """Overrides that make the choice on the command line of a run."""
    command: str = RECIPES[0]
    """Command of `hfdist` that starts the run."""

    def config(self, model: str) -> RunConfig:
        """Compose and check the config of a small run.

        Args:
            model: preset, folder, Hub id or GGUF file.

        Raises:
            ConfigError: the keys of the run do not go together.
        """
        recipe, task_overrides = NAMES[self.command]
        needed: list[str] = []
        for override in task_overrides:
            _, _, task = override.partition("=")
            needed += needed_values(task)
        # Weights are not read: the architecture alone counts.
        model_overrides = (f"model={model}", "model.init=random")
        return compose_config([*task_overrides, *needed, *model_overrides, *_SIZES, *self.overrides], name=recipe)


def needed_values(task: str) -> list[str]:
    """Give the overrides without which an option of the group `task` does not start; they say nothing of a model."""
    # Options that are no member are settings of cpo.
    traits = TaskName.__members__.get(task, TaskName.cpo).traits
    overrides = []
    if traits.is_reinforcement:
        overrides.append("task.rewards={arithmetic: 1.0}")
    if traits.has_teacher:
        overrides.append("task.teacher=teacher")
    return overrides


def ask_tasks() -> Iterator[Question]:
    """Ask for each command that trains; a second name of the same one is left out."""
    asked = []
    for command, stands_for in NAMES.items():
        if command != "tune" and stands_for not in asked:
            asked.append(stands_for)
            yield Question(about="task", choice=command, command=command)


def ask_layouts(command: str) -> Iterator[Question]:
    """Ask for each preset of `strategy`, in runs of one command."""
    others = sorted(set(list_options(shipped_folder(), "strategy")) - {"single"})
    for name in ("single", *others):
        yield Question(about="layout", choice=name, overrides=(f"strategy={name}",), command=command)


def ask_others(command: str) -> Iterator[Question]:
    """Ask for adapters, implementations of attention, and ways to pack documents, in runs of one command."""
    adapters = {name: [f"adapter={name}"] for name in list_options(shipped_folder(), "adapter") if name != "none"}
    adapters |= {
        f"lora of {part.value}": ["adapter=lora", f"adapter.target_parts=[{part.value}]"] for part in AdapterPart
    }
    choices = {
        "adapter": {name: [*overrides, "adapter.merge=false"] for name, overrides in adapters.items()},
        "attention": {one.value: [f"model.attention={one.value}"] for one in Attention if one is not Attention.auto},
        "packing": {one.value: [f"data.packing={one.value}"] for one in Packing if one is not Packing.auto},
    }
    for about, by_name in choices.items():
        for name, overrides in by_name.items():
            yield Question(about=about, choice=name, overrides=tuple(overrides), command=command)
