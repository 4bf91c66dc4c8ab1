"""The catalogue of keys: nearest names, words for types, and names that other trainers use."""

import dataclasses

import pytest

from hfdist.config.composition.aliases import OVERRIDES, REASONS, override_for, reason_against
from hfdist.config.composition.compose import compose_config
from hfdist.config.run import RunConfig
from hfdist.config.schema import all_keys, find_key, members, nearest_key, unknown_keys
from hfdist.errors import ConfigError
from tests.unit.config.test_mistakes import outcome

VALUES = {  # values for which a synonym's override makes sense
    "optim": "sgd",
    "mixed_precision": "bf16",
    "scheduler": "wsd",
    "torch_dtype": "bfloat16",
    "attn_implementation": "sdpa",
    "activation_checkpointing": "true",
    "model_type": "gpt2",
    "resume_from_checkpoint": "auto",
}


def test_the_catalogue_is_the_dataclasses():
    assert members("") == [field.name for field in dataclasses.fields(RunConfig)]
    assert all_keys()["optimizer.lr"].allowed == "a number > 0"
    assert all_keys()["strategy.data"].allowed == "a whole number >= 1, or null"
    assert all_keys()["train.precision"].allowed == "fp32, bf16, fp16"
    assert all_keys()["model.config"].is_free
    assert not all_keys()["data.sources"].is_free


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("lr", "optimizer.lr"),
        ("train.lr", "optimizer.lr"),
        ("sequence_length", "data.sequence_length"),
        ("train.max_step", "train.max_steps"),
        ("optimzer.beta1", "optimizer.beta1"),
        ("model.tokenizr.name", "model.tokenizer.name"),
        ("data.seed", "data.seed"),
        ("checkpoint.evry", "checkpoint.every"),
        ("data.sources.mine.pth", "data.sources.mine.path"),
        ("strategy.deepsped.zero_optimization", "strategy.deepspeed.zero_optimization"),
        ("qqq.zzz", None),
    ],
)
def test_nearest_key(name, key):
    assert nearest_key(name) == key


def test_names_of_sources_are_free_and_their_members_are_not():
    assert find_key("data.sources.mine.kind").name == "data.sources.*.kind"
    assert find_key("data.sources.mine.knd") is None
    values = {"data": {"sources": {"a": {"pth": 1}}}, "model": {"config": {"x": {"y": 1}}}, "z": 2}
    assert list(unknown_keys(values)) == [("data.sources.a.pth", 1), ("z", 2)]


# One name of several that mean the same.
@pytest.mark.parametrize("name", {override: name for name, override in OVERRIDES.items()}.values())
def test_each_synonym_leads_to_keys_that_exist(name):
    value = VALUES.get(name, "2")
    for override in override_for(name, value).split(" "):
        # A contradiction with the rest is another matter; the key and the type must fit.
        what = outcome(override)
        assert "there is no" not in what
        assert "wrong type" not in what
        assert "no option" not in what


@pytest.mark.parametrize("name", ["steps", "train.learning_rate", "data.block_size", "streaming", "model.use_cpu"])
def test_a_synonym_is_used_in_a_message(name):
    with pytest.raises(ConfigError) as caught:
        compose_config([f"{name}=2"])
    assert caught.value.hint == (reason_against(name) or override_for(name, 2))


def test_no_name_is_both_a_synonym_and_a_reason():
    assert not OVERRIDES.keys() & REASONS.keys()


def test_a_value_that_is_not_known_is_left_open():
    assert override_for("learning_rate") == "optimizer.lr=..."
    assert override_for("anything") is None
