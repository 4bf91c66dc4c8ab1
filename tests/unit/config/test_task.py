"""`task.*`: what does not go with a task is refused before anything is built, with a hint that works."""

import pytest

from hfdist.config.checks.paths import check_model_paths
from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_values
from hfdist.config.composition.diff import find_changes
from hfdist.config.data import Packing, RowFormat
from hfdist.config.schema import find_key
from hfdist.config.task import TRAITS, TaskName
from hfdist.errors import ConfigError

REWARDED, TAUGHT = ("task.rewards={arithmetic: 1.0}",), ("task.teacher=folder",)
OWN = ("model.name=some/model", "data=files", "data.sources.files.path=rows.jsonl")


def tune(*overrides):
    return compose_config([*OWN, *overrides], name="tune")


@pytest.mark.parametrize(
    ("task", "row_format", "packing"),
    [
        ("dpo", RowFormat.preference, Packing.best_fit),
        ("cpo", RowFormat.preference, Packing.best_fit),
        ("kto", RowFormat.unpaired_preference, Packing.best_fit),
        ("reward", RowFormat.preference, Packing.best_fit),
        ("grpo", RowFormat.prompt_completion, Packing.none),
        ("rloo", RowFormat.prompt_completion, Packing.none),
        ("ppo", RowFormat.prompt_completion, Packing.none),
        ("online_dpo", RowFormat.prompt_completion, Packing.none),
        # Rows may have images, and then their model decides.
        ("causal_lm", RowFormat.auto, Packing.auto),
        ("distill", RowFormat.auto, Packing.best_fit),
        ("embed", RowFormat.retrieval, Packing.best_fit),
        ("seq2seq", RowFormat.source_target, Packing.none),
        ("mlm", RowFormat.text, Packing.best_fit),
        ("span_corruption", RowFormat.text, Packing.best_fit),
    ],
)
def test_a_task_says_what_it_reads(task, row_format, packing):
    own = {"distill": TAUGHT}.get(task, REWARDED if TaskName[task].traits.is_reinforcement else ())
    data = tune(f"task={task}", *own).data
    assert (data.format, data.packing) == (row_format, packing)


def test_a_row_is_one_prompt_where_the_student_answers():
    own = ("task=distill", *TAUGHT, "task.on_policy=0.5")
    assert tune(*own).data.packing is Packing.none
    for wrong in ("data.packing=best_fit", "data.format=prompt", "data.format=text"):
        with pytest.raises(ConfigError) as refused:
            tune(*own, wrong)
        assert refused.value.where == wrong.partition("=")[0]
    tune("task=distill", *TAUGHT, "task.on_policy=1", "data.format=prompt")


