"""The catalogue of keys: nearest names, words for types, names that other trainers use, and what --help says."""

import dataclasses
import json

import pytest

from hfdist.config.composition.aliases import override_for, reason_against
from hfdist.config.composition.compose import compose_config, compose_untyped, make_request
from hfdist.config.composition.help import describe
from hfdist.config.composition.other_trainers import OVERRIDES, REASONS
from hfdist.config.conf_folder import list_options
from hfdist.config.likely_keys import nearest_key
from hfdist.config.optimizer import OptimizerChange, OptimizerConfig
from hfdist.config.plain_values import from_plain, plain
from hfdist.config.plan import SECTION as PLAN
from hfdist.config.run import RunConfig
from hfdist.config.schema import all_keys, find_key, members, unknown_keys
from hfdist.config.task import TaskConfig
from hfdist.errors import ConfigError
from hfdist.tools.jobs.cluster import cluster_keys
from tests.unit.config.shipped import CONF, GROUPS
from tests.unit.config.test_hints import exists
from tests.unit.config.test_mistakes import outcome

VALUES = {  # values for which a synonym's override makes sense
    "optim": "sgd",
    **dict.fromkeys(("loss_type", "pref_loss"), "sigmoid"),
    "use_liger_kernel": "true",
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
    assert all_keys()["optimizer.lr"].allowed == "a number > 0, or null"
    assert all_keys()["strategy.data"].allowed == "a whole number >= 1, or null"
    assert all_keys()["train.precision"].allowed == "fp32, bf16, fp16, fp8"
    assert all_keys()["model.config"].is_free
    assert not all_keys()["data.sources"].is_free


# test_mistakes.py has the others.
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("sequence_length", "data.sequence_length"),
        ("data.seed", "data.seed"),
        ("checkpoint.evry", "checkpoint.every"),
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


@pytest.mark.parametrize("name", VALUES)
def test_a_synonyms_value_fits_its_key(name):
    what = outcome(override_for(name, VALUES[name]))
    assert "there is no" not in what
    assert "wrong type" not in what


def test_each_synonym_leads_to_keys_that_exist():
    for override in {part for name in OVERRIDES for part in override_for(name, 2).strip("'").split(" ") if "=" in part}:
        key, _, value = override.partition("=")
        assert exists(key) or key in GROUPS or key in PLAN.keys or key in cluster_keys(), override
        # `data` and `model` take a path, too.
        assert key not in GROUPS or value in ("2", *list_options(CONF, key)), override


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


def test_a_key_stands_with_its_value_and_its_line():
    request = make_request("pretrain", ["train.max_steps=7", "data.sources.mine.path=x"], None)
    lines = describe(compose_untyped(request), request).splitlines()
    (line,) = [line for line in lines if line.startswith("    max_steps: 7 ")]
    assert line.endswith("# Optimizer steps at the most; null: as many as the epochs take.")
    (line,) = [line for line in lines if line.startswith("        path: x ")]
    assert "# Place of the source. files: file, folder" in line
    strategies = (
        "3d, ddp, fsdp2, hsdp, long_context, moe, pipeline, pipeline_zero1, single, tensor, zero1, zero2, zero3"
    )
    assert f"  strategy: {strategies}, zero3_offload" in lines


def test_plain_values_are_read_as_they_were_and_nothing_in_them_is_interpolated():
    text = r"${oc.env:HOME} \${x} \\${y}"
    change = OptimizerChange(step=3, lr=1e-3)
    optimizer = OptimizerConfig(plugin=text, arguments={"a": [text, 1.5, None]}, changes=[change])
    run = compose_config(["data=files", "data.sources.files.path=/data", "model.config={hidden_size: 8}"])
    for values in (optimizer, run):
        assert from_plain(type(values), json.loads(json.dumps(plain(values)))) == values
    for scale in (True, False, "batch"):
        assert from_plain(TaskConfig, plain(TaskConfig(scale_rewards=scale))).scale_rewards == scale
    assert from_plain(OptimizerConfig, {"plugin": "${oc.env:HOME}"}).plugin == "${oc.env:HOME}"


@pytest.mark.parametrize(
    "values",
    [
        {"lr": "0.1"}, {"lr": float("nan")}, {"lr": True}, {"lr": -1}, {"lr": 10**400}, {"name": "none"}, {"name": []},
        {"unknown": 1}, {"changes": {}}, {"changes": [{"step": 0}]}, {"changes": [[]]}, {"arguments": []},
        {"plugin": 3}, {"warmup_steps": 1.0}, {"fused": 1}, [], None, "adamw",
    ],
)  # fmt: skip
def test_plain_values_of_another_kind_are_refused(values):
    with pytest.raises(ConfigError) as error:
        from_plain(OptimizerConfig, values, "optimizer")
    assert error.value.where.startswith("optimizer")
