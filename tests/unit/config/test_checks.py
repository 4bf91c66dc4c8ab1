"""Ranges of all numbers, contradictions between keys, and secrets in addresses."""

import copy
from functools import reduce

import pytest

from hfdist.config.batch import num_warmup_steps
from hfdist.config.checks.values import check_config
from hfdist.config.composition.compose import compose_config
from hfdist.config.schema import all_keys
from hfdist.errors import ConfigError

LIMITED = [key for key in all_keys().values() if key.limit is not None and key.limit.allowed.startswith("a number")]
HUB = ["model=hub", "model.name=some/model"]
FP8 = ["train.precision=fp8"]
TWO = ["data.sources.web={kind: files, path: a.txt, weight: 2}", "data.sources.stdlib.weight=1"]


def anneal(*changes):
    return [*TWO, f"data.anneal=[{','.join(changes)}]"]


def error_of(*overrides):
    """The error that these overrides cause."""
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    return caught.value


@pytest.fixture(scope="module")
def composed():
    """What all numbers are put into, one at a time: composing takes a hundred times as long as a check."""
    return compose_config(["data.eval_fraction=0", "data.eval_sources.stdlib.path=x"])


def check_with(composed, name, value):
    """Check the config with one value changed."""
    config = copy.deepcopy(composed)
    *sections, last = name.split(".")
    holder = reduce(lambda at, part: at[part] if isinstance(at, dict) else getattr(at, part), sections, config)
    assert hasattr(holder, last)
    setattr(holder, last, value)
    check_config(config)


def test_a_whole_number_that_is_larger_than_any_float_is_out_of_range(composed):
    with pytest.raises(ConfigError, match="out of range"):
        check_with(composed, "train.max_steps", 10**400)


@pytest.mark.parametrize("key", [key.name for key in LIMITED])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_no_limited_number_is_negative_or_infinite(composed, key, value):
    if value != -1 and "whole" in all_keys()[key].allowed:
        return  # its type rules it out
    # The key with the source that is there.
    name = key.replace("*", "stdlib")
    with pytest.raises(ConfigError, match="out of range") as caught:
        check_with(composed, name, value)
    assert (caught.value.where, str(caught.value.found)) == (name, str(value))
    assert caught.value.allowed == all_keys()[key].allowed
    assert "number" in caught.value.allowed


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("data.sequence_length", 2, 1),
        ("data.eval_fraction", 0.0, 0.51),
        ("optimizer.beta1", 0.0, 1.0),
        ("optimizer.decay_fraction", 1.0, 0.0),
        ("optimizer.lr", 1e-30, 0.0),
        ("train.eval_every", 1, 0),
        ("model.tokenizer.vocab_size", 257, 256),
        ("data.workers", 0, -1),
    ],
)
def test_the_ends_of_ranges(composed, key, good, bad):
    check_with(composed, key, good)
    with pytest.raises(ConfigError, match="out of range"):
        check_with(composed, key, bad)


GIVEN = ["data.eval_fraction=0"]
UNEVEN = ["data=mixture", "+data.sources.a={path: x, epochs: 1}", "+data.sources.b={path: y}"]
ASKED = ["evaluate.at_start=true", "evaluate.prompts=[a]", "evaluate.metrics=[exact_match]"]
TOKENS = ["data=tokens", "data.sources.tokens.path=x"]
BEST = ["checkpoint.keep_best=true", "train.eval_every=1"]
PIPED = ["strategy=fsdp2", "strategy.pipeline=2"]

