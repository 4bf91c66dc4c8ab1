"""The model card: what the model is, what it was trained on and how, and the command that trains it again."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCardData

from hfdist.config.checks.budgets import BUDGETS
from hfdist.config.checks.urls import redact, scheme_of
from hfdist.config.composition.config_text import to_values
from hfdist.config.composition.yaml_text import to_yaml_text
from hfdist.config.data import SourceKind
from hfdist.config.model import Init
from hfdist.config.run import ExportConfig, RunConfig
from hfdist.config.task import Head, TaskName
from hfdist.data import PoolReport
from hfdist.records import PACKAGES, RunFolder, RunRecord, find_versions, read_lines
from hfdist.run.export.card_training import describe_progress, describe_task
from hfdist.run.usage import describe_usage

CARD = "README.md"
_KINDS = {
    Head.tokens: "a causal language model",
    Head.targets: "an encoder-decoder",
    Head.masked: "a masked language model",
    Head.score: "a reward model",
    Head.none: "an embedding model",
    Head.labels: "a classifier of texts",
    Head.token_labels: "a classifier of words",
}
"""What a model is called, by what it gives at its end."""
_PIPELINES = {
    Head.tokens: "text-generation",
    Head.targets: "text2text-generation",
    Head.masked: "fill-mask",
    Head.score: "text-classification",
    Head.labels: "text-classification",
    Head.token_labels: "token-classification",
    Head.none: "sentence-similarity",
}
"""The Hub's name for what a model does."""


class Exported(NamedTuple):
    """The weights that an exported folder holds, as its card describes them."""

    step: int
    """The step after which the weights were saved."""
    held_out_loss: float | None
    """Mean loss of the held-out tokens, in nats; None: not measured. With rewards: the mean reward, negated."""
    commit: str | None
    """The commit of the repository that the training started from; None: not known."""
    record: RunRecord
    """Time, energy and cost of the run."""


def write_card(
    folder: Path, config: RunConfig, reports: Sequence[PoolReport], exported: Exported, *, ranks: int
) -> None:
    """Write README.md into an exported folder, and beside it the picture of the losses where the run has one."""
    picture = config.run.folder.loss_picture
    if picture.is_file():
        shutil.copyfile(picture, folder / picture.name)
    is_adapter = (folder / "adapter_config.json").is_file()
    versions = find_versions((*PACKAGES, "peft") if config.adapter.is_used else PACKAGES)
    parts = [
        f"---\n{_metadata(config, is_adapter, exported.record).to_yaml()}\n---",
        f"# {config.run.name}",
        _describe_start(config, exported.commit, is_adapter),
        describe_task(config.task),
        "## Data\n\n" + _describe_data(config, reports),
        _describe_losses(read_lines(config.run.folder.metrics), config.task.name, exported),
        "## Energy and cost\n\n" + _describe_use(config, exported.record),
        f"![Losses]({picture.name})" if picture.is_file() else "",
        "## Train it again\n\n" + _describe_command(config, exported.commit, ranks),
        "## Versions\n\n" + "\n".join(f"- {name} {version}" for name, version in versions.items()),
    ]
    (folder / CARD).write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def _metadata(config: RunConfig, is_adapter: bool, record: RunRecord) -> ModelCardData:
    head, is_ranking = config.task.name.traits.head, config.task.name is TaskName.rerank
    library = "sentence-transformers" if is_ranking or head is Head.none else "transformers"
    base = _hub_id(config.model.name) if config.model.init is Init.pretrained else None
    datasets = [_hub_id(source.path) for source in config.data.sources.values() if source.kind is SourceKind.hub]
    return ModelCardData(
        base_model=base,
        library_name="peft" if is_adapter else library,
        pipeline_tag="text-ranking" if is_ranking else _PIPELINES[head],
        tags=["hfdist"] if config.task.name.traits.is_of_next_tokens else ["hfdist", config.task.name.value],
        datasets=[name for name in datasets if name is not None] or None,
        # What is None is left out.
        co2_eq_emissions=_emissions(config, record),
    )


def _emissions(config: RunConfig, record: RunRecord) -> dict[str, object] | None:
    """Give the emissions of all starts in grams, as the Hub reads them.

    None: they are not known, or not those of the last start, whose figures the card has.
    """
    grams = record.total("gco2e")
    if grams is None or record.gco2e is None:
        return None
    return {
        "emissions": float(f"{grams:.4g}"),
        "source": f"hfdist ({record.energy_source}), at {config.cost.gco2e_per_kwh} g CO2e a kWh",
        "training_type": "fine-tuning" if config.model.init is Init.pretrained else "pre-training",
    }


def _describe_use(config: RunConfig, record: RunRecord) -> str:
    """Give the sentences on energy and cost."""
    text = f"Training has used {describe_usage(record, config.cost)}."
    estimate = " Part of the energy or all of it is an estimate." if "estimate" in (record.energy_source or "") else ""
    return text + estimate


