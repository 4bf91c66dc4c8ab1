"""What is said of answers means the same in a step and in an evaluation."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from hfdist.config.run import RunConfig
from hfdist.config.task import TaskName
from hfdist.data.documents.examples import Example
from hfdist.rewards.registry import Reward
from hfdist.topology import Topology
from hfdist.trainer.generation import greedy, sampling
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.sampling import Sampler, Sampling
from hfdist.tune.rollout import Rollouts
from hfdist.tune.rollout_lines import RolloutLines
from hfdist.tune.rollout_rows import REWARDS

_ = -100
END = 0


@pytest.fixture
def rollouts(tmp_path, monkeypatch):
    """Rollouts of a model that answers each prompt with three tokens and an end."""
    config = RunConfig()
    config.task.name, config.task.max_new_tokens, config.task.num_generations = TaskName.grpo, 8, 2
    tokenizer = SimpleNamespace(eos_token_id=END, pad_token_id=END, decode=lambda ids, skip_special_tokens: str(ids))
    reward = Reward(name="one", weight=1.0, score=lambda generations: [1.0] * len(generations))
    lines = RolloutLines(tmp_path / "rollouts.jsonl", 10, 2)
    made = Rollouts(config, [reward], tokenizer, examples=[Example(prompt=[5, 6], reference=[7])], lines=lines)
    limits = GenerationLimits(max_new_tokens=8, end_ids=frozenset({END}), most_tokens=None)
    made._sampler = Sampler(limits=limits, sampling=Sampling.of(config.task), topology=Topology(), uses_cache=False)
    made._topology = Topology()
    strategy = SimpleNamespace(batch=SimpleNamespace(micro_batch_size=1), topology=Topology())
    made._training = SimpleNamespace(
        num_samples=lambda: 1,
        strategy=strategy,
        args=SimpleNamespace(per_device_eval_batch_size=1),
        state=SimpleNamespace(global_step=0),
    )
    for module in (sampling, greedy):
        monkeypatch.setattr(module, "continue_rows", lambda prompts, *_, **__: [[1, 2, 3, END] for _ in prompts])
    return made


def test_an_answer_is_as_long_in_an_evaluation_as_in_a_step(rollouts):
    batch = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "labels": torch.tensor([[_, _, 7]]),
        "attention_mask": torch.ones(1, 3, dtype=torch.int64),
    }
    answered, figures = rollouts.answer([batch], lambda: nullcontext(None))
    assert answered[0]["labels"].tolist() == [[_, _, 1, 2, 3, END]] * 2
    assert answered[0][REWARDS].tolist() == [[1], [1]]
    assert figures["completion_tokens"] == [4, 4]
    assert (figures["dead_groups"], figures["cut_off"]) == ([1, 1], [0, 0])
    assert rollouts.answer_held_out(None)["completion_tokens"] == [4]
