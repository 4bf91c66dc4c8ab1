"""Every shipped experiment runs two steps with its own layout, precision and schedule, on a shrunk model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfdist.config.composition.compose import compose_config
from hfdist.config.strategy import StrategyConfig
from hfdist.testing import run_ranks
from recipes import finetune, pretrain
from tests.distributed.runs import eval_losses, losses
from tests.marks import many
from tests.unit.config.shipped import EXPERIMENTS, OF_PAGES, primary_of
from tests.unit.data.chat_styles import chat_tokenizer

pytestmark = pytest.mark.distributed

SHRUNK = {
    "llama": ("hidden_size=32", "intermediate_size=64", "num_hidden_layers=2", "num_attention_heads=2",
              "num_key_value_heads=1"),
    "gpt2": ("n_embd=32", "n_layer=2", "n_head=2"),
    "gpt_neox": ("hidden_size=32", "intermediate_size=64", "num_hidden_layers=2", "num_attention_heads=2"),
    "qwen3_moe": ("hidden_size=32", "intermediate_size=64", "moe_intermediate_size=16", "num_hidden_layers=2",
                  "num_attention_heads=2", "num_key_value_heads=1", "head_dim=16", "num_experts=4",
                  "num_experts_per_tok=2"),
}  # fmt: skip

# What the models are that experiments of fine-tuning name, and the style of their templates.
MODELS = {"SmolLM2": ("llama", "chatml"), "Meta-Llama-3": ("llama", "llama"), "Qwen3": ("qwen3", "qwen")}
WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}

SHORT = ("train.max_steps=2", "train.global_batch_size=4", "train.micro_batch_size=1", "train.eval_every=1",
         "checkpoint.every=null", "checkpoint.keep_best=false", "report=quiet", "data.eval_sequences=4")  # fmt: skip


def write_model(name: str, folder: Path) -> Path:
    """A tiny model of the kind of a Hub id, with a tokenizer that has a chat template of its style."""
    kind, style = next(found for part, found in MODELS.items() if part in name)
    tokenizer = chat_tokenizer(style)
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), num_key_value_heads=1, **WIDTHS)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def shrunk_degrees(strategy: StrategyConfig) -> dict[str, int]:
    """The same axes, of two ranks each; one data rank where there are two axes besides."""
    axes = ("pipeline", "replicate", "context", "tensor", "expert")
    small = {axis: 2 for axis in axes if getattr(strategy, axis) > 2}
    return small | ({"min_data": 1} if strategy.pipeline > 1 and strategy.tensor > 1 else {})


def shrunk_tuning(experiment: str, folder: Path):
    """An experiment of fine-tuning with small numbers where only the size matters."""
    whole = compose_config([f"+experiment={experiment}", "data=docstrings"], name="finetune")
    model = write_model(whole.model.name, folder / "base")
    overrides = [f"+experiment={experiment}", "data=docstrings", f"model.name={model}", f"run.dir={folder}", *SHORT]
    overrides += ["data.sequence_length=256", "evaluate.prompts=[Hi]", "evaluate.max_new_tokens=3", "train.epochs=null"]
    return compose_config(overrides, name="finetune"), whole


def shrunk(experiment: str, folder: Path):
    """The experiment with small numbers where only the size matters."""
    whole = compose_config([f"+experiment={experiment}", "data=stdlib"])
    overrides = [
        f"+experiment={experiment}",
        "data=stdlib",
        f"run.dir={folder}",
        "data.sequence_length=32",
        "model.tokenizer.name=null",
        "model.tokenizer.vocab_size=300",
        "model.tokenizer.train_bytes=100000",
        "optimizer.warmup_steps=1",
        "optimizer.warmup_tokens=null",
        *SHORT,
        *(f"model.config.{field}" for field in SHRUNK[whole.model.type]),
        *(f"strategy.{axis}={degree}" for axis, degree in shrunk_degrees(whole.strategy).items()),
    ]
    if "vocab_size" in whole.model.config:
        overrides.append("model.config.vocab_size=300")
    return compose_config(overrides), whole


# One of each kind; unit tests compose and plan them all.
ALWAYS = ("gpt2_xl_zero2", "qwen3_4b_sft")
# test_reinforcement.py and test_page_examples.py run those of pages.
OTHERS = [name for name in EXPERIMENTS if name not in (*ALWAYS, *OF_PAGES)]


@pytest.mark.parametrize("experiment", [*ALWAYS, *map(many, OTHERS)])
def test_two_steps(experiment, tmp_path, cache_dir, monkeypatch):
    # The whole compiler takes most of a minute; test_layouts.py has a run with it.
    compiler = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiler(module, backend="aot_eager"))
    tunes = primary_of(experiment) == "finetune"
    config, whole = (shrunk_tuning if tunes else shrunk)(experiment, tmp_path)
    assert (config.strategy, config.train.precision, config.train.compile, config.adapter) == (
        replace(whole.strategy, **shrunk_degrees(whole.strategy)),
        whole.train.precision,
        whole.train.compile,
        whole.adapter,
    )
    mesh = config.strategy.mesh
    num_processes = max(2, mesh.world_size) if config.strategy.data is None else mesh.data
    main = (finetune if tunes else pretrain).main
    run_ranks(main.__wrapped__, num_processes, config, group=num_processes > 1)
    assert len(losses(tmp_path)) == 2
    assert len(eval_losses(tmp_path)) == (3 if config.evaluate.at_start else 2)
    assert (tmp_path / "model" / "config.json").is_file()
    assert (tmp_path / "adapter" / "adapter_config.json").is_file() == config.adapter.is_used
    assert (tmp_path / "samples.jsonl").is_file() == tunes


def test_there_are_experiments():
    assert "demo" in EXPERIMENTS
