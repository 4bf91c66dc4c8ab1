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
    """Which weights the folder holds."""

    step: int
    held_out_loss: float | None
    commit: str | None
    """The commit of the repository that the training started from; None: not known."""
    record: RunRecord
    """What the run has used."""


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
    is_similar = is_ranking or head is Head.none
    base = _hub_id(config.model.name) if config.model.init is Init.pretrained else None
    datasets = [_hub_id(source.path) for source in config.data.sources.values() if source.kind is SourceKind.hub]
    return ModelCardData(
        base_model=base,
        library_name="peft" if is_adapter else "sentence-transformers" if is_similar else "transformers",
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
    text = f"Training has used {describe_usage(record, config.cost)}."
    estimate = " Part of the energy or all of it is an estimate." if "estimate" in (record.energy_source or "") else ""
    return text + estimate


def _hub_id(name: str | None) -> str | None:
    """Give a name that is one of the Hub; a path of this machine says nothing to others."""
    is_of_hub = name is not None and not Path(name).exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
    return name if is_of_hub else None


def _describe_start(config: RunConfig, commit: str | None, is_adapter: bool) -> str:
    model = config.model
    kind = "a cross-encoder" if config.task.name is TaskName.rerank else _KINDS[config.task.name.traits.head]
    what = f"An adapter of {kind}" if is_adapter else kind[0].upper() + kind[1:]
    parts = " and ".join(part.value for part in config.adapter.target_parts or ())
    beside = f", by {config.adapter.type} beside its {parts}" if parts else ""
    if model.init is Init.random:
        return f"{what}, trained from random weights ({model.type or redact(model.name or '')}){beside}."
    name = redact(model.name or "")
    # A run's model lies in its folder under this name.
    shown = Path(name).parent.name if Path(name).name == RunFolder(Path()).model.name else Path(name).name
    link = f"[{name}](https://huggingface.co/{name})" if _hub_id(model.name) else f"`{shown or name}`"
    file = f", file `{model.gguf_file}`" if model.gguf_file else ""
    start = f"{what}, fine-tuned from {link}{file}{f', commit `{commit}`' if commit else ''}{beside}."
    packed = config.adapter.quantization
    if packed is None:
        return start
    merged = "" if is_adapter else " It is merged into the weights as they were before."
    return f"{start} The adapter was trained beside frozen weights in 4 bits ({packed.value}, QLoRA).{merged}"


def _describe_data(config: RunConfig, reports: Sequence[PoolReport]) -> str:
    def public(path: str) -> str:
        # An address or a Hub id; of a file of this machine, its name.
        return redact(path) if scheme_of(path) or _hub_id(path) else Path(path).name

    sources = [
        f"- {name}: {source.kind.value}" + (f" `{public(source.path)}`" if source.path else "")
        for name, source in config.data.sources.items()
    ]
    rows = [f"| {r.name} | {r.sequences:,} | {r.share:.1%} | {r.tokens:,} | {r.epochs:.2f} |" for r in reports]
    table = ["| pool | sequences | share | tokens | epochs |", "|---|---|---|---|---|", *rows]
    return "\n".join([*sources, *(["", *table] if rows else [])])


def _describe_losses(lines: Sequence[Mapping[str, object]], task: TaskName, exported: Exported) -> str:
    title, name = ("Rewards", "reward") if task.traits.is_reinforcement else ("Losses", "loss")
    value = exported.held_out_loss
    if value is not None and task.traits.is_reinforcement:
        # A reward of 0 is no negative zero.
        value = 0.0 - value
    measured = "" if value is None else f", with a held-out {name} of {value:.4f}"
    return f"## {title}\n\n{describe_progress(lines, task)}\n\nThese weights are of step {exported.step:,}{measured}."


def _describe_command(config: RunConfig, commit: str | None, ranks: int) -> str:
    # To whoever reads this, the same start, and none of the writer's repositories and budgets.
    model = replace(config.model, revision=commit or config.model.revision)
    no_budgets: dict[str, Any] = dict.fromkeys(BUDGETS)
    config = replace(config, model=model, export=ExportConfig(), train=replace(config.train, **no_budgets))
    processes = "" if ranks == 1 else f" launch.processes={ranks}"
    values = {"defaults": ["run_schema", "_self_"]} | public_values(to_values(config))
    text = to_yaml_text(values)
    said = " model.trust_remote_code=true" if model.trust_remote_code else ""
    return (
        "Save this as `config.yaml`, then:\n\n"
        f"```\nhfdist run config.yaml{processes}{said}\n"
        f"```\n\n<details><summary>config.yaml</summary>\n\n```yaml\n{text}```\n\n</details>"
    )


def public_values(value: object) -> Any:
    """Give the same values without users, passwords and queries of addresses. A config holds no other secrets."""
    if isinstance(value, dict):
        return {key: public_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [public_values(item) for item in value]
    return re.sub(r"\w+://\S+", lambda found: redact(found[0]), value) if isinstance(value, str) else value
