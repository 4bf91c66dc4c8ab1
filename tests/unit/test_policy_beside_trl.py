"""Losses of answers that an older policy gave: value and gradient are those of TRL's GRPOTrainer."""

from types import SimpleNamespace

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfdist.config.batch import IGNORED
from hfdist.config.task import TaskConfig, TaskLoss, TaskName
from hfdist.tune.policy import REFERENCE_LOG_PROBABILITIES, PolicyGradient
from hfdist.tune.rollout_rows import ADVANTAGES, OLD_LOG_PROBABILITIES, TRAINS
from tests.distributed.policy_runs import write_model

PROMPT, LENGTHS, MOST = 3, (5, 2, 4, 1, 5, 3), 5


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = AutoModelForCausalLM.from_pretrained(write_model(folder / "start"), dtype="float32")
    args = trl.GRPOConfig(
        str(folder / "run"), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=len(LENGTHS),
        num_generations=2, max_completion_length=MOST, temperature=1.3, delta=3.0, gradient_checkpointing=False,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": "1 + 2 = "}] * 6)
    made = trl.GRPOTrainer(
        model,
        args=args,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folder / "start"),
    )
    made.current_gradient_accumulation_steps = 1
    made.args.steps_per_generation = 1
    return made


def make_answers(spread):
    """Prompts and answers of six rows, what they gained, and logarithms of ratios to two other policies."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 15, (len(LENGTHS), PROMPT + MOST), generator=draw)
    is_target = torch.arange(PROMPT + MOST) < PROMPT + torch.tensor(LENGTHS)[:, None]
    is_target[:, :PROMPT] = False
    distances = spread * torch.randn(2, *ids.shape, generator=draw)
    return ids, is_target, torch.randn(len(LENGTHS), generator=draw), distances


def log_probabilities(model, ids, temperature):
    logits = model(ids).logits[:, :-1] / temperature
    found = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
    return torch.nn.functional.pad(found, (1, 0))


def ours(model, task, ids, is_target, advantages, old, reference, trains=None):
    """Loss and gradient by hfdist."""
    objective = PolicyGradient(task, SimpleNamespace(names=(), generators=None))
    objective._training = SimpleNamespace(model=model, head=None, image_names=(), args=SimpleNamespace(device="cpu"))
    batch = {
        "input_ids": ids,
        "labels": torch.where(is_target, ids, IGNORED),
        "position_ids": torch.arange(ids.shape[1]).expand_as(ids),
        ADVANTAGES: advantages,
        OLD_LOG_PROBABILITIES: torch.where(is_target, old, 0),
    }
    batch |= {REFERENCE_LOG_PROBABILITIES: torch.where(is_target, reference, 0)} if task.beta else {}
    batch |= {} if trains is None else {TRAINS: trains}
    loss = objective.loss(model, batch) / objective.count(batch)
    return loss.item(), gradient(model, loss), objective


def gradient(model, loss):
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


GSPO = {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15}
CASES = {
    TaskLoss.grpo: ({}, {"loss_type": "dapo"}),
    TaskLoss.dapo: ({}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    TaskLoss.dr_grpo: ({}, {"loss_type": "dr_grpo"}),
    TaskLoss.gspo: ({"clip": 0.1, "clip_high": 0.15}, {"loss_type": "grpo", **GSPO}),
    TaskLoss.cispo: ({"clip_high": 0.4}, {"loss_type": "cispo", "epsilon_high": 1.4}),
    TaskLoss.sapo: ({}, {"loss_type": "sapo"}),
    TaskLoss.vespo: ({}, {"loss_type": "vespo"}),
    TaskLoss.luspo: ({"clip": 0.1, "clip_high": 0.15}, {"loss_type": "luspo", **GSPO}),
}
PLAIN = {"importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0,
         "off_policy_mask_threshold": None}  # fmt: skip
UNBOUNDED = (TaskLoss.sapo, TaskLoss.vespo)


@pytest.mark.parametrize(
    ("beta", "spread", "masks", "reads"), [(0.0, 0.9, False, False), (0.7, 0.25, True, False), (0.7, 0.25, False, True)]
)
@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_that_of_trl(trainer, name, beta, spread, masks, reads):
    compare(trainer, name, *CASES[name], beta=beta, spread=spread, masks=masks, reads=reads)


@pytest.mark.parametrize(
    ("name", "own", "theirs", "delta"),
    [
        (TaskLoss.grpo, {"delta": 1.3}, {"loss_type": "dapo"}, 1.3),
        (TaskLoss.grpo, {"off_policy_mask_threshold": 0.1}, {"loss_type": "dapo", "off_policy_mask_threshold": 0.1}, 3),
        (TaskLoss.vespo, {"off_policy_mask_threshold": 0}, {"loss_type": "vespo", "off_policy_mask_threshold": 0}, 3),
    ],
)
def test_what_limits_older_answers_is_that_of_trl(trainer, monkeypatch, name, own, theirs, delta):
    monkeypatch.setattr(trainer.args, "delta", delta)
    limited = compare(trainer, name, own, theirs, spread=0.9)
    assert (
        limited - compare(trainer, name, {"delta": 3.0}, {"loss_type": theirs["loss_type"]}, spread=0.9, beside=False)
    ).norm() > 1e-3


def compare(trainer, name, own, theirs, *, beta=0.0, spread, masks=False, reads=False, beside=True):
    """Compare loss and gradient with TRL's, where `beside` says so; give the gradient."""
    vars(trainer).update(PLAIN | theirs | {"beta": beta})
    model = trainer.model.train()
    sampled = {"temperature": 1.3, "max_new_tokens": MOST, "generators": 1}
    task = TaskConfig(name=TaskName.grpo, loss=name, beta=beta, **sampled, **{"clip": None} | own)
    ids, is_target, advantages, distances = make_answers(spread)
    is_answer = is_target.clone()
    if reads:
        # The second token of each answer is what an environment has said.
        is_target[:, PROMPT + 1] = False
    with torch.no_grad():
        old, reference = log_probabilities(model, ids, 1.3) - distances
    trains = torch.tensor(LENGTHS) < MOST if masks else torch.ones(len(LENGTHS), dtype=torch.bool)
    mask = (is_answer & trains[:, None])[:, PROMPT:].int()
    of_model = is_target[:, PROMPT:].int()
    inputs = {
        "prompt_ids": ids[:, :PROMPT], "prompt_mask": torch.ones_like(ids[:, :PROMPT]),
        "completion_ids": ids[:, PROMPT:], "completion_mask": mask, "advantages": advantages,
        "old_per_token_logps": old[:, PROMPT:], "ref_per_token_logps": reference[:, PROMPT:],
        "num_items_in_batch": (mask * of_model).sum(), **({"tool_mask": of_model} if reads else {}),
    }  # fmt: skip
    loss, found, objective = ours(model, task, ids, is_target, advantages, old, reference, trains if masks else None)
    if not beside:
        return found
    wanted = trainer._compute_loss(model, inputs)
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    assert torch.allclose(found, gradient(model, wanted), rtol=1e-4, atol=1e-6)
    assert found.norm() > 1e-3
    figures = objective.figures(trains=True)
    assert figures["mismatch"] == pytest.approx(distances[0][is_target].abs().mean().item(), rel=1e-4)
    assert objective._largest.item() == pytest.approx(distances[0][is_target].max().item(), rel=1e-4)
    assert (figures["clipped_ratios"] > 0) is (name not in UNBOUNDED)
    return found


def test_rloo_takes_the_ratio_of_whole_answers(trainer):
    """Their product, as TRL's RLOOTrainer computes it."""
    model = trainer.model.train()
    task = TaskConfig(name=TaskName.rloo, loss=TaskLoss.rloo, beta=0, clip=None, temperature=1.3, generators=1)
    ids, is_target, advantages, distances = make_answers(0.2)
    old = log_probabilities(model, ids, 1.3).detach() - distances[0]
    loss, found, _ = ours(model, task, ids, is_target, advantages, old, old)
    ratios = ((log_probabilities(model, ids, 1.3) - old) * is_target).sum(1).exp()
    wanted = -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages).mean()
    assert ratios.max() < 3
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    assert torch.allclose(found, gradient(model, wanted), rtol=1e-4, atol=1e-6)
