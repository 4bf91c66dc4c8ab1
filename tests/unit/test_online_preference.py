"""Pairs of a model's own answers: which are paired, and their loss by the formula of TRL's OnlineDPOTrainer."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig, TaskLoss, TaskName
from hfdist.data.marks import split_labels
from hfdist.tune.answer import Answer
from hfdist.tune.online_preference import OnlinePreferences, pair_up
from hfdist.tune.reference import REFERENCE, bind_log_probabilities
from hfdist.tune.rollout_rows import REWARDS, make_rows
from tests.distributed.policy_runs import write_model

PROMPTS = [[5, 6], [7, 8, 9], [], [4]]
ANSWERS = [[[3], [4, 5, 1], [6, 7]], [[8, 1], [9, 10, 11], [12, 1]], [[], [], []], [[5], [6], [7]]]
SCORES = [[0.0, 2.0, -1.0], [1.0, 3.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
PAIRED = [(0, 1, 2), (1, 1, 0)]
"""Number of a prompt, of its best answer and of its worst; the third prompt is none, the last has equal answers."""


@pytest.fixture
def answered():
    prompts = [prompt for prompt, of_one in zip(PROMPTS, ANSWERS, strict=True) for _ in of_one]
    batch = make_rows(prompts, [Answer.of(answer) for of_one in ANSWERS for answer in of_one], fill_id=0)
    return batch | {REWARDS: torch.tensor(SCORES).view(-1, 1)}


def test_the_best_and_the_worst_answer_are_a_pair(answered):
    pairs = pair_up(answered, 3)
    labels, is_rejected = split_labels(pairs["labels"])
    for prompt, best, worst in PAIRED:
        chosen, rejected = (PROMPTS[prompt] + ANSWERS[prompt][one] for one in (best, worst))
        row, length = slice(0, len(chosen) + len(rejected)), len(chosen)
        assert pairs["input_ids"][prompt, row].tolist() == chosen + rejected
        assert pairs["position_ids"][prompt, row].tolist() == [*range(length), *range(len(rejected))]
        assert labels[prompt][~is_rejected[prompt] & (labels[prompt] != IGNORED)].tolist() == ANSWERS[prompt][best]
        assert labels[prompt][is_rejected[prompt]].tolist() == ANSWERS[prompt][worst]
    assert (labels[2:] == IGNORED).all()


@pytest.mark.parametrize("loss", [TaskLoss.sigmoid, TaskLoss.hinge])
def test_the_loss_is_that_of_trl(tmp_path, answered, loss):
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path), dtype="float32")
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    task = TaskConfig(name=TaskName.online_dpo, loss=loss, beta=0.5)
    objective = OnlinePreferences(task, SimpleNamespace(names=(), generators=None))
    objective._pairs._training = SimpleNamespace(
        model=model, head=None, image_names=(), args=SimpleNamespace(device="cpu")
    )
    pairs = pair_up(answered, 3)
    with torch.no_grad():
        pairs[REFERENCE] = bind_log_probabilities(objective._pairs._training)(other, pairs)
    found = objective.loss(model, pairs) / objective.count(pairs)

    def log_probability(one, prompt, answer):
        ids = torch.tensor([PROMPTS[prompt] + ANSWERS[prompt][answer]])
        scores = one(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
        return scores[len(PROMPTS[prompt]) - 1 :].sum()

    margins = torch.stack([
        log_probability(model, prompt, best) - log_probability(model, prompt, worst)
        - (log_probability(other, prompt, best) - log_probability(other, prompt, worst)).detach()
        for prompt, best, worst in PAIRED
    ])  # fmt: skip
    wanted = (-logsigmoid(0.5 * margins) if loss is TaskLoss.sigmoid else torch.relu(1 - 0.5 * margins)).mean()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    gradients = [torch.autograd.grad(one, list(model.parameters())) for one in (found, wanted)]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*gradients, strict=True))
    assert margins.abs().min() > 1e-3