# overrides -> (where, what or allowed contains, hint contains)
CONTRADICTIONS = [
    (["optimizer.lr=nan"], "optimizer.lr", "out of range", None),
    (UNEVEN, "data.sources.*.epochs", "cannot end at different", "data.sources.a.weight=1 data.sources.b.weight=1"),
    (["checkpoint.keep_every=750"], "checkpoint.keep_every", "are not saved", "checkpoint.keep_every=1000"),
    (["checkpoint.keep_best=true"], "checkpoint.keep_best", "the best is not known", "train.eval_every=500"),
    (["checkpoint.keep_best=true", "train.eval_every=300"], "checkpoint.keep_best", "divides checkpoint.every", None),
    (["model.type=null"], "model.name, model.type", "no model is named", "model=small"),
    (["model=hub"], "model.name, model.type", "no model is named", "model=HuggingFaceTB/SmolLM2-135M, model=FOLDER"),
    (["model.name=a/b"], "model.name, model.type", "two models", "model=hub model.name=a/b, or model.name=null"),
    (["model.name=gpt2"], "model.name, model.type", "two models", "model=hub model.name=gpt2, or model.name=null"),
    (
        ["data.eval_fraction=0", "+data.eval_sources.val.kind=tokens"],
        "data.eval_sources.val.path",
        "the source has no path",
        "data.eval_sources.val.path=runs/NAME/tokens",
    ),
    (["model.init=pretrained"], "model.init", "need the name", "model.init=random"),
    ([*HUB, "model.tokenizer.name=null"], "model.tokenizer.name", "tokenizer", "model.tokenizer.name=some/model"),
    (["model.dtype=float16"], "model.dtype", "cannot be trained", "train.precision=fp16"),
    (["model.dtype=float16", "train.precision=fp16"], "model.dtype", "cannot be trained", "model.dtype=float32"),
    (["model.dtype=bfloat16", "train.precision=fp16"], "model.dtype", "float32", "train.precision=bf16"),
    (["data.sources.stdlib.subset=a"], "data.sources.stdlib.subset", "only a dataset of the Hub", "kind=hub"),
    (["~data.sources.stdlib"], "data.sources", "nothing to read", "data=stdlib"),
    (["~data"], "data.sources", "nothing to read", "data=stdlib"),
    (["strategy=ddp", "strategy.data=1"], "strategy.data", "fewer data ranks", "strategy.min_data=1"),
    (["strategy.offload=cpu"], "strategy.offload", "ZeRO and FSDP2 do", "strategy=zero3_offload"),
    (
        ["strategy=fsdp2", "strategy.offload=cpu", "train.precision=fp16"],
        "train.precision",
        "loss scale",
        "precision=bf16",
    ),
    ([*FP8, "strategy=zero2"], "train.precision", "does not go with ZeRO", "strategy=fsdp2"),
    ([*FP8, "strategy=3d"], "train.precision", "compute no layers in float8", "strategy.tensor=1"),
    ([*FP8, "strategy=moe"], "train.precision", "compute no layers in float8", "strategy.expert=1"),
    ([*FP8, "adapter=lora"], "train.precision", "with an adapter", "train.precision=bf16"),
    (["train.activation_offload=true"], "train.activation_offload", "inputs of blocks", "gradient_checkpointing=true"),
    (["strategy.deepspeed.a=1"], "strategy.deepspeed", "without ZeRO", "strategy=zero1"),
    (["strategy=ddp", "strategy.replicate=2"], "strategy.replicate", "belongs to FSDP2", "strategy=fsdp2"),
    (["strategy=zero3", "strategy.prefetch=1"], "strategy.prefetch", "belongs to FSDP2", "strategy=fsdp2"),
    ([*PIPED, "strategy.reshard=true"], "strategy.reshard", "keeps it to the end", "strategy.reshard=null"),
    ([*PIPED, "strategy.prefetch=1"], "strategy.prefetch", "keeps it to the end", "strategy.prefetch=0"),
    (
        ["strategy=zero1", "strategy.tensor=2"],
        "strategy.sharding",
        "sharded over tensor ranks",
        "strategy.sharding=fsdp2",
    ),
    (["strategy=pipeline_zero1", "strategy.tensor=2"], "strategy.sharding", "sharded over tensor ranks", "=fsdp2"),
    (["strategy=tensor", "train.compile=model"], "train.compile", "not compiled as a whole", "train.compile=blocks"),
    (["strategy=zero2", "strategy.pipeline=2"], "strategy.sharding", "until it is flushed", "strategy.sharding=zero1"),
    (["strategy=zero3", "strategy.pipeline=2"], "strategy.sharding", "until it is flushed", "strategy.sharding=zero1"),
    (['checkpoint.resume="~nobody_of_this_name/x"'], "checkpoint.resume", "nor a folder", "checkpoint.resume="),
    (["optimizer.warmup_steps=5", "optimizer.warmup_tokens=9"], None, "more than once", "optimizer.warmup_tokens=null"),
    (["optimizer.warmup_steps=5", "optimizer.warmup_fraction=0.1"], None, "more than once", "warmup_fraction=null"),
    (["train.max_steps=null"], "train.max_steps, train.epochs", "nothing ends the run", "train.epochs=1"),
    (["optimizer.warmup_steps=100"], "optimizer.warmup_steps", "fewer than 100", "optimizer.warmup_steps=10"),
    (["optimizer.warmup_tokens=1622017"], "optimizer.warmup_tokens", "fewer than 100", "optimizer.warmup_tokens="),
    (["optimizer=adamw_wsd", "optimizer.warmup_steps=90"], "optimizer.decay_fraction", "decay are longer", None),
    (["optimizer.schedule=linear", "optimizer.min_lr_ratio=0.1"], "optimizer.min_lr_ratio", "ends at 0", "cosine"),
    (["optimizer.changes=[{step: 2}, {step: 5, beta1: 1}]"], "optimizer.changes.1.beta1", "a number >= 0", None),
    (["optimizer.schedule=constant", "optimizer.min_lr_ratio=0"], "optimizer.min_lr_ratio", "its peak", "null"),
    (["optimizer.base_width=64", "adapter=lora"], "optimizer.base_width", "of an adapter", "base_width=null"),
    (["train.micro_batch_size=64"], "train.micro_batch_size", "larger than the global", "train.micro_batch_size=32"),
    (["train.eval_every=5", "data.eval_fraction=0"], "train.eval_every", "nothing is held out", "data.eval_fraction"),
    (["evaluate.export=best", *GIVEN], "evaluate.export", "nothing is held out", "evaluate.export=last"),
    ([*ASKED, *GIVEN], "evaluate.at_start, evaluate.prompts, evaluate.metrics", "nothing is held out", "prompts=[] "),
    (["data.eval_sources.v={path: x}"], "data.eval_fraction", "given, and a share", "data.eval_fraction=0"),
    ([*GIVEN, "data.eval_sources.v={}"], "data.eval_sources.v.path", "no path", "data.eval_sources.v.path=..."),
    ([*GIVEN, "data.eval_sources.v={path: x, weight: 2}"], "data.eval_sources.v.weight", "all read, once", "null"),
    ([*GIVEN, "data.eval_sources.v={path: x, epochs: 2}"], "data.eval_sources.v.epochs", "all read, once", "null"),
    ([*GIVEN, "data.eval_sources.v={path: x, kind: tokens}"], "model.tokenizer.name", "needs the", "=x/tokenizer"),
    (["evaluate.patience=2"], "evaluate.patience", "during the run", "train.eval_every=500"),
    (["evaluate.min_delta=0.1"], "evaluate.min_delta", "nothing is stopped early", "evaluate.patience=3"),
    (["evaluate.export=best"], "evaluate.export", "none is kept for it", "checkpoint.keep_best=true"),
    (["evaluate.export=best", "checkpoint=none", *BEST], "evaluate.export", "none is kept", "evaluate.export=last"),
    (["evaluate.prompts=[a,' ']"], "evaluate.prompts.1", "a prompt is empty", None),
    (["evaluate.lm_eval_include=/tmp"], "evaluate.lm_eval_include", "no task is asked for", "evaluate.lm_eval=[NAME]"),
    (["evaluate.lm_eval=[a]", "evaluate.lm_eval_include=/no/such"], "evaluate.lm_eval_include", "no such folder", None),
    (["report.alert_command='mail \"me'"], "report.alert_command", "cannot be split", None),
    (["report.alert_command=/no/such --it"], "report.alert_command", "no such program", "chmod"),
    (
        ["report.alert_command=cat", "report.alerts=false"],
        "report.alert_command",
        "no alert is looked for",
        "alerts=true",
    ),
    (["checkpoint.mirror='/my disk'"], "checkpoint.mirror", "this is a path", "'checkpoint.mirror=file:///my disk'"),
    (["checkpoint.mirror=file://a"], "checkpoint.mirror", "is not absolute", "checkpoint.mirror=file:///"),
    (["checkpoint.mirror=S3://b/a"], "checkpoint.mirror", "small letters", "checkpoint.mirror=s3://b/a"),
    (["checkpoint.mirror=file:///a", "run.dir=/a/pretrain"], "checkpoint.mirror", "not apart", "file:///mnt"),
    (["checkpoint.mirror=file:///a/b", "run.dir=/a"], "checkpoint.mirror", "not apart", "file:///mnt"),
    (["checkpoint.resume=atuo"], "checkpoint.resume", "auto, never", "checkpoint.resume=auto"),
    (["checkpoint.resume=/no/such/folder"], "checkpoint.resume", "folder that exists", "checkpoint.resume=auto"),
    ([f"checkpoint.resume={'x' * 300}"], "checkpoint.resume", "folder that exists", "checkpoint.resume=auto"),
    (["checkpoint.resume=''"], "checkpoint.resume", "auto, never", "checkpoint.resume=auto"),
    (["run.name=a/b"], "run.name", "plain folder name", "run.dir"),
    (["run.name='..'"], "run.name", "plain folder name", "run.dir"),
    (["run.name=''"], "run.name", "plain folder name", None),
    (["run.name='a b'"], "run.name", "plain folder name", None),
    (["run.dir=' '"], "run.dir", "not a folder", "run.dir=runs/first"),
    (["train.recompute=cheap"], "train.recompute", "nothing is computed again", "train.gradient_checkpointing=true"),
    (
        ["train.recompute=cheap", "train.gradient_checkpointing=true", "strategy=zero3"],
        "train.recompute",
        "ZeRO-3 gathers",
        "train.recompute=all",
    ),
    (["data=files"], "data.sources.files.path", "or as a URL", "data.sources.files.path=..."),
    (["data=hub"], "data.sources.hub.path", "Hub id or saved folder", "data.sources.hub.path=..."),
    (["data.sources.stdlib.kind=tokens"], "data.sources.stdlib.path", "recipes/pretokenize.py", "=runs/NAME/tokens"),
    (TOKENS, "model.tokenizer.name", "needs the tokenizer that made them", "model.tokenizer.name=x/tokenizer"),
    (["data=tokens", f"data.sources.tokens.path={'x' * 300}"], "model.tokenizer.name", "that made them", "/tokenizer"),
    (["data.chat.template=no.jinja"], "data.chat.template", "cannot be found", None),
    (["data.chat.template_arguments={tools: 1}"], "data.chat.template_arguments.tools", "comes from the data", None),
    (["data.sources.stdlib.path=/x"], "data.sources.stdlib.path", "takes no path", "data.sources.stdlib.kind=files"),
    (["data.sources.stdlib.revision=a"], "data.sources.stdlib.revision", "only a dataset of the Hub", "kind=hub"),
    (TWO[:1], "data.sources.stdlib.weight", "some sources have a weight", "data.sources.stdlib.weight=1"),
    (["data.anneal=[{step: 5}]"], "data.anneal", "none at its start", "data.sources.stdlib.weight=1"),
    (anneal("{step: 0}"), "data.anneal.0.step", "a whole number >= 1", None),
    (anneal(*2 * ["{step: 5, weights: {web: 1, stdlib: 0}}"]), "data.anneal.1.step", "a whole number > 5", None),
    (anneal("{step: 5, weights: {wb: 1, stdlib: 1}}"), "data.anneal.0.weights", "no source 'wb'", "web: 1"),
    (anneal("{step: 5, weights: {web: 1}}"), "data.anneal.0.weights", "stdlib", "stdlib: 0 pauses it"),
    (anneal("{step: 5, weights: {web: -1, stdlib: 1}}"), "data.anneal.0.weights.web", "a number >= 0", None),
    (anneal("{step: 5, weights: {web: nan, stdlib: 1}}"), "data.anneal.0.weights.web", "a number >= 0", None),
    (anneal("{step: 5, weights: {web: 0, stdlib: 0}}"), "data.anneal.0.weights", "a sum > 0", None),
    (["data.sources.stdlib.weight=0"], "data.sources.stdlib.weight", "a number > 0", None),
    (["data.sources.stdlib.epochs=0"], "data.sources.stdlib.epochs", "a whole number >= 1", None),
    (["data.quarantine=[stdlb:abc.py:5]"], "data.quarantine", "no source 'stdlb'", "[stdlib:abc.py:5]"),
    (["data.quarantine=[abc.py:5]"], "data.quarantine", "SOURCE:FILE:ROW", "[stdlib:part-0.parquet:17]"),
    (["data.quarantine=['stdlib:abc.py:-5']"], "data.quarantine", "SOURCE:FILE:ROW", None),
    (["strategy=zero2", "strategy.context=2"], "strategy.context", "each process as a data rank", "sharding=fsdp2"),
    (["strategy.context_method=gather"], "strategy.context_method", "no ranks share", "strategy.context=2"),
    (["strategy=pipeline_zero1", "strategy.expert=2"], "strategy.sharding", "ZeRO knows nothing of experts", "fsdp2"),
    (["strategy=zero2", "strategy.expert=2"], "strategy.sharding", "ZeRO knows nothing of experts", "fsdp2"),
    (["strategy=moe", "train.compile=blocks"], "train.compile", "whose experts ranks share", "train.compile=none"),
]


