"""What people get wrong on the command line: one ConfigError with the key, the place, the value and a way out."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError
from tests.unit.config.shipped import GROUPS
from tests.unit.config.test_hints import exists


def mistake(*overrides, **options):
    """The error that these overrides cause."""
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides, **options)
    return caught.value


def outcome(override):
    """What is wrong with an override, or `fine`; anything but a ConfigError gets through."""
    try:
        compose_config([override])
    except ConfigError as error:
        return error.what
    return "fine"


# override -> (part of what is allowed, hint, and where, if not the key on the command line)
MISTAKES = {
    # no such key
    "optimizer.lrr=1": ("in optimizer: name, plugin, arguments, lr", "optimizer.lr=1"),
    "+optimizer.lrr=1": ("in optimizer: name, plugin, arguments, lr", "optimizer.lr=1"),
    "++train.max_step=5": ("max_steps", "train.max_steps=5"),
    "lr=1e-3": ("optimizer", "optimizer.lr=1e-3"),
    "+lr=1e-3": ("optimizer", "optimizer.lr=1e-3"),
    "train.lr=3": ("in train: max_steps", "optimizer.lr=3"),
    "max_steps=3": ("train", "train.max_steps=3"),
    "optimzer.lr=1": ("optimizer", "optimizer.lr=1"),
    "model.confg.hidden_size=1": ("model", "model.config.hidden_size=1"),
    "model.tokeniser.name=x": ("", "model.tokenizer.name=x"),
    "data.sources.stdlib.pth=x": ("kind, path, text", "data.sources.stdlib.path=x"),
    "data.sources.mine={pth: x}": ("kind, path", "data.sources.mine.path=", "data.sources.mine.pth (command line)"),
    "+nothing.like.this=1": ("groups and sections", None, "nothing (command line)"),
    # groups and options
    "optimzer=adamw": ("optimizer", "optimizer=adamw"),
    "strategy=zero4": (
        "3d, ddp, fsdp2, hsdp, long_context, moe, pipeline, pipeline_zero1, single, tensor",
        "strategy=zero",
    ),
    "model=smal": ("demo, gpt2_xl, gpt3_175b, hub", "model=small"),
    "model=5": ("demo, gpt2_xl, gpt3_175b, hub", "model=demo"),
    "train=null": ("bf16, default", "train="),
    "experiment=dmo": ("demo", "experiment=demo"),
    "+model=tiny": (None, "model=tiny"),
    "+model/x=tiny": ("model", "model="),
    # types and enums
    "optimizer.lr=abc": ("a number > 0", None),
    "optimizer.beta1=null": ("a number >= 0 and <= 1", None),
    "optimizer.lr.x=3": ("a number > 0", None, "optimizer.lr (command line)"),
    "optimizer.schedule=cosin": ("cosine, wsd, linear, constant", "optimizer.schedule=cosine"),
    "optimizer.schedule=1": ("cosine, wsd, linear, constant", None),
    "train.precision=bfloat16": ("fp32, bf16, fp16, fp8", "train.precision=bf16"),
    "train.max_steps=1.5": ("a whole number >= 1", None),
    "train.max_steps=1e3": ("a whole number", "train.max_steps=1000"),
    "train.max_steps=true": ("a whole number", None),
    "train.gradient_checkpointing=maybe": ("true or false", None),
    "train.eval_every=x": ("a whole number >= 1, or null", None),
    "report.to={a: 1}": ("a list, such as", None),
    "run=first": ("a section with the keys name, dir", None),
    "model.tokenizer=5": ("a section with the keys name", None),
    "model.config=null": ("a mapping", None),
    "strategy.deepspeed=3": ("a mapping", None),
    # OmegaConf takes a list for a text, and for a number.
    "train.freeze=[[a]]": ("a list, such as", None, "train.freeze"),
    "data.quarantine=[[a]]": ("a list, such as", None, "data.quarantine"),
    "strategy.blocks_per_stage=[[1]]": ("a list, such as", None, "strategy.blocks_per_stage"),
    "task.rewards={a: [1]}": ("a mapping, such as", None, "task.rewards"),
    # longer than a name of a file, a number of Python and a float can be
    f"optimizer={'a' * 300}": ("adamw", None),
    f"launch={'a' * 300}": ("a section with the keys processes", None),
    f"train.max_steps={'1' * 5000}": ("key=value", "a whole number", "command line"),
    f"optimizer.lrr={'1' * 400}": ("in optimizer: name, plugin", "optimizer.lr, which takes a number"),
    f"cluster.time={'1' * 400}": (None, None),
    "data.sources.m.kind=hubb": ("stdlib, docstrings, files, hub", "data.sources.m.kind=hub"),
    # syntax
    "optimizer.lr": ("key=value or group=option", "optimizer.lr=...", "command line"),
    "optimizer.lr=[": ("key=value", "a number > 0", "command line"),
    "run.name=a:[b": ("key=value", "'run.name=\"a:[b\"'", "command line"),
    "optimizer=adamw optimizer.lr=1": ("key=value", "argument of its own", "command line"),
    "=3": ("key=value", "optimizer.lr=1e-3", "command line"),
    "": ("key=value", "optimizer.lr=1e-3", "command line"),
    "optimizer.lr=1e-3,1e-4": (None, "hfdist sweep"),
    "train.seed=range(1,3)": (None, "hfdist sweep"),
    "~train.max_steps": (None, "train.max_steps=..."),
    "~nothing": (None, None),
    # references and missing values
    "run.dir=${run.nme}": ("${section.key}", "${run.name}", "run.dir"),
    "run.dir=${run.dir}": ("${section.key}", None, "run.dir"),
    "run.dir=${run.name": ("key=value", None, "command line"),
    "run.name=???": ("text", "run.name=...", "run.name"),
    # what a config must not do
    "run.dir=${oc.env:HOME}": ("${section.key}", 'key="$VARIABLE"', "run.dir"),
    "run.dir='${oc.decode:${oc.env:HOME}}'": ("${section.key}", None, "run.dir"),
    "run.name=${nope:1}": ("${section.key}", None, "run.name"),
    "+model._target_=os.system": (None, "options of the groups"),
    "model.config={a: [{_target_: os.system}]}": (None, None, "model.config.a.0._target_ (command line)"),
    "hydra.run.dir=x": (None, "run.dir=..."),
    "hydra/launcher=basic": (None, "run.dir=..."),
    "hydra.searchpath=[file:///etc]": (None, "--config-dir"),
    "+hydra.callbacks.x.a=1": (None, None),
}


@pytest.mark.parametrize("override", MISTAKES)
def test_one_message_with_key_place_and_way_out(override):
    allowed, hint, *where = MISTAKES[override]
    error = mistake(override)
    assert error.where == (where[0] if where else f"{override.lstrip('+~').partition('=')[0]} (command line)")
    if allowed is not None:
        assert allowed in (error.allowed or ""), error
    if hint is not None:
        assert hint in (error.hint or ""), error
    assert error.exit_code == 2


def test_the_whole_message_as_people_see_it():
    assert str(mistake("optimizer.schedule=cosin")) == (
        "Config error: the value has the wrong type or is not among the allowed\n"
        "  where:   optimizer.schedule (command line)\n"
        "  found:   'cosin'\n"
        "  allowed: cosine, wsd, linear, constant\n"
        "  try:     optimizer.schedule=cosine"
    )


def test_no_such_primary_or_folder(tmp_path):
    error = mistake(name="pretran")
    assert (error.allowed, error.hint) == ("finetune, pretrain, tune", "--config-name pretrain")
    assert mistake(name="a" * 300).exit_code == 2
    for folder in ("none", "a" * 300):
        assert mistake(extra_dir=tmp_path / folder).where == "--config-dir"


def test_keys_and_groups_of_hints_exist():
    """That a hint gets past its mistake, test_hints.py tries."""
    named = {hint.strip("'").partition("=")[0] for _, hint, *_ in MISTAKES.values() if hint and "=" in hint}
    assert len(named) > 10
    assert not [name for name in named - {"key"} if name not in GROUPS and not exists(name)]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.one_of(
        st.text(max_size=30),
        st.builds(
            "{}{}{}{}".format,
            st.sampled_from(["", "+", "++", "~"]),
            st.sampled_from(
                ["train.max_steps", "model", "data.sources.x", "model.config", "run.dir", "a/b@c", "train"]
            ),
            st.sampled_from(["", "=", "=="]),
            st.text("ab1.,:{}[]()$'\"\\ ~+-/@=?", max_size=12),
        ),
    )
)
def test_whatever_is_typed_gives_a_config_or_a_config_error(text):
    assert outcome(text)
