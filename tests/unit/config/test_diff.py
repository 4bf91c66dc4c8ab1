"""What has changed since a checkpoint: told readably, and refused where it changes the training."""

import json
from functools import cache

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_values
from hfdist.config.composition.diff import check_changes, find_changes
from hfdist.errors import CheckpointError


@cache
def values_of(*overrides):
    return to_values(compose_config(overrides))


def changes(before, after):
    """As found between a checkpoint's JSON and the config of now."""
    return find_changes(json.loads(json.dumps(values_of(*before))), values_of(*after))


def test_numbers_that_travel_otherwise_between_islands_train_otherwise():
    islands = ["islands=diloco", "islands.address=localhost:1"]
    (found,) = changes(islands, [*islands, "islands.codec=int8"])
    assert (found.key, found.is_safe) == ("islands.codec", False)


def test_an_equal_config_has_none():
    same = ["data=mixture", "+data.sources.a={path: x, weight: 1}", "+train.arguments.adam_beta1=0.8"]
    assert changes(same[:2], same[:2]) == []


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("report.log_every=7", "report.log_every: 1 -> 7"),
        ("strategy=zero2", "strategy.sharding: none -> zero2"),
        ("train.micro_batch_size=4", "train.micro_batch_size: 8 -> 4"),
        ("checkpoint.every=3", "checkpoint.every: null -> 3"),
        ("data.workers=0", "data.workers: 1 -> 0"),
        ("data.quarantine=[stdlib:x.py:0]", 'data.quarantine: [] -> ["stdlib:x.py:0"]'),
    ],
)
def test_what_is_safe_goes_on(override, shown):
    found = changes(["checkpoint=none", "strategy=ddp"], ["checkpoint=none", "strategy=ddp", override])
    assert shown in map(str, found)
    assert all(change.is_safe for change in found)
    check_changes(found, allowed=False, where="step-1")


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("train.global_batch_size=64", "train.global_batch_size: 32 -> 64"),
        ("data.seed=3", "data.seed: 0 -> 3"),
        ("train.seed=3", "train.seed: 0 -> 3"),
        ("optimizer.lr=1", "optimizer.lr: 0.0003 -> 1.0"),
        ("train.max_steps=200", "train.max_steps: 100 -> 200"),
        ("strategy.compression=powersgd", "strategy.compression: none -> powersgd"),
        ("train.precision=bf16", "train.precision: fp32 -> bf16"),
        ("model.config.hidden_size=8", "model.config.hidden_size: 512 -> 8"),
        ("+data.sources.web={path: x}", "data.sources.web.kind: null -> files"),
        ("+data.sources.cache_dir={path: x, text: y}", "data.sources.cache_dir.text: null -> y"),
    ],
)
def test_what_changes_the_training_is_refused(override, shown):
    # Else a source would be mixed into the example of the recipe.
    found = changes([], ["data=stdlib", override])
    with pytest.raises(CheckpointError) as caught:
        check_changes(found, allowed=False, where="step-1")
    assert shown in str(caught.value)
    assert "checkpoint.allow_changes=true" in str(caught.value)
    check_changes(found, allowed=True, where="step-1")


def test_a_longer_run_of_a_constant_rate_is_the_same_training():
    constant = ["optimizer.schedule=constant"]
    (change,) = changes(constant, [*constant, "train.max_steps=200"])
    assert change.is_safe


def test_a_warm_up_that_is_a_share_of_the_length_makes_it_another_training():
    constant = ["optimizer.schedule=constant", "optimizer.warmup_fraction=0.1"]
    (change,) = changes(constant, [*constant, "train.max_steps=200"])
    assert not change.is_safe


def test_the_first_key_of_an_empty_section_is_one_change():
    assert [*map(str, changes([], ["+optimizer.arguments.momentum=0.9"]))] == [
        "optimizer.arguments.momentum: null -> 0.9"
    ]


def test_an_empty_mapping_is_no_change_beside_keys_deep_in_it():
    before = {"model": {"config": {}}}
    after = {"model": {"config": {"rope_scaling": {"factor": 2}}}}
    assert [*map(str, find_changes(before, after))] == ["model.config.rope_scaling.factor: null -> 2"]
    assert [*map(str, find_changes(after, before))] == ["model.config.rope_scaling.factor: 2 -> null"]


def test_a_checkpoint_of_before_some_keys_had_their_defaults():
    values = to_values(compose_config())
    older = json.loads(json.dumps(values))
    del older["adapter"], older["train"]["freeze"], older["data"]["sources"]["stdlib"]["format"]
    assert find_changes(older, values) == find_changes(values, older) == []
    (change,) = find_changes(older, to_values(compose_config(["train.freeze=[a]"])))
    assert not change.is_safe


@pytest.mark.parametrize("task", ["grpo", "rloo"])
@pytest.mark.parametrize("clip", [0.2, 0.1])
def test_a_policy_of_before_there_were_more_losses_goes_on(tmp_path, task, clip):
    own = [f"task={task}", "task.rewards={arithmetic: 1.0}", "model=tiny", "data=a.jsonl"]
    own += [] if clip == 0.2 else [f"task.clip={clip}"]
    now = to_values(compose_config(own, name="tune"))
    older = json.loads(json.dumps(now))
    older["task"] |= {"loss": "sigmoid", "clip": clip}
    del older["task"]["clip_high"], older["task"]["mask_truncated"]
    head = {"defaults": ["run_schema", "_self_"]}
    (tmp_path / "config.yaml").write_text(json.dumps(head | older))
    again = to_values(compose_config(name="config", extra_dir=tmp_path))
    assert find_changes(older, now) == find_changes(older, again) == []
    (change,) = find_changes(older, now | {"task": now["task"] | {"clip": 0.3}})
    assert not change.is_safe
