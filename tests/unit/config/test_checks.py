"""Ranges of all numbers, and contradictions between keys."""

import copy
from functools import reduce

import pytest

from hfdist.config.checks.values import UNBUILT_AXES, check_config
from hfdist.config.composition.compose import compose_config
from hfdist.config.schema import all_keys
from hfdist.errors import ConfigError

LIMITED = [key for key in all_keys().values() if key.limit is not None and key.name != "launch.processes"]  # a text
HUB = ["model=hub", "model.name=some/model"]


def a_name_for(key):
    """The key with the source that is there."""
    return key.replace("*", "stdlib")


def error_of(*overrides):
    """The error that these overrides cause."""
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    return caught.value


@pytest.fixture(scope="module")
def composed():
    """What all numbers are put into, one at a time: composing takes a hundred times as long as a check."""
    return compose_config(["data.eval_fraction=0", "data.eval_sources.stdlib.path=x"])


def error_with(composed, name, value):
    """The error that the checks find when one value is another."""
    config = copy.deepcopy(composed)
    *sections, last = name.split(".")
    holder = reduce(
        lambda holder, part: holder[part] if isinstance(holder, dict) else getattr(holder, part), sections, config
    )
    assert hasattr(holder, last)
    setattr(holder, last, value)
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    return caught.value


@pytest.mark.parametrize("key", [key.name for key in LIMITED])
def test_no_limited_number_is_negative(composed, key):
    name = a_name_for(key)
    error = error_with(composed, name, -1)
    assert (error.where, error.found, error.allowed) == (name, -1, all_keys()[key].allowed)
    assert "number" in error.allowed


@pytest.mark.parametrize("key", [key.name for key in LIMITED if "whole" not in key.allowed])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_no_limited_number_is_infinite(composed, key, value):
    name = a_name_for(key)
    error = error_with(composed, name, float(value))
    assert (error.where, str(error.found)) == (name, value)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("data.sequence_length", 2, 1),
        ("data.eval_fraction", 0.5, 0.51),
        ("optimizer.beta1", 0.0, 1.0),
        ("optimizer.decay_fraction", 1.0, 0.0),
        ("optimizer.lr", 1e-30, 0.0),
        ("train.eval_every", 1, 0),
        ("model.tokenizer.vocab_size", 257, 256),
        ("data.workers", 0, -1),
    ],
)
def test_the_ends_of_ranges(key, good, bad):
    compose_config([f"{key}={good}"])
    error = error_of(f"{key}={bad}")
    assert (error.where, error.found) == (key, bad)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_an_infinite_number_of_the_command_line(value):
    error = error_of(f"optimizer.lr={value}")
    assert (error.where, str(error.found)) == ("optimizer.lr", value)


GIVEN = ["data.eval_fraction=0"]
BEST = ["checkpoint.keep_best=true", "train.eval_every=1"]

