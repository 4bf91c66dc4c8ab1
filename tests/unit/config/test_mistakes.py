"""What people get wrong on the command line: one ConfigError with the key, the place, the value and a way out."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError


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


# override -> (where, part of what is allowed, hint)
MISTAKES = {
    # no such key
    "optimizer.lrr=1": ("optimizer.lrr (command line)", "in optimizer: name, plugin, arguments, lr", "optimizer.lr=1"),
    "+optimizer.lrr=1": ("optimizer.lrr (command line)", "in optimizer: name, plugin, arguments, lr", "optimizer.lr=1"),
    "++train.max_step=5": ("train.max_step (command line)", "max_steps", "train.max_steps=5"),
    "lr=1e-3": ("lr (command line)", "optimizer", "optimizer.lr=1e-3"),
    "+lr=1e-3": ("lr (command line)", "optimizer", "optimizer.lr=1e-3"),
    "train.lr=3": ("train.lr (command line)", "in train: max_steps", "optimizer.lr=3"),
    "max_steps=3": ("max_steps (command line)", "train", "train.max_steps=3"),
    "optimzer.lr=1": ("optimzer.lr (command line)", "optimizer", "optimizer.lr=1"),
    "model.confg.hidden_size=1": ("model.confg.hidden_size (command line)", "model", "model.config.hidden_size=1"),
    "model.tokeniser.name=x": ("model.tokeniser.name (command line)", "", "model.tokenizer.name=x"),
    "data.sources.stdlib.pth=x": (
        "data.sources.stdlib.pth (command line)",
        "kind, path, text",
        "data.sources.stdlib.path=x",
    ),
    "data.sources.mine={pth: x}": ("data.sources.mine.pth (command line)", "kind, path", "data.sources.mine.path="),
    "+nothing.like.this=1": ("nothing (command line)", "groups and sections", None),
    # groups and options
    "optimzer=adamw": ("optimzer (command line)", "optimizer", "optimizer=adamw"),
    "strategy=zero4": ("strategy (command line)", "ddp, pipeline, pipeline_zero1, single, zero1", "strategy=zero"),
    "model=smal": ("model (command line)", "demo, gpt2_xl, hub", "model=small"),
    "model=5": ("model (command line)", "demo, gpt2_xl, hub", "model=demo"),
    "train=null": ("train (command line)", "bf16, default", "train="),
    "experiment=dmo": ("experiment (command line)", "demo", "experiment=demo"),
    "+model=tiny": ("model (command line)", None, "model=tiny"),
    "+model/x=tiny": ("model/x (command line)", "model", "model="),
    # types and enums
    "optimizer.lr=abc": ("optimizer.lr (command line)", "a number > 0", None),
    "optimizer.lr=null": ("optimizer.lr (command line)", "a number > 0", None),
    "optimizer.lr.x=3": ("optimizer.lr (command line)", "a number > 0", None),
    "optimizer.schedule=cosin": (
        "optimizer.schedule (command line)",
        "cosine, wsd, linear, constant",
        "optimizer.schedule=cosine",
    ),
    "optimizer.schedule=1": ("optimizer.schedule (command line)", "cosine, wsd, linear, constant", None),
    "train.precision=bfloat16": ("train.precision (command line)", "fp32, bf16, fp16", "train.precision=bf16"),
    "train.max_steps=1.5": ("train.max_steps (command line)", "a whole number >= 1", None),
    "train.max_steps=1e3": ("train.max_steps (command line)", "a whole number", "train.max_steps=1000"),
    "train.max_steps=true": ("train.max_steps (command line)", "a whole number", None),
    "train.gradient_checkpointing=maybe": ("train.gradient_checkpointing (command line)", "true or false", None),
    "train.eval_every=x": ("train.eval_every (command line)", "a whole number >= 1, or null", None),
    "report.to={a: 1}": ("report.to (command line)", "a list, such as", None),
    "run=first": ("run (command line)", "a section with the keys name, dir", None),
    "model.tokenizer=5": ("model.tokenizer (command line)", "a section with the keys name", None),
    "model.config=null": ("model.config (command line)", "a mapping", None),
    "strategy.deepspeed=3": ("strategy.deepspeed (command line)", "a mapping", None),
    "data.sources.m.kind=hubb": (
        "data.sources.m.kind (command line)",
        "stdlib, docstrings, files, hub",
        "data.sources.m.kind=hub",
    ),
    # syntax
    "optimizer.lr": ("command line", "key=value or group=option", "optimizer.lr=..."),
    "optimizer.lr=[": ("command line", "key=value", "a number > 0"),
    "run.name=a:[b": ("command line", "key=value", "'run.name=\"a:[b\"'"),
    "optimizer=adamw optimizer.lr=1": ("command line", "key=value", "argument of its own"),
    "=3": ("command line", "key=value", "optimizer.lr=1e-3"),
    "": ("command line", "key=value", "optimizer.lr=1e-3"),
    "optimizer.lr=1e-3,1e-4": ("optimizer.lr (command line)", None, "loop of the shell"),
    "train.seed=range(1,3)": ("train.seed (command line)", None, "loop of the shell"),
    "~train.max_steps": ("train.max_steps (command line)", None, "train.max_steps=..."),
    "~nothing": ("nothing (command line)", None, None),
    # references and missing values
    "run.dir=${run.nme}": ("run.dir", "${section.key}", "${run.name}"),
    "run.dir=${run.dir}": ("run.dir", "${section.key}", None),
    "run.dir=${run.name": ("command line", "key=value", None),
    "run.name=???": ("run.name", "text", "run.name=..."),
    # what a config must not do
    "run.dir=${oc.env:HOME}": ("run.dir", "${section.key}", 'key="$VARIABLE"'),
    "run.dir='${oc.decode:${oc.env:HOME}}'": ("run.dir", "${section.key}", None),
    "run.name=${nope:1}": ("run.name", "${section.key}", None),
    "+model._target_=os.system": ("model._target_ (command line)", None, "options of the groups"),
    "model.config={a: [{_target_: os.system}]}": ("model.config.a.0._target_ (command line)", None, None),
    "hydra.run.dir=x": ("hydra.run.dir (command line)", None, "run.dir=..."),
    "hydra/launcher=basic": ("hydra/launcher (command line)", None, "run.dir=..."),
    "hydra.searchpath=[file:///etc]": ("hydra.searchpath (command line)", None, "--config-dir"),
    "+hydra.callbacks.x.a=1": ("hydra.callbacks.x.a (command line)", None, None),
}


@pytest.mark.parametrize("override", MISTAKES)
def test_one_message_with_key_place_and_way_out(override):
    where, allowed, hint = MISTAKES[override]
    error = mistake(override)
    assert error.where == where
    if allowed is not None:
        assert allowed in (error.allowed or ""), error
    if hint is not None:
        assert hint in (error.hint or ""), error
    assert error.exit_code == 2


def test_the_value_is_quoted_back():
    assert mistake("optimizer.lr=abc").found == "'abc'"
    assert mistake("train.max_steps=1.5").found == 1.5
    assert mistake("optimizer.lrr=1e-3").found == "1e-3"
    assert mistake("optimizer.lr=null").found == "null"


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
    assert (error.allowed, error.hint) == ("finetune, pretrain", "--config-name pretrain")
    assert mistake(extra_dir=tmp_path / "none").where == "--config-dir"


@pytest.mark.parametrize("hint", [m[2] for m in MISTAKES.values() if m[2] and "=" in m[2] and "..." not in m[2]])
def test_a_hint_that_is_an_override_can_be_pasted(hint):
    override = hint.strip("'")
    if override.endswith(("=", "zero")) or override == 'key="$VARIABLE"':
        return  # tested by its beginning only
    # Another value may be needed too, but the key exists and the value fits it.
    what = outcome(override)
    assert "there is no" not in what
    assert "wrong type" not in what


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
