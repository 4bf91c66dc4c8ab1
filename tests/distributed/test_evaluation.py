"""Evaluations in every layout: the same figures, samples and decisions, and a training that they leave alone."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError
from hfdist.records import RunFolder, read_lines
from hfdist.trainer.evaluation.generation import GROUP
from tests.distributed.runs import SMALL, losses, pretrain, weights
from tests.marks import many
from tests.packages import install_package

pytestmark = pytest.mark.distributed

LAYOUTS = [many("ddp", 2), ("fsdp2", 2), many("zero3", 2), many("tensor", 2), many("pipeline", 2)]
STEPS = ("train.max_steps=4", "train.eval_every=2", "data.eval_sequences=6", "data.workers=0")
# Weights so large that greedy continuations are not one token again and again.
LIVELY = ("model.config.initializer_range=0.5",)
MEASURES = (
    "evaluate.at_start=true",
    "evaluate.prompts=[import os,'def add(a, b):']",
    "evaluate.max_new_tokens=6",
    "evaluate.metrics=[word_f1,draws,fails]",
    "evaluate.num_generations=5",
)
# Draws from all generators, as a careless metric may, and tells what it was given.
METRICS_SOURCE = """
import random, zlib, numpy, torch
def draws(generations):
    random.random(), numpy.random.rand(), torch.rand(1)
    text = repr([(one.prompt, one.text, one.reference) for one in generations])
    return {"texts": zlib.crc32(text.encode()), "count": len(generations)}
def fails(generations):
    raise RuntimeError("no such thing")
