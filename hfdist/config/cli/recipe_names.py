"""The recipes that train, and the names of tasks that stand for one with its task. Imports nothing that is slow."""

from __future__ import annotations

from collections.abc import Mapping

RECIPES = ("pretrain", "finetune", "tune")
"""Those whose processes may be on several machines; each one's primary config has its name."""
_TASKS = ("dpo", "kto", "reward", "grpo", "rloo")
NAMES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    **{recipe: (recipe, ()) for recipe in RECIPES},
    "sft": ("finetune", ()),
    **{task: ("tune", (f"task={task}",)) for task in _TASKS},
}
"""What people call a run -> the recipe, and the overrides that come first."""
