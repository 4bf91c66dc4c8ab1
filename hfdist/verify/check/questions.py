"""What is asked of a model: each task, layout, adapter, attention and packing, as the overrides of a run."""

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

NUM_STEPS, NUM_SEQUENCES = 2, 8
"""Steps of the small run, and sequences in each."""
_SEQUENCE_TOKENS = 128
"""What the config says; few, so that each model has positions for them."""
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
    """Whether the model goes with one choice."""

    about: str
    """What kind of choice it is."""
    choice: str
    """Its name in the answer."""
    overrides: tuple[str, ...] = ()
    """What a user adds to the command line of a run."""
    command: str = RECIPES[0]
    """The command of the run."""

    def config(self, model: str) -> RunConfig:
        """Compose and check a small run of it, with a preset, a folder, a Hub id or a GGUF file; ConfigError: as of
        any run.
        """
        recipe, task = NAMES[self.command]
        needed = [value for one in task for value in needed_values(one.partition("=")[2])]
        # Weights are not read: the architecture alone counts.
        of_model = (f"model={model}", "model.init=random")
        return compose_config([*task, *needed, *of_model, *_SIZES, *self.overrides], name=recipe)


def needed_values(task: str) -> list[str]:
    """Give overrides without which an option of the group `task` does not start; they say nothing of a model."""
    # The others are settings of cpo.
    traits = TaskName.__members__.get(task, TaskName.cpo).traits
    rewards = ["task.rewards={arithmetic: 1.0}"] * traits.is_reinforcement
    return [*rewards, *["task.teacher=teacher"] * traits.has_teacher]


def ask_tasks() -> Iterator[Question]:
    """Ask for each command that trains; a second name of the same one is left out."""
    met = []
    for command, stands_for in NAMES.items():
        if command != "tune" and stands_for not in met:
            met.append(stands_for)
            yield Question(about="task", choice=command, command=command)


def ask_layouts(command: str) -> Iterator[Question]:
    """Ask for each preset of `strategy`, in runs of one command."""
    names = list_options(shipped_folder(), "strategy")
    for name in sorted(names, key=lambda name: (name != "single", name)):
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
