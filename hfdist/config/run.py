"""The whole config of a run as one typed value, with the small groups that belong to the run and not to the model.

A key stands in one place, its field: type, default, limit, and in the docstring below what it is. The first paragraph
is what `--help` and docs/keys.md show. The files of conf/ say only what is different in a preset.
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
    # Python refuses to read a number of thousands of digits.
    lambda value: value == AUTO or (value.isdecimal() and len(value) < 10 and int(value) >= 1),
)
_CURRENCY = Limit("a name, such as EUR", lambda value: bool(value.strip()))
# Kept here, since asking transformers imports torch.
_SAME_NAME = "clearml codecarbon comet_ml dagshub dvclive kubeflow mlflow neptune swanlab trackio wandb"
TRACKERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: (name,) for name in _SAME_NAME.split()}
    | {"azure_ml": ("azureml",), "flyte": ("flytekit",), "tensorboard": ("tensorboard", "tensorboardX")}
)
"""Trackers that transformers knows, each with its packages, of which one must be installed."""


@dataclass(kw_only=True)
class RunSection:
    """`run.*`: the run's name and folder."""

    name: str = "default"
    """Name of the folder, in which the run goes on; where none is given, another command gets another folder."""
    dir: str = "runs/${run.name}"
    """Folder of all that the run writes: config.yaml, run.json, metrics.jsonl, checkpoints/, model/, loss.png.

    Relative to where the command was started.
    """

    @property
    def folder(self) -> RunFolder:
        """The folder, with the paths of what is in it."""
        return RunFolder(Path(self.dir))