REFUSED = {
    "data.format": ("task=causal_lm", "data.format=preference"),
    "data.packing": ("task=dpo", "data.packing=concat"),
    "data.too_long": ("task=dpo", "data.too_long=truncate_end"),
    "strategy.context": ("task=kto", "strategy.context=2"),
    "islands.method": ("task=dpo", "islands=diloco", "islands.address=tcp://127.0.0.1:1"),
    "task.loss": ("task=kto", "task.loss=ipo"),
    "task.clip": ("task=grpo", "task.loss=cispo", "task.clip=0.1", "task.rewards={arithmetic: 1.0}"),
    "task.label_smoothing": ("task=dpo", "task.label_smoothing=0.1"),
    "task.beta": ("task=dpo", "task.beta=0"),
    "task.margin": ("task=cpo", "task.margin=0.5"),
    "task.nll_weight": ("task=kto", "task.nll_weight=1"),
    "evaluate.prompts": ("task=reward", "evaluate.prompts=[a]"),
    "adapter.modules_to_save": ("task=reward", "adapter=lora"),
    "task.rewards": ("task=grpo",),
    "task.reward_model": ("task=rloo", "task.rewards={reward_model: 1.0}"),
    "task.teacher": ("task=distill",),
    "task.divergence_beta": ("task=grpo", *REWARDED, "task.divergence_beta=0.5"),
    "task.scale": ("task=dpo", "task.scale=10"),
    "task.matryoshka": ("task=embed", "task.matryoshka=[8,8]"),
    "data.texts.max_tokens": ("task=embed", "data.texts.max_tokens=2000"),
    "data.texts.query_prompt": ("task=dpo", "data.texts.query_prompt=query"),
    "data.pairs.source_prompt": ("task=dpo", "data.pairs.source_prompt=a"),
    "strategy.pipeline": ("task=seq2seq", "strategy.pipeline=2", "train.micro_batch_size=1"),
    "strategy.tensor": ("task=mlm", "strategy.tensor=2"),
    "model.attention": ("task=mlm", "model.attention=varlen"),
    "task.mlm_probability": ("task=span_corruption", "task.mlm_probability=0.3"),
    "task.random_replace_prob": ("task=mlm", "task.random_replace_prob=0.3"),
    "evaluate.lm_eval": ("task=seq2seq", "evaluate.lm_eval=[hellaswag]"),
    "evaluate.metrics": ("task=span_corruption", "evaluate.metrics=[word_f1]"),
    "report.sample_prompt": ("task=embed", "report.sample_prompt=a"),
    "task.max_turns": ("task=grpo", *REWARDED, "task.max_turns=3"),
    "task.environment_url": ("task=grpo", *REWARDED, "task.environment=openenv"),
    "task.off_policy_mask_threshold": ("task=rloo", *REWARDED, "task.off_policy_mask_threshold=0.5"),
    "task.num_generations": ("task=rloo", *REWARDED, "task.num_generations=1"),
    "task.gamma": ("task=grpo", *REWARDED, "task.gamma=0.9"),
    "strategy.sequence": ("task=ppo", *REWARDED, "strategy.tensor=2", "strategy.sequence=true"),
    "task.top_k": ("task=distill", *TAUGHT, "task.top_k=5"),
    "task.trained_prompts": ("task=grpo", *REWARDED, "train.global_batch_size=8", "task.trained_prompts=9"),
    "task.ref_model_sync_steps": ("task=grpo", *REWARDED, "task.ref_model_sync_steps=2"),
    "task.ref_model_mixup_alpha": ("task=dpo", "task.ref_model_mixup_alpha=0.3"),
    "task.delta": ("task=grpo", *REWARDED, "task.loss=sapo", "task.delta=2"),
    "task.clip_high": ("task=grpo", *REWARDED, "task.loss=vespo", "task.clip_high=0.3"),
    "task.max_staleness": ("task=online_dpo", *REWARDED, "task.max_staleness=2"),
    "task.max_new_tokens": ("task=distill", *TAUGHT, "task.max_new_tokens=5"),
    "task.on_policy": ("task=grpo", *REWARDED, "task.on_policy=0.5"),
    "task.teacher_top_k": ("task=distill", *TAUGHT, "task.on_policy=0.5", "task.teacher_top_k=5"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_does_not_go_with_a_task(key):
    with pytest.raises(ConfigError) as refused:
        tune(*REFUSED[key])
    assert str(refused.value.where).startswith(key.rpartition(".")[0])
    assert refused.value.where.endswith(key.rpartition(".")[2])
    assert refused.value.hint


@pytest.mark.parametrize(
    ("option", "set_to"), [("cpo", ("sigmoid", 0.1, 0.0, 1.0)), ("simpo", ("simpo", 2.0, 0.5, 0.0)),
                           ("orpo", ("orpo", 0.1, 0.0, 1.0))],
)  # fmt: skip
def test_losses_without_a_reference_begin_as_their_papers_do(option, set_to):
    task = tune(f"task={option}").task
    assert task.name is TaskName.cpo
    assert (task.loss.value, task.beta, task.margin, task.nll_weight) == set_to


@pytest.mark.parametrize("task", ["causal_lm", "dpo", "kto", "reward"])
def test_a_run_of_before_losses_had_bounds_of_their_own_goes_on(task):
    """Its config.yaml says `clip: 0.2`."""
    now = tune(f"task={task}")
    assert find_changes(to_values(tune(f"task={task}", "task.clip=0.2")), to_values(now)) == []
    assert tune("task=grpo", "task.loss=gspo", *REWARDED).task.clip is None


def test_pairs_of_own_answers_are_compared_with_a_reference():
    with pytest.raises(ConfigError, match="would not count") as refused:
        tune("task=online_dpo", *REWARDED, "task.beta=0")
    assert refused.value.where == "task.beta"


@pytest.mark.parametrize("words", [("task.loss=triplet",), ("task.margin=1",)])
def test_only_triplets_have_a_margin_and_they_need_one(words):
    with pytest.raises(ConfigError) as refused:
        tune("task=embed", *words)
    assert refused.value.where == "task.margin"
    tune("task=embed", *words, refused.value.hint)


@pytest.mark.parametrize("word", ["task.scale=30", "task.mask_duplicates=true"])
def test_triplets_have_no_use_for_what_other_losses_need(word):
    own = ("task=embed", "task.loss=triplet", "task.margin=0.5", word)
    with pytest.raises(ConfigError) as refused:
        tune(*own)
    tune(*own, refused.value.hint)


def test_a_loss_of_another_task_names_its_option():
    with pytest.raises(ConfigError) as refused:
        tune("task=dpo", "task.loss=orpo")
    assert "task=orpo" in refused.value.hint


def test_a_new_run_has_no_loss_of_an_earlier_version():
    """Only the config of an older run may call the loss of a policy sigmoid."""
    with pytest.raises(ConfigError, match="other losses") as refused:
        tune("task=grpo", *REWARDED, "task.loss=sigmoid")
    assert refused.value.hint == "task.loss=grpo"


def test_a_reward_model_has_a_weight_and_is_there(tmp_path):
    own = ("task=grpo", f"task.reward_model={tmp_path}/run/model")
    with pytest.raises(ConfigError, match="has no weight") as refused:
        tune(*own, "task.rewards={arithmetic: 1.0}")
    config = tune(*own, refused.value.hint.strip("'"))
    (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, match="no such folder") as missing:
        check_model_paths(config)
    assert missing.value.where == "task.reward_model"
    (tmp_path / "run/model").mkdir(parents=True)
    check_model_paths(config)


def test_the_key_of_the_loss_names_the_losses_of_each_task():
    told = {}
    for task, traits in TRAITS.items():
        told.setdefault(" | ".join(one.value for one in traits.losses), []).append(task.value)
    listed = "; ".join(f"{', '.join(tasks)}: {losses}" for losses, tasks in told.items() if losses)
    assert find_key("task.loss").words == f"{listed}."