@pytest.mark.parametrize(("overrides", "where", "words", "hint"), CONTRADICTIONS, ids=lambda v: str(v)[:60])
def test_contradictions(overrides, where, words, hint):
    error = error_of(*overrides)
    if where is not None:
        assert error.where == where
    assert words in f"{error.what} {error.allowed}"
    if hint is not None:
        assert hint in (error.hint or ""), error


# What goes together is composed together.
@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.warmup_steps=99", "checkpoint.resume=never", "run.name='lr=1e-3,b.2+c'", "train.precision=fp16"],
        ["optimizer.warmup_fraction=0.9", "train.max_steps=1", "checkpoint.resume=/", *HUB],
        ["optimizer.warmup_steps=99", "train.max_steps=null", "train.epochs=1", *GIVEN],
        [*TOKENS, "model.tokenizer.name=x/tokenizer", "model.dtype=bfloat16", "train.precision=bf16"],
        # 99 steps of 32 x 512 tokens.
        ["optimizer.warmup_tokens=1622016", *HUB, "model.init=random", "model.tokenizer.name=null"],
        ["optimizer=adamw_wsd", "optimizer.warmup_steps=80", *TWO],
        ["optimizer=adamw_wsd", "optimizer.min_lr_ratio=0", "train.micro_batch_size=32"],
        ["strategy=zero3", "strategy.offload=cpu", "strategy.deepspeed.wall_clock_breakdown=true"],
        anneal("{step: 5, weights: {web: 0, stdlib: 1}}", "{step: 9, weights: {web: 0.5, stdlib: 0}}"),
        ["train.recompute=cheap", "train.gradient_checkpointing=true",
         "data.quarantine=['stdlib:abc.py:0','stdlib:a:b/c.py:12']"],
        ["data=files", "data.sources.files.path=s3://bucket/a/*.parquet", "data.sources.files.epochs=1"],
    ],
    ids=str,
)  # fmt: skip
def test_what_is_fine_stays_fine(overrides):
    compose_config(overrides)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("https://user:secret@host/x.parquet", "user or password"),
        ("https://host/x.parquet?X-Amz-Signature=secret", "signature"),
        ("gopher://host/x.parquet", "cannot be read"),
    ],
)
def test_an_address_with_a_secret_is_refused_before_the_run_folder_is_written(path, words):
    error = error_of("data=files", f"data.sources.files.path='{path}'")
    assert error.where.removesuffix(" (command line)") == "data.sources.files.path"
    assert words in error.what
    assert "secret" not in str(error)


def test_without_a_held_out_set_nothing_is_evaluated():
    config = compose_config(["data.eval_fraction=0", "model=tiny"], name="finetune")
    assert (config.train.eval_every, config.evaluate.at_start, config.checkpoint.keep_best) == (None, False, False)
    # What is asked for by name stays, and is refused.
    with pytest.raises(ConfigError, match="nothing is held out"):
        compose_config(["data.eval_fraction=0", "model=tiny", "evaluate.at_start=true"], name="finetune")


def test_a_length_of_zero_leaves_the_warm_up_to_the_other_key():
    config = compose_config(["optimizer.warmup_tokens=0", "optimizer.warmup_fraction=0", "optimizer.warmup_steps=7"])
    assert num_warmup_steps(config.optimizer, tokens_per_step=10, max_steps=100) == 7
