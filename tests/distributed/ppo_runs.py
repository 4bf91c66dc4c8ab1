"""PPO in plain torch, as TRL's last PPOTrainer computed it, with a head of values on the policy and our answers."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfdist.models.partitioning import WHOLE
from hfdist.models.value_head import add_value_head, draw_value_head
from tests.distributed.policy_runs import ANSWERS, draw_answers, score
from tests.distributed.preference_runs import EPSILON, RATE

BETA, GAMMA, LAMBDA, VALUE_WEIGHT = 0.5, 0.9, 0.8, 0.5
KEYS = (
    f"task.beta={BETA}",
    f"task.gamma={GAMMA}",
    f"task.gae_lambda={LAMBDA}",
    f"task.value_weight={VALUE_WEIGHT}",
)
"""Values other than the defaults: each of them changes the loss."""


def look(model, rows: list[list[int]], starts: list[int], width: int):
    """Log-probabilities and values of the tokens after `starts`; shape [rows, width], 0 after the last one."""
    ids = torch.tensor([[*row, *[0] * (max(map(len, rows)) - len(row))] for row in rows])
    output = model(ids, output_hidden_states=True)
    logs = output.logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
    values = model.value_head(output.hidden_states[-1])[:, :-1, 0]
    parts = []
    for found in (logs, values):
        own = [found[i, start - 1 : len(row) - 1] for i, (row, start) in enumerate(zip(rows, starts, strict=True))]
        parts.append(torch.stack([torch.nn.functional.pad(one, (0, width - len(one))) for one in own]))
    return parts


def train_plainly(folder: Path, model_folder: Path, steps: list) -> list[dict]:
    """Train on the prompts of each step; give the figures of each, and leave the policy in the folder."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32")
    add_value_head(model, torch.float32)
    draw_value_head(model, 0, WHOLE)
    reference, lines, num_prompts = copy.deepcopy(model), [], 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), eps=EPSILON, weight_decay=0.0)
    for step in steps:
        prompts = [prompt for prompt, *_ in step for _ in range(ANSWERS)]
        references = [tokenizer.decode(answer, skip_special_tokens=True) for _, answer, _ in step]
        answers = draw_answers(model, prompts, num_prompts)
        num_prompts += len(step)
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        scores = score(texts, [own for own in references for _ in range(ANSWERS)])
        rows, starts = [p + a for p, a in zip(prompts, answers, strict=True)], list(map(len, prompts))
        width = max(map(len, answers))
        mask = torch.arange(width) < torch.tensor(list(map(len, answers)))[:, None]
        with torch.no_grad():
            logs, values = look(model, rows, starts, width)
            of_reference, _ = look(reference, rows, starts, width)
        kl = logs - of_reference
        rewards = -BETA * kl
        rewards[torch.arange(len(rows)), torch.tensor(list(map(len, answers))) - 1] += torch.tensor(scores)
        later, advantages = 0.0, []
        for t in reversed(range(width)):
            following = values[:, t + 1] if t < width - 1 else 0.0
            surprise = rewards[:, t] + GAMMA * following - values[:, t]
            later = (surprise + GAMMA * LAMBDA * later) * mask[:, t]
            advantages.insert(0, later)
        advantages = torch.stack(advantages, 1)
        returns = advantages + values
        advantages = (advantages - advantages[mask].mean()) * (advantages[mask].var() + 1e-8).rsqrt()
        new_logs, new_values = look(model, rows, starts, width)
        ratio = (new_logs - logs).exp()
        of_policy = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))[mask].mean()
        of_values = 0.5 * (new_values - returns).square()[mask].mean()
        loss = of_policy + VALUE_WEIGHT * of_values
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lines.append(
            {
                "loss": loss.item(),
                "value_loss": of_values.item(),
                "kl": kl[mask].mean().item(),
                "grad_norm": norm.item(),
                "reward": sum(scores) / len(scores),
            }
        )
    folder.mkdir(parents=True)
    save_file({name: p for name, p in model.state_dict().items() if "value" not in name}, folder / "model.safetensors")
    return lines
