"""The whole config of a run as one typed value, with the small groups that belong to the run and not to the model.

The comments of conf/ say what each key means; `--help` and docs/keys.md show them. The dataclasses give type, default
and limit, and say only what a comment has no room for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from hfdist.config.data import DataConfig
from hfdist.config.islands import IslandsConfig
from hfdist.config.model import AdapterConfig, ModelConfig
from hfdist.config.optimizer import OptimizerConfig
from hfdist.config.ranges import LIMIT, Limit, limited
from hfdist.config.strategy import StrategyConfig
from hfdist.config.task import TaskConfig
from hfdist.config.train import TrainConfig
from hfdist.records.run_folder import RunFolder

AUTO = "auto"
_PROCESSES = Limit(
    f"a whole number >= 1, or {AUTO} (one for each GPU of this machine)",
    lambda value: value == AUTO or (value.isdecimal() and int(value) >= 1),
)
_CURRENCY = Limit("a name, such as EUR", lambda value: bool(value.strip()))
# Kept here, since asking transformers imports torch.
_SAME_NAME = "clearml codecarbon comet_ml dagshub dvclive kubeflow mlflow neptune swanlab trackio wandb"
TRACKERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: (name,) for name in _SAME_NAME.split()}
    | {"azure_ml": ("azureml",), "flyte": ("flytekit",), "tensorboard": ("tensorboard", "tensorboardX")}
)
"""Those that transformers knows, with their packages, of which one must be installed."""


@dataclass(kw_only=True)
class RunSection:
    """`run.*`: the run's name and folder."""

    name: str = "default"
    dir: str = "runs/${run.name}"
    """Everything that the run writes goes here. Relative to where the command was started."""

    @property
    def folder(self) -> RunFolder:
        """The folder, with the paths of what is in it."""
        return RunFolder(Path(self.dir))


@dataclass(kw_only=True)
class LaunchConfig:
    """`launch.*`: the processes that a recipe starts by itself.

    On this machine. Under `accelerate launch` and torchrun, which start the processes, it has no effect.
    """

    processes: str = field(default="1", metadata={LIMIT: _PROCESSES})
    max_restarts: int = limited(0, at_least=0)


class Chat(Enum):
    """Whether prompts go through the tokenizer's chat template, as what a user says.

    `auto`: where the tokenizer has one.
    """

    auto = "auto"
    always = "always"
    never = "never"


class Export(Enum):
    """Whose weights become `<run.dir>/model`."""

    last = "last"
    best = "best"


@dataclass(kw_only=True)
class EvaluateConfig:
    """`evaluate.*`: what is measured on held-out data, when a run stops early, and what becomes of the best model.

    Evaluations are made every `train.eval_every` steps, and at the end.
    """

    at_start: bool | None = None
    """None: of a model that is trained already, until the config is complete."""
    prompts: list[str] = field(default_factory=list)
    chat: Chat = Chat.auto
    max_new_tokens: int = limited(64, at_least=1)
    """Most tokens of each continuation; an end-of-text token ends it sooner."""
    metrics: list[str] = field(default_factory=list)
    """Names of metrics that installed packages offer (entry points `hfdist.metrics`), or `exact_match`, `word_f1`: of
    continued held-out prompts, beside what stands there."""
    num_generations: int = limited(32, at_least=1)
    # A checkpoint holds the newest 1000.
    patience: int | None = limited(None, at_least=1, at_most=999)
    min_delta: float = limited(0.0, at_least=0)
    export: Export = Export.last
    lm_eval: list[str] = field(default_factory=list)
    lm_eval_include: str | None = None


@dataclass(kw_only=True)
class CheckpointConfig:
    """`checkpoint.*`: when to save, what to keep, where to start.

    Checkpoints are `<run.dir>/checkpoints/step-00000100`.
    """

    every: int | None = limited(None, at_least=1)
    keep: int = limited(2, at_least=1)
    keep_every: int | None = limited(None, at_least=1)
    keep_best: bool = False
    replicate_every: int | None = limited(None, at_least=1)
    """Steps between replicas in the memory of this machine and of the next one; each save leaves one, too."""
    replicate_dir: str = "/dev/shm"
    background: bool = True
    resume: str = "auto"
    """`auto`: the newest that verifies, from step 0 if there are none; `never`: refuse a folder that has checkpoints;
    or the path of one to begin from: of another run, it counts until this run has checkpoints of its own."""
    allow_changes: bool = False


@dataclass(kw_only=True)
class WatchConfig:
    """`watch.*`: when a rank counts as lost.

    Only runs with several processes are watched.
    """

    heartbeat_seconds: float | None = limited(60.0, at_least=1)
    """A rank that is silent for so long, or without progress while the others wait for it, ends the run with exit code
    6; null: no watch."""


@dataclass(kw_only=True)
class ReportConfig:
    """`report.*`: what people and scripts see of a run.

    `metrics.jsonl` is always written.
    """

    log_every: int = limited(1, at_least=1)
    to: list[str] = field(default_factory=list)
    project: str | None = None
    """What trackers file the run under; the run's name there is `run.name`."""
    progress: bool = True
    preview: int = limited(0, at_least=0)
    plot: bool = True
    timeline: bool = True
    plan: bool = True
    alerts: bool = True
    alert_command: str | None = None
    """Split into words as a shell does, and started without one. It gets the alert as JSON on its standard input."""
    sample_prompt: str | None = None
    sample_tokens: int = limited(64, at_least=1)


@dataclass(kw_only=True)
class CostConfig:
    """`cost.*`: what devices and energy cost, and what stands in for a meter where there is none."""

    price_per_hour: float | None = limited(None, at_least=0)
    price_per_kwh: float | None = limited(None, at_least=0)
    currency: str = field(default="USD", metadata={LIMIT: _CURRENCY})
    gco2e_per_kwh: float | None = limited(None, at_least=0)
    device_watts: float | None = limited(None, above=0)
    host_watts: float | None = limited(None, above=0)


@dataclass(kw_only=True)
class ExportConfig:
    """`export.*`: where the trained model goes.

    It is always written into the run's folder.
    """

    push_to: str | None = None
    private: bool = True
    revision: str | None = None


@dataclass(kw_only=True)
class RunConfig:
    """What a recipe receives."""

    run: RunSection = field(default_factory=RunSection)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    islands: IslandsConfig = field(default_factory=IslandsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