def _hub_id(name: str | None) -> str | None:
    """Give the name if it can be one of the Hub; None: it is a path of this machine, which says nothing to others."""
    if name is None or Path(name).exists():
        return None
    return name if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) else None


def _describe_start(config: RunConfig, commit: str | None, is_adapter: bool) -> str:
    """Give the sentences on what the model is, and from which weights its training started."""
    model = config.model
    kind = "a cross-encoder" if config.task.name is TaskName.rerank else _KINDS[config.task.name.traits.head]
    what = f"An adapter of {kind}" if is_adapter else kind[0].upper() + kind[1:]
    parts = " and ".join(part.value for part in config.adapter.target_parts or ())
    beside = f", by {config.adapter.type} beside its {parts}" if parts else ""
    if model.init is Init.random:
        return f"{what}, trained from random weights ({model.type or redact(model.name or '')}){beside}."
    file = f", file `{model.gguf_file}`" if model.gguf_file else ""
    from_commit = f", commit `{commit}`" if commit else ""
    start = f"{what}, fine-tuned from {_link_to(model.name)}{file}{from_commit}{beside}."
    packed = config.adapter.quantization
    if packed is None:
        return start
    merged = "" if is_adapter else " It is merged into the weights as they were before."
    return f"{start} The adapter was trained beside frozen weights in 4 bits ({packed.value}, QLoRA).{merged}"


def _link_to(model: str | None) -> str:
    """Give Markdown that names a model: a link to the Hub, or the last part of a path of this machine."""
    name = redact(model or "")
    if _hub_id(model):
        return f"[{name}](https://huggingface.co/{name})"
    path = Path(name)
    # Models of runs all lie under the same name, each in the folder of its run.
    is_of_run = path.name == RunFolder(Path()).model.name
    shown = path.parent.name if is_of_run else path.name
    return f"`{shown or name}`"


def _describe_data(config: RunConfig, reports: Sequence[PoolReport]) -> str:
    """Give the list of sources, and the table of what was read of each pool."""
    lines = []
    for name, source in config.data.sources.items():
        path = f" `{_public_path(source.path)}`" if source.path else ""
        lines.append(f"- {name}: {source.kind.value}{path}")
    if reports:
        lines += ["", "| pool | sequences | share | tokens | epochs |", "|---|---|---|---|---|"]
        lines += [f"| {r.name} | {r.sequences:,} | {r.share:.1%} | {r.tokens:,} | {r.epochs:.2f} |" for r in reports]
    return "\n".join(lines)


def _public_path(path: str) -> str:
    """Give an address or a Hub id without secrets, or the name alone of a file of this machine."""
    return redact(path) if scheme_of(path) or _hub_id(path) else Path(path).name


def _describe_losses(lines: Sequence[Mapping[str, object]], task: TaskName, exported: Exported) -> str:
    """Give the section on losses, or on rewards where the task learns from them."""
    title, name = ("Rewards", "reward") if task.traits.is_reinforcement else ("Losses", "loss")
    value = exported.held_out_loss
    if value is not None and task.traits.is_reinforcement:
        # From 0, as `-value` would write a reward of 0 as -0.
        value = 0.0 - value
    measured = "" if value is None else f", with a held-out {name} of {value:.4f}"
    return f"## {title}\n\n{describe_progress(lines, task)}\n\nThese weights are of step {exported.step:,}{measured}."


def _describe_command(config: RunConfig, commit: str | None, ranks: int) -> str:
    """Give the config and the command that train the model again, without the writer's repositories and budgets."""
    model = replace(config.model, revision=commit or config.model.revision)
    no_budgets: dict[str, Any] = dict.fromkeys(BUDGETS)
    config = replace(config, model=model, export=ExportConfig(), train=replace(config.train, **no_budgets))
    processes = "" if ranks == 1 else f" launch.processes={ranks}"
    values = {"defaults": ["run_schema", "_self_"]} | public_values(to_values(config))
    text = to_yaml_text(values)
    # A config file cannot ask for it: whoever runs a model's code says so on the command line.
    trust = " model.trust_remote_code=true" if model.trust_remote_code else ""
    return (
        "Save this as `config.yaml`, then:\n\n"
        f"```\nhfdist run config.yaml{processes}{trust}\n"
        f"```\n\n<details><summary>config.yaml</summary>\n\n```yaml\n{text}```\n\n</details>"
    )


def public_values(value: object) -> Any:
    """Give the same values without users, passwords and queries of addresses. A config holds no other secrets."""
    if isinstance(value, dict):
        return {key: public_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [public_values(item) for item in value]
    return re.sub(r"\w+://\S+", lambda found: redact(found[0]), value) if isinstance(value, str) else value
