"""Draw the losses of a run as a PNG."""

from __future__ import annotations

from pathlib import Path

from hfdist.trainer.reporting.callbacks import METRICS, read_metrics


def plot_losses(run_dir: Path) -> Path:
    """Draw `loss.png` from `metrics.jsonl` and give its path."""
    # Here: a run begins without it.
    from matplotlib.figure import Figure

    lines = read_metrics(run_dir / METRICS)
    train = [(line["tokens"], line["loss"]) for line in lines if line.get("loss") is not None]
    # An evaluation before the first step stands at the left edge.
    tokens_at = {0: 0} | {line["step"]: line["tokens"] for line in lines if "tokens" in line}
    held_out = [
        (tokens_at[line["step"]], line["eval_loss"])
        for line in lines
        if line.get("eval_loss") is not None and line["step"] in tokens_at
    ]
    # A Figure of its own, without pyplot, needs no display and leaves no state behind.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if train:
        axes.plot(*zip(*train, strict=True), linewidth=1, color="tab:blue", label="training, each logged step")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), marker="o", markersize=4, color="tab:orange", label="held out")
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(run_dir.name)
    axes.grid(alpha=0.3)
    if train or held_out:
        axes.legend()
    path = run_dir / "loss.png"
    figure.savefig(path, dpi=120)
    return path
