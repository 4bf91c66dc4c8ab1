"""Every shipped experiment runs two steps with its own layout, precision and schedule, on a shrunk model."""

from pathlib import Path

import pytest

from hfdist.config.compose import compose_config
from hfdist.config.sources import shipped_folder
from hfdist.testing import run_ranks
from recipes.pretrain import main
from tests.distributed.runs import eval_losses, losses

pytestmark = pytest.mark.distributed

EXPERIMENTS = sorted(path.stem for path in (shipped_folder() / "experiment").glob("*.yaml"))

SHRUNK = {
    "llama": ("hidden_size=32", "intermediate_size=64", "num_hidden_layers=2", "num_attention_heads=2",
              "num_key_value_heads=1"),
    "gpt2": ("n_embd=32", "n_layer=2", "n_head=2"),
}  # fmt: skip


def shrunk(experiment: str, folder: Path):
    """The experiment with small numbers where only the size matters."""
    whole = compose_config([f"+experiment={experiment}", "data=stdlib"])
    overrides = [
        f"+experiment={experiment}",
        "data=stdlib",
        f"run.dir={folder}",
        "data.sequence_length=32",
        "data.eval_sequences=4",
        "model.tokenizer.name=null",
        "model.tokenizer.vocab_size=300",
        "model.tokenizer.train_bytes=100000",
        "train.max_steps=2",
        "train.global_batch_size=4",
        "train.micro_batch_size=1",
        "train.eval_every=1",
        "optimizer.warmup_steps=1",
        "checkpoint.every=null",
        "report=quiet",
        *(f"model.config.{field}" for field in SHRUNK[whole.model.type]),
    ]
    if "vocab_size" in whole.model.config:
        overrides.append("model.config.vocab_size=300")
    return compose_config(overrides), whole


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_two_steps(experiment, tmp_path, cache_dir):
    config, whole = shrunk(experiment, tmp_path)
    assert (config.strategy, config.train.precision, config.train.compile) == (
        whole.strategy,
        whole.train.precision,
        whole.train.compile,
    )
    num_processes = max(2, whole.strategy.min_data) if whole.strategy.data is None else whole.strategy.data
    run_ranks(main.__wrapped__, num_processes, config, group=num_processes > 1)
    assert len(losses(tmp_path)) == 2
    assert len(eval_losses(tmp_path)) == 2
    assert (tmp_path / "model" / "config.json").is_file()


def test_there_are_experiments():
    assert "demo" in EXPERIMENTS
