"""What config.yaml of a run of an earlier version says, in the words of this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfdist.config.task import TaskLoss, TaskName


def as_now(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Give the values of a run's config by key as they are now.

    Policies had one loss, which was called sigmoid, and no `task.clip_high`; `task.clip` was 0.2.
    """
    name, loss = leaves.get("task.name"), leaves.get("task.loss")
    is_policy = isinstance(name, str) and name in TaskName.__members__ and "clip" in TaskName[name].traits.keys
    if not is_policy or loss != TaskLoss.sigmoid.value or "task.clip" not in leaves or "task.clip_high" in leaves:
        return dict(leaves)
    clip = leaves["task.clip"]
    return {**leaves, "task.loss": name, "task.clip": None if clip == 0.2 else clip}