# overrides -> (where, what or allowed contains, hint contains)
CONTRADICTIONS = [
    (
        ["data=mixture", "+data.sources.a={path: x, epochs: 1}", "+data.sources.b={path: y}"],
        "data.sources.*.epochs",
        "cannot end at different times",
        "data.sources.a.weight=1 data.sources.b.weight=1",
    ),
    (["checkpoint.keep_every=750"], "checkpoint.keep_every", "are not saved", "checkpoint.keep_every=1000"),
    (["checkpoint.keep_best=true"], "checkpoint.keep_best", "the best is not known", "train.eval_every=500"),
    (["checkpoint.keep_best=true", "train.eval_every=300"], "checkpoint.keep_best", "divides checkpoint.every", None),
    (["model.type=null"], "model.name, model.type", "no model is named", "model=small"),
    (["model=hub"], "model.name, model.type", "no model is named", "model=hub model.name="),
    (["model.name=a/b"], "model.name, model.type", "two models", "model=hub model.name=a/b"),
    (["model.init=pretrained"], "model.init", "need the name", "model.init=random"),
    ([*HUB, "model.tokenizer.name=null"], "model.tokenizer.name", "tokenizer", "model.tokenizer.name=some/model"),
    (["model.dtype=float16"], "model.dtype", "cannot be trained", "train.precision=fp16"),
    (["model.dtype=float16", "train.precision=fp16"], "model.dtype", "cannot be trained", "model.dtype=float32"),
    (["model.dtype=bfloat16", "train.precision=fp16"], "model.dtype", "float32", "train.precision=bf16"),
    (["data.sources.stdlib.subset=a"], "data.sources.stdlib.subset", "only a dataset of the Hub", "kind=hub"),
    (["~data.sources.stdlib"], "data.sources", "nothing to read", "data=stdlib"),
    (["~data"], "data.sources", "nothing to read", "data=stdlib"),
    (["strategy=ddp", "strategy.data=1"], "strategy.data", "fewer data ranks", "strategy.min_data=1"),
    (["strategy.offload=cpu"], "strategy.offload", "without sharding", "strategy=zero3_offload"),
    (["strategy.deepspeed.a=1"], "strategy.deepspeed", "without sharding", "strategy=zero1"),
    (["strategy=zero2", "strategy.pipeline=2"], "strategy.sharding", "until it is flushed", "strategy.sharding=zero1"),
    (["strategy=zero3", "strategy.pipeline=2"], "strategy.sharding", "until it is flushed", "strategy.sharding=zero1"),
    (["optimizer.warmup_steps=5", "optimizer.warmup_tokens=9"], None, "more than once", "optimizer.warmup_tokens=null"),
    (
        ["optimizer.warmup_steps=5", "optimizer.warmup_fraction=0.1"],
        None,
        "more than once",
        "optimizer.warmup_fraction=null",
    ),
    (["train.max_steps=null"], "train.max_steps, train.epochs", "nothing ends the run", "train.epochs=1"),
    (["optimizer.warmup_steps=100"], "optimizer.warmup_steps", "fewer than 100", "optimizer.warmup_steps=10"),
    (["optimizer.warmup_tokens=1622017"], "optimizer.warmup_tokens", "fewer than 100", "optimizer.warmup_tokens="),
    (
        ["optimizer=adamw_wsd", "optimizer.warmup_steps=90"],
        "optimizer.decay_fraction",
        "warm-up and decay are longer",
        None,
    ),
    (["optimizer.schedule=linear", "optimizer.min_lr_ratio=0.1"], "optimizer.min_lr_ratio", "ends at 0", "cosine"),
    (["optimizer.schedule=constant", "optimizer.min_lr_ratio=0"], "optimizer.min_lr_ratio", "its peak", "null"),
    (["train.micro_batch_size=64"], "train.micro_batch_size", "larger than the global", "train.micro_batch_size=32"),
    (["train.eval_every=5", "data.eval_fraction=0"], "train.eval_every", "nothing is held out", "data.eval_fraction"),
    (
        ["evaluate.at_start=true", "evaluate.prompts=[a]", "evaluate.metrics=[exact_match]", "data.eval_fraction=0"],
        "evaluate.at_start, evaluate.prompts, evaluate.metrics",
        "nothing is held out",
        "evaluate.at_start=false evaluate.prompts=[] evaluate.metrics=[]",
    ),
    (["data.eval_sources.v={path: x}"], "data.eval_fraction", "given, and a share", "data.eval_fraction=0"),
    ([*GIVEN, "data.eval_sources.v={}"], "data.eval_sources.v.path", "no path", "data.eval_sources.v.path=..."),
    ([*GIVEN, "data.eval_sources.v={path: x, weight: 2}"], "data.eval_sources.v.weight", "all read, once", "null"),
    ([*GIVEN, "data.eval_sources.v={path: x, epochs: 2}"], "data.eval_sources.v.epochs", "all read, once", "null"),
    (
        [*GIVEN, "data.eval_sources.v={path: x, kind: tokens}"],
        "model.tokenizer.name",
        "needs the tokenizer",
        "model.tokenizer.name=x/tokenizer",
    ),
    (["evaluate.patience=2"], "evaluate.patience", "during the run", "train.eval_every=500"),
    (["evaluate.min_delta=0.1"], "evaluate.min_delta", "nothing is stopped early", "evaluate.patience=3"),
    (["evaluate.export=best"], "evaluate.export", "none is kept for it", "checkpoint.keep_best=true"),
    (["evaluate.export=best", "checkpoint=none", *BEST], "evaluate.export", "none is kept", "evaluate.export=last"),
    (["evaluate.prompts=[a,' ']"], "evaluate.prompts[1]", "a prompt is empty", None),
    (["evaluate.lm_eval_include=/tmp"], "evaluate.lm_eval_include", "no task is asked for", "evaluate.lm_eval=[NAME]"),
    (["evaluate.lm_eval=[a]", "evaluate.lm_eval_include=/no/such"], "evaluate.lm_eval_include", "no such folder", None),
    (["checkpoint.resume=atuo"], "checkpoint.resume", "auto, never", "checkpoint.resume=auto"),
    (["checkpoint.resume=/no/such/folder"], "checkpoint.resume", "folder that exists", "checkpoint.resume=auto"),
    (["checkpoint.resume=''"], "checkpoint.resume", "auto, never", "checkpoint.resume=auto"),
    (["run.name=a/b"], "run.name", "plain folder name", "run.dir="),
    (["run.name='..'"], "run.name", "plain folder name", "run.dir="),
    (["run.name=''"], "run.name", "plain folder name", None),
    (["run.name='a b'"], "run.name", "plain folder name", None),
    (["run.dir=' '"], "run.dir", "not a folder", "run.dir=runs/first"),
]


