"""The learning rate of a run that says none."""

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_values
from hfdist.config.rates import explain_learning_rate
from hfdist.config.task import TRAITS, TaskName

PRETRAINING = " (a rate for pretraining; a lower one forgets less of what the model knows: Ibrahim et al., 2024)"


@pytest.mark.parametrize(
    ("primary", "overrides", "rate", "why"),
    [
        ("finetune", [], 2e-5, " (as in TRL's SFTTrainer)"),
        ("finetune", ["adapter=lora"], 2e-4, " (10 times that of all weights, the default of TRL's SFTTrainer)"),
        ("finetune", ["adapter=qlora"], 2e-4, " (10 times that of all weights, the default of TRL's SFTTrainer)"),
        ("tune", ["task=dpo"], 1e-6, " (as in TRL's DPOTrainer)"),
        (
            "tune",
            ["task=dpo", "adapter=lora"],
            1e-5,
            " (10 times that of all weights, the default of TRL's DPOTrainer)",
        ),
        ("tune", ["task=reward"], 1e-4, " (as in TRL's RewardTrainer)"),
        ("tune", ["task=grpo", "task.rewards={arithmetic: 1}"], 1e-6, " (as in TRL's GRPOTrainer)"),
        ("tune", ["task=distill", "task.teacher=folder"], 2e-5, " (as in TRL's GKDTrainer)"),
        ("tune", ["task=embed"], 5e-5, " (as in sentence-transformers's SentenceTransformerTrainer)"),
        # Those that are said win, of a file too.
        ("finetune", ["adapter=lora", "optimizer.lr=3e-5"], 3e-5, ""),
        ("finetune", ["optimizer=adamw"], 3e-4, ""),
        ("pretrain", [], 3e-4, ""),
        ("pretrain", ["model=hub", "model.name=OWNER/NAME"], 3e-4, PRETRAINING),
    ],
)
def test_a_rate_follows_from_the_task_and_the_adapter(primary, overrides, rate, why):
    data = ["data.sources.files.path=a.jsonl"] if primary == "tune" else []
    config = compose_config(["model=tiny", *data, *overrides], name=primary)
    assert config.optimizer.lr == rate
    assert explain_learning_rate(config) == why
    # A run's own file says the number.
    assert to_values(config)["optimizer"]["lr"] == rate


def test_each_task_has_its_traits():
    assert set(TRAITS) == set(TaskName)