@dataclass(kw_only=True)
class LaunchConfig:
    """`launch.*`: the processes that a recipe starts by itself on this machine.

    It has no effect under `accelerate launch` and torchrun, which start the processes.
    """

    processes: str = field(default="1", metadata={LIMIT: _PROCESSES})
    """Number of processes, or auto: one for each GPU."""
    max_restarts: int = limited(0, at_least=0)
    """How often all start again after one was lost or told to stop."""


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
    """Whether the run evaluates before the first step, too; null: if the model is trained already.

    A complete config has true or false.
    """
    prompts: list[str] = field(default_factory=list)
    """Texts that the model continues greedily at each evaluation, into samples.jsonl."""
    chat: Chat = Chat.auto
    """Whether prompts are a user's message: auto (where the tokenizer has a chat template) | always | never."""
    max_new_tokens: int = limited(64, at_least=1)
    """Most tokens of each continuation.

    An end-of-text token ends it sooner.
    """
    metrics: list[str] = field(default_factory=list)
    """Metrics of continued held-out prompts: exact_match | word_f1 | of packages (docs/fine-tuning.md).

    Packages offer them by entry points `hfdist.metrics`.
    """
    num_generations: int = limited(32, at_least=1)
    """Most held-out examples that are continued for the metrics."""
    # A checkpoint holds the newest 1000.
    patience: int | None = limited(None, at_least=1, at_most=999)
    """Evaluations without a lower held-out loss, after which the run stops; null: never."""
    min_delta: float = limited(0.0, at_least=0)
    """Least difference to the best held-out loss that counts as lower."""
    export: Export = Export.last
    """Which weights are exported: last | best (the lowest held-out loss, with checkpoint.keep_best=true)."""
    lm_eval: list[str] = field(default_factory=list)
    """Tasks of the harness lm-eval for the exported model, such as [hellaswag]."""
    lm_eval_include: str | None = None
    """Folder with YAML files of your own tasks."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """`checkpoint.*`: when to save, what to keep, where to start.

    Checkpoints are `<run.dir>/checkpoints/step-00000100`.
    """

    every: int | None = limited(None, at_least=1)
    """Steps between saves; null: none."""
    keep: int = limited(2, at_least=1)
    """Number of the newest checkpoints that stay."""
    keep_every: int | None = limited(None, at_least=1)
    """Steps: a checkpoint at each multiple stays, too; null: none."""
    keep_best: bool = False
    """Whether the checkpoint with the lowest held-out loss stays, too."""
    replicate_every: int | None = limited(None, at_least=1)
    """Steps between copies in memory, for a start after a lost process or machine; null: none.

    Each save leaves one, too.
    """
    replicate_dir: str = "/dev/shm"
    """Folder in memory, with room for two copies of what this machine and the one before hold."""
    background: bool = True
    """Whether a copy in memory is written while training goes on; false: no copy, and training waits."""
    mirror: str | None = None
    """Address of a folder in a store, such as s3://bucket/runs, that gets each checkpoint, too; null: none.

    s3://, gs://, hf:// or file://. The run's own folder there has the name `run.name`. Credentials are those of the
    store's own variables and files.
    """
    mirror_minutes: float = limited(60.0, at_least=0)
    """Longest time that the end of a run waits for the mirror, in minutes."""
    resume: str = "auto"
    """auto: the newest that verifies | never | the path of one to begin from (again: from its own).

    `auto` takes that of the mirror where it is newer, and begins at step 0 if there are none; `never` refuses a folder
    that has checkpoints; one of another run counts until this run has checkpoints of its own.
    """
    allow_changes: bool = False
    """Whether a run goes on though keys or data files have changed that change the training, such as the batch size."""


@dataclass(kw_only=True)
class WatchConfig:
    """`watch.*`: when a rank counts as lost.

    Only runs with several processes are watched.
    """

    heartbeat_seconds: float | None = limited(60.0, at_least=1)
    """Longest silence, and longest time without progress while others wait; null: no watch."""


@dataclass(kw_only=True)
class ReportConfig:
    """`report.*`: what people and scripts see of a run.

    `metrics.jsonl` is always written.
    """

    log_every: int = limited(1, at_least=1)
    """Steps between lines of metrics.jsonl."""
    to: list[str] = field(default_factory=list)
    """Trackers, such as [tensorboard,wandb]; also trackio, mlflow, and all others of transformers."""
    project: str | None = None
    """Project of the trackers, in MLflow the experiment; null: as their variables say, or hfdist.

    The run's name there is `run.name`.
    """
    progress: bool = True
    """Whether rank 0 shows a bar."""
    preview: int = limited(0, at_least=0)
    """Sequences shown before the first step, with targets and context told apart; 0: none."""
    plot: bool = True
    """Whether the end draws loss.png, with matplotlib."""
    timeline: bool = True
    """Whether a pipeline leaves timeline.json, its measured schedule: a Chrome trace, which `hfdist report` draws."""
    plan: bool = True
    """Whether memory and time are planned before the first step, and graded at the end: plan.json, grade.json."""
    alerts: bool = True
    """Whether the run warns of what goes wrong, such as a spike of the loss or a slow rank."""
    alert_command: str | None = None
    """Program that gets each alert as JSON; only your command line can give it.

    Split into words as a shell does, and started without one. It gets the alert on its standard input.
    """
    sample_prompt: str | None = None
    """Text that the trained model continues at the end; null: the prompt of a held-out example, if there are any."""
    sample_tokens: int = limited(64, at_least=0)
    """Most tokens that it then writes; 0: no sample."""


@dataclass(kw_only=True)
class CostConfig:
    """`cost.*`: what devices and energy cost, and what stands in for a meter where there is none."""

    price_per_hour: float | None = limited(None, at_least=0)
    """Price of an hour of one GPU, or of one host where there is none; null: not known."""
    price_per_kwh: float | None = limited(None, at_least=0)
    """Price of energy, where the hours do not cover it; null: not known, or covered."""
    currency: str = field(default="USD", metadata={LIMIT: _CURRENCY})
    """Currency of the prices."""
    gco2e_per_kwh: float | None = limited(None, at_least=0)
    """Grams of CO2 equivalent for a kWh of your grid; null: not known."""
    device_watts: float | None = limited(None, above=0)
    """Watts of a GPU without a meter: a figure for all its time; null: its energy is not known."""
    host_watts: float | None = limited(None, above=0)
    """Watts of a whole host without a meter, under full load; null: 5 W for each core."""


@dataclass(kw_only=True)
class ExportConfig:
    """`export.*`: where the trained model goes.

    It is always written into the run's folder.
    """

    push_to: str | None = None
    """Hub repository OWNER/NAME to upload the model to at the end; checked before the training."""
    private: bool = True
    """Whether a repository that is made new is private."""
    revision: str | None = None
    """Branch to upload to; null: the default one."""


@dataclass(kw_only=True)
class RunConfig:
    """What a recipe receives."""

    run: RunSection = field(default_factory=RunSection)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """How a run's processes start on this machine; under `accelerate launch` or torchrun, these start them."""
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
