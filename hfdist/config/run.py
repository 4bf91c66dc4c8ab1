"""The whole config of a run: one typed value, composed from the groups of `conf/`."""

from __future__ import annotations

from dataclasses import dataclass, field

from hfdist.config.adapter import AdapterConfig
from hfdist.config.checkpoint import CheckpointConfig
from hfdist.config.data import DataConfig
from hfdist.config.evaluate import EvaluateConfig
from hfdist.config.export import ExportConfig
from hfdist.config.launch import LaunchConfig
from hfdist.config.model import ModelConfig
from hfdist.config.optimizer import OptimizerConfig
from hfdist.config.report import ReportConfig
from hfdist.config.strategy import StrategyConfig
from hfdist.config.train import TrainConfig
from hfdist.config.watch import WatchConfig


@dataclass(kw_only=True)
class RunSection:
    """`run.*`: the run's name and folder."""

    name: str = "default"
    dir: str = "runs/${run.name}"
    """Everything that the run writes goes here. Relative to where the command was started."""


@dataclass(kw_only=True)
class RunConfig:
    """What a recipe receives."""

    run: RunSection = field(default_factory=RunSection)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
