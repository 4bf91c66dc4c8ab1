"""PPO: advantages by the formula of their paper, and losses and gradients by that of TRL's last PPOTrainer."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig, TaskLoss, TaskName
from hfdist.errors import ConfigError
from hfdist.models.partitioning import WHOLE
from hfdist.models.value_head import add_value_head, check_value_head, draw_value_head
from hfdist.tune.gae import estimate, rewards_of_tokens, whiten
from hfdist.tune.ppo import RETURNS, ProximalPolicy
from hfdist.tune.rollout_rows import ADVANTAGES, OLD_LOG_PROBABILITIES, REWARDS, STEP_ENDS, TRAINS

GAMMA, LAMBDA = 0.9, 0.8
IS_DRAWN = torch.tensor([[0, 0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]]).bool()
"""What an environment has said stands within the first answer, and the last row has no answer."""


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_an_advantage_is_the_discounted_sum_of_surprises():
    rewards, values = numbers(*IS_DRAWN.shape), numbers(*IS_DRAWN.shape, seed=1)
    found = estimate(rewards, values, IS_DRAWN, gamma=GAMMA, lam=LAMBDA)
    for row, is_drawn in enumerate(IS_DRAWN):
        own, expected = rewards[row, is_drawn].tolist(), [*values[row, is_drawn].tolist(), 0.0]
        surprises = [reward + GAMMA * expected[t + 1] - expected[t] for t, reward in enumerate(own)]
        wanted = [
            sum((GAMMA * LAMBDA) ** (later - t) * surprises[later] for later in range(t, len(own)))
            for t in range(len(own))
        ]
        assert found.advantages[row, is_drawn].tolist() == pytest.approx(wanted, abs=1e-6)
        returns = [advantage + value for advantage, value in zip(wanted, expected, strict=False)]
        assert found.returns[row, is_drawn].tolist() == pytest.approx(returns, abs=1e-6)
    assert not found.advantages[~IS_DRAWN].any()
    assert not found.returns[~IS_DRAWN].any()


def test_a_reward_is_at_the_end_of_its_answer_or_of_its_step():
    labels = torch.where(IS_DRAWN, 5, IGNORED)
    found = rewards_of_tokens({"labels": labels, REWARDS: torch.tensor([[2.0], [3.0], [0.0]])})
    assert found.nonzero().tolist() == [[0, 6], [1, 2]]
    assert found[[0, 1], [6, 2]].tolist() == [2.0, 3.0]
    ends, rewards = torch.tensor([[3, 6], [2, -1], [-1, -1]]), torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 0.0]])
    found = rewards_of_tokens({"labels": labels, REWARDS: rewards, STEP_ENDS: ends})
    assert found.nonzero().tolist() == [[0, 3], [0, 6], [1, 2]]
    assert found[[0, 0, 1], [3, 6, 2]].tolist() == [1.0, 2.0, 3.0]


def test_advantages_are_whitened_over_all_tokens_that_train():
    batches, trains = [numbers(3, 7), numbers(2, 4, seed=1)], [IS_DRAWN, numbers(2, 4, seed=2) > 0]
    found = whiten(batches, trains, data_rank=0)
    before = torch.cat([own[which] for own, which in zip(batches, trains, strict=True)])
    after = torch.cat([own[which] for own, which in zip(found, trains, strict=True)])
    assert torch.allclose(after, (before - before.mean()) * (before.var() + 1e-8).rsqrt(), atol=1e-6)
    assert not found[0][~IS_DRAWN].any()
    nothing = whiten([torch.ones(1, 3)], [torch.zeros(1, 3).bool()], data_rank=0)
    assert nothing[0].tolist() == [[0.0] * 3]


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "vocab_size": 50, "initializer_range": 0.1}  # fmt: skip
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    add_value_head(made, torch.float32)
    draw_value_head(made, 0, WHOLE)
    return made


def gradient(model, loss):
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("masks", [False, True])
def test_loss_and_gradient_are_those_of_the_formula(model, masks):
    """With TRL's bound of values (cliprange_value): values that begin the step are within it."""
    ids = torch.randint(50, (3, 8), generator=torch.Generator().manual_seed(2))
    is_target = torch.arange(8) >= torch.tensor([3, 4, 2])[:, None]
    is_target[0, 6:] = False
    trains = torch.tensor([True, False, True]) if masks else torch.ones(3).bool()
    output = model(ids, output_hidden_states=True)
    logs = output.logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
    values = model.value_head(output.hidden_states[-1])[:, :-1, 0]
    old = logs.detach() - 0.3 * numbers(3, 7)
    advantages, returns = numbers(3, 7, seed=4), numbers(3, 7, seed=5)

    mask = (is_target & trains[:, None])[:, 1:]
    ratio = (logs - old).exp()
    of_policy = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    bounded = torch.clamp(values, values.detach() - 0.2, values.detach() + 0.2)
    of_values = torch.max((values - returns).square(), (bounded - returns).square())
    wanted = (of_policy[mask].mean()) + 0.3 * 0.5 * of_values[mask].mean()

    task = TaskConfig(name=TaskName.ppo, loss=TaskLoss.ppo, beta=0, clip=None, generators=1, value_weight=0.3, delta=9)
    objective = ProximalPolicy(task, SimpleNamespace(names=(), generators=None))
    objective._training = SimpleNamespace(
        model=model.train(), head=None, image_names=(), args=SimpleNamespace(device="cpu")
    )
    batch = {
        "input_ids": ids,
        "labels": torch.where(is_target, ids, IGNORED),
        "position_ids": torch.arange(8).expand_as(ids),
        **{
            name: torch.where(is_target, torch.nn.functional.pad(own, (1, 0)), 0)
            for name, own in ((ADVANTAGES, advantages), (RETURNS, returns), (OLD_LOG_PROBABILITIES, old))
        },
        TRAINS: trains,
    }
    loss = objective.loss(model, batch) / objective.count(batch)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    found = gradient(model, loss)
    assert torch.allclose(found, gradient(model, wanted), rtol=1e-4, atol=1e-6)
    assert found.norm() > 1e-3
    figures = objective.figures(trains=True)
    assert figures["value_loss"] == pytest.approx(0.5 * of_values[mask].mean().item(), rel=1e-5)
    assert figures["clipped_ratios"] > 0


def test_a_model_without_a_head_of_tokens_gets_none_of_values():
    """What tells the width of the hidden states is missing."""
    small = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=2, vocab_size=9, n_positions=8)
    )
    check_value_head(small)
    small.get_output_embeddings = lambda: None
    with pytest.raises(ConfigError) as refused:
        check_value_head(small)
    assert refused.value.where == "model.name, model.type"
