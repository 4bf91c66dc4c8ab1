"""The page of all objectives, from what `hfdist/config/task.py` says of each task: `python -m proofs.pages.keys`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hfdist.config.task import PRESETS, TRAITS, TaskConfig, TaskName, Traits

_HEAD = """\
# Objectives

```
hfdist tune --help
```

What a run can train: a task each, with its losses and its keys. `task=NAME` chooses a task. `make docs` writes this
page from `hfdist/config/task.py`.

| task | trained | rows | mean over | default rate | page | file |
|---|---|---|---|---|---|---|
"""
_LOSSES = """
## Losses

`task.loss` is one of these; the first is the default. The others have no choice.

| task | losses |
|---|---|
"""
_KEYS = """
## Keys

A key is refused where its task has no use for it. [All keys](keys.md#task) has their values.

"""
_WHERE = {
    TaskName.causal_lm: ("fine-tuning.md", "models/loss/"),
    **dict.fromkeys((TaskName.dpo, TaskName.cpo), ("tune.md", "tune/preference.py")),
    TaskName.kto: ("tune.md", "tune/unpaired.py"),
    TaskName.reward: ("tune.md", "tune/reward.py"),
    **dict.fromkeys((TaskName.grpo, TaskName.rloo), ("reinforcement.md", "tune/policy.py")),
    TaskName.ppo: ("reinforcement.md", "tune/ppo.py"),
    TaskName.online_dpo: ("reinforcement.md", "tune/online_preference.py"),
    TaskName.distill: ("distill.md", "tune/distill.py"),
    TaskName.embed: ("embeddings.md", "tune/embed.py"),
    **dict.fromkeys((TaskName.classify, TaskName.token_classify), ("labels.md", "tune/classify.py")),
    TaskName.rerank: ("labels.md", "tune/rerank.py"),
    TaskName.seq2seq: ("encoders-and-decoders.md", "tune/seq2seq.py"),
    TaskName.mlm: ("encoders-and-decoders.md", "tune/masked.py"),
    TaskName.span_corruption: ("encoders-and-decoders.md", "tune/span_corruption.py"),
}
"""The page and the file of each task."""
_NEXT_TOKENS = "on the next tokens of texts and answers"


def objectives() -> str:
    """The whole page."""
    tasks = "".join(f"{row}\n" for row in map(_row, TRAITS, TRAITS.values()))
    losses = "".join(
        f"| `{task.value}` | {', '.join(f'`{loss.value}`' for loss in traits.losses)} |\n"
        for task, traits in TRAITS.items()
        if len(traits.losses) > 1
    )
    return _HEAD + tasks + _LOSSES + losses + _KEYS + "".join(f"{line}\n" for line in _keys())


def _row(task: TaskName, traits: Traits) -> str:
    page, file = _WHERE[task]
    presets = "".join(f", `{name}`" for name in PRESETS) if task is TaskName.cpo else ""
    if traits.row_format is not None:
        rows = f"`{traits.row_format.value}`"
    else:
        rows = "`prompt_completion`, `prompt`" if traits.is_reinforcement else "any of the others"
    what = traits.method or _NEXT_TOKENS
    rate = f"{traits.learning_rate:g}"
    unit = traits.loss_unit.removeprefix("mean of ").replace("nats a token", "tokens")
    return f"| `{task.value}`{presets} | {what} | {rows} | {unit} | {rate} | [{page}]({page}) | `{file}` |"


def _keys() -> Iterator[str]:
    tasks = [task for task, traits in TRAITS.items() if traits.keys]
    yield f"| key | {' | '.join(f'`{task.value}`' for task in tasks)} |"
    yield "|---" * (len(tasks) + 1) + "|"
    for field in dataclasses.fields(TaskConfig):
        cells = ["x" if field.name in task.traits.keys else "" for task in tasks]
        if any(cells):
            yield f"| `task.{field.name}` | {' | '.join(cells)} |"