"""


def evaluations(run_dir):
    return [line for line in read_lines(RunFolder(run_dir).metrics) if "eval_loss" in line]


@pytest.fixture(scope="module")
def measured(tmp_path_factory, cache_dir):
    """One run a layout with all measures, made when first asked for."""
    made = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("packages")
        install_package(folder, monkeypatch, "careless", METRICS_SOURCE, GROUP, draws="draws", fails="fails")

        def run(strategy, num_processes, *more):
            key = (strategy, *more)
            if key not in made:
                overrides = (f"strategy={strategy}", *STEPS, *LIVELY, *MEASURES, *more)
                made[key] = pretrain(tmp_path_factory.mktemp(strategy), num_processes, *overrides)
            return made[key]

        yield run


def test_before_and_after_stand_in_the_metrics(measured):
    before, *_, after = evaluations(measured("single", 1))
    assert (before["step"], after["step"]) == (0, 4)
    assert after["eval_loss"] < before["eval_loss"]
    for line in (before, after):
        assert line["eval_perplexity"] == pytest.approx(math.exp(line["eval_loss"]))
        assert line["eval_draws_count"] == 5
        assert line["eval_fails"] is None, "a metric that raises leaves a gap, and the run goes on"


def test_samples_are_written_at_each_evaluation(measured):
    lines = read_lines(RunFolder(measured("single", 1)).samples)
    prompts = ["import os", "def add(a, b):"]
    assert [(line["step"], line["prompt"]) for line in lines] == [(s, p) for s in (0, 2, 4) for p in prompts]
    assert len({line["text"] for line in lines}) > 2, "or mix-ups would not be seen"


@pytest.mark.parametrize(("strategy", "num_processes"), LAYOUTS)
def test_every_layout_gives_the_same_samples_and_figures(measured, strategy, num_processes):
    reference, run = measured("single", 1), measured(strategy, num_processes)
    assert read_lines(RunFolder(run).samples) == read_lines(RunFolder(reference).samples)
    for ours, theirs in zip(evaluations(run), evaluations(reference), strict=True):
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-5)
        for name in ("step", "eval_tokens", "eval_word_f1", "eval_draws_texts", "eval_draws_count"):
            assert ours[name] == theirs[name], name


@pytest.mark.parametrize(("strategy", "num_processes"), [("single", 1), many("pipeline", 2)])
def test_evaluations_leave_the_training_alone_bit_by_bit(measured, tmp_path, strategy, num_processes):
    dropout = "model.config.attention_dropout=0.2"
    run = measured(strategy, num_processes, dropout)
    settings = (*STEPS, *LIVELY, dropout, "train.eval_every=null")
    bare = pretrain(tmp_path, num_processes, f"strategy={strategy}", *settings)
    assert losses(run) == losses(bare)
    for name, reference in weights(bare).items():
        assert torch.equal(weights(run)[name], reference), name


# Each evaluation but the first improves by less than that.
PATIENT = ("train.max_steps=12", "train.eval_every=1", "evaluate.patience=2", "evaluate.min_delta=5", "report=quiet",
           "checkpoint=default", "checkpoint.every=2", "data.workers=0", "data.eval_sequences=2")  # fmt: skip


def checkpoints(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_run_stops_early_and_does_so_again_when_it_is_resumed(tmp_path, cache_dir):
    run = pretrain(tmp_path / "run", 2, "strategy=ddp", *PATIENT)
    assert len(losses(run)) == 3, "the first evaluation, and two without an improvement"
    assert checkpoints(run)[-1] == "step-00000003", "saved where it stops"

    once_more = tmp_path / "finished"
    shutil.copytree(run, once_more)
    pretrain(once_more, 1, "strategy=single", *PATIENT)
    assert losses(once_more) == losses(run), "a run that has stopped early is a finished one"

    shutil.rmtree(run / "checkpoints" / "step-00000003")
    shutil.rmtree(run / "model")
    before = losses(run)
    pretrain(run, 1, "strategy=single", *PATIENT)
    assert losses(run) == pytest.approx(before, rel=1e-5), "it knows what was evaluated before it was resumed"


def test_the_best_model_is_exported(tmp_path, cache_dir):
    explode = ("optimizer.lr=3e-1", "optimizer.schedule=constant", "optimizer.warmup_steps=2", "train.max_steps=6")
    run = pretrain(
        tmp_path, 2, "strategy=zero2", *explode, "checkpoint=default", "checkpoint.every=1",
        "checkpoint.keep=1", "checkpoint.keep_best=true", "train.eval_every=1", "evaluate.export=best",
        "data.workers=0", "data.eval_sequences=4",
    )  # fmt: skip
    evaluated = {line["step"]: line["eval_loss"] for line in evaluations(run)}
    best = min(evaluated, key=evaluated.__getitem__)
    assert best < 6, "or the test shows nothing"
    kept = load_file(run / "checkpoints" / f"step-{best:08d}" / "model.safetensors")
    last = load_file(run / "checkpoints" / "step-00000006" / "model.safetensors")
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, kept[name]), name
    assert any(not torch.equal(tensor, last[name]) for name, tensor in weights(run).items())


def test_given_files_are_the_held_out_set(tmp_path, cache_dir):
    texts = {"short": ["one line\n", "and another one\n"], "long": ["def add(a, b):\n    return a + b\n" * 30]}
    sources = []
    for name, documents in texts.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        sources.append(f"data.eval_sources.{name}.path={tmp_path / name}.jsonl")
    given = ("data.eval_fraction=0", *sources, "train.max_steps=3", "data.workers=0", "data.eval_sequences=100")
    lines = {}
    for strategy, num_processes in (("single", 1), ("ddp", 2)):
        run = pretrain(tmp_path / strategy, num_processes, f"strategy={strategy}", *given)
        (lines[strategy],) = evaluations(run)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    # With an end-of-text token each; the first token of a document and of a sequence is no target.
    lengths = {name: [len(tokenizer(text)["input_ids"]) + 1 for text in documents] for name, documents in texts.items()}
    targets = {"short": sum(lengths["short"]) - 2, "long": lengths["long"][0] - math.ceil(lengths["long"][0] / 64)}
    line = lines["single"]
    assert line["eval_tokens"] == sum(targets.values()), "all documents count, the ends of sources too"
    overall = sum(line[f"eval_{name}_loss"] * count for name, count in targets.items()) / line["eval_tokens"]
    assert line["eval_loss"] == pytest.approx(overall)
    for name in ("eval_loss", "eval_short_loss", "eval_long_loss"):
        assert lines["ddp"][name] == pytest.approx(line[name], rel=1e-5)


def test_files_that_are_missing_are_named_by_their_key(tmp_path, cache_dir):
    from hfdist.data import open_held_out_sources

    config = compose_config([*SMALL, "data.eval_fraction=0", f"data.eval_sources.val.path={tmp_path}/none.jsonl"])
    with pytest.raises(ConfigError) as caught:
        open_held_out_sources(SimpleNamespace(eos_token_id=0), config.data)
    assert "data.eval_sources.val.path" in caught.value.where
