"""`report.*`: what people and scripts see of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hfdist.config.ranges import limited

TRACKERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "azure_ml": ("azureml",),
        "clearml": ("clearml",),
        "codecarbon": ("codecarbon",),
        "comet_ml": ("comet_ml",),
        "dagshub": ("dagshub",),
        "dvclive": ("dvclive",),
        "flyte": ("flytekit",),
        "kubeflow": ("kubeflow",),
        "mlflow": ("mlflow",),
        "neptune": ("neptune",),
        "swanlab": ("swanlab",),
        "tensorboard": ("tensorboard", "tensorboardX"),
        "trackio": ("trackio",),
        "wandb": ("wandb",),
    }
)
"""Those that transformers knows, with their packages, of which one must be installed. Kept here, since asking
transformers imports torch."""


@dataclass(kw_only=True)
class ReportConfig:
    """`metrics.jsonl` is always written."""

    log_every: int = limited(1, at_least=1)
    """Steps between lines."""
    to: list[str] = field(default_factory=list)
    """Trackers of transformers' `report_to`, such as tensorboard or wandb."""
    progress: bool = True
    """Show a progress bar on rank 0."""
    preview: int = limited(0, at_least=0)
    """Sequences shown before the first step, targets and context told apart; 0: none."""
    plot: bool = True
    """Draw loss.png at the end."""
    timeline: bool = True
    """Draw the measured schedule of a pipeline, timeline.png, with a Chrome trace in timeline.json."""
    sample_prompt: str | None = None
    """Text that the trained model continues at the end; null: no sample."""
    sample_tokens: int = limited(64, at_least=1)