@pytest.mark.parametrize(("overrides", "where", "words", "hint"), CONTRADICTIONS, ids=lambda v: str(v)[:60])
def test_contradictions(overrides, where, words, hint):
    error = error_of(*overrides)
    if where is not None:
        assert error.where == where
    assert words in f"{error.what} {error.allowed}"
    if hint is not None:
        assert hint in (error.hint or ""), error


@pytest.mark.parametrize("axis", UNBUILT_AXES)
def test_axes_that_are_not_built_say_what_there_is(axis):
    error = error_of("strategy=ddp", f"strategy.{axis}=2")
    assert (error.where, error.found) == (f"strategy.{axis}", "2")
    assert "not built yet" in error.what
    assert "ZeRO-1, 2 and 3" in str(error.allowed)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.warmup_steps=99"],
        ["optimizer.warmup_fraction=0.9", "train.max_steps=1"],
        ["optimizer.warmup_steps=99", "train.max_steps=null", "train.epochs=1"],
        ["optimizer.warmup_tokens=1622016"],  # 99 steps of 32 x 512 tokens
        ["optimizer=adamw_wsd", "optimizer.warmup_steps=80"],
        ["optimizer=adamw_wsd", "optimizer.min_lr_ratio=0"],
        ["strategy=zero3", "strategy.offload=cpu", "strategy.deepspeed.wall_clock_breakdown=true"],
        ["checkpoint.resume=never"],
        ["checkpoint.resume=/"],
        [*HUB],
        [*HUB, "model.init=random", "model.tokenizer.name=null"],
        ["model.dtype=bfloat16", "train.precision=bf16"],
        ["train.precision=fp16"],
        ["data.eval_fraction=0"],
        ["run.name='lr=1e-3,b.2+c'"],
        ["train.micro_batch_size=32"],
    ],
    ids=str,
)
def test_what_is_fine_stays_fine(overrides):
    check_config(compose_config(overrides))


def test_recomputing_less_needs_gradient_checkpointing():
    error = error_of("train.recompute=cheap")
    assert error.where == "train.recompute"
    assert "train.gradient_checkpointing=true" in error.hint
    compose_config(["train.recompute=cheap", "train.gradient_checkpointing=true"])
