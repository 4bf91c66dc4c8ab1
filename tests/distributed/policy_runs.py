"""GRPO and RLOO on forked ranks, and TRL's trainers with the same answers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hfdist.models.initialize import initialize_by_name
from hfdist.records import RunFolder, read_lines
from hfdist.rewards import Generation, load_rewards
from hfdist.topology import Topology
from hfdist.trainer.generation.limits import GenerationLimits
from hfdist.trainer.generation.sampling import Sampler, Sampling
from tests.distributed.preference_runs import GLOBAL_BATCH, PLAIN

MARKS = ["<pad>", "<end>", "<unknown>"]
WORDS = [*"0123456789", "+", "="]
ANSWERS, NEW_TOKENS = 4, 5
COMMON = (
    "task.rewards={arithmetic: 2.0}",
    f"task.num_generations={ANSWERS}",
    f"task.max_new_tokens={NEW_TOKENS}",
    "data.sequence_length=16",
    "evaluate.num_generations=6",
)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
         "num_key_value_heads": 2, "vocab_size": len(MARKS) + len(WORDS), "pad_token_id": 0, "eos_token_id": 1,
         "initializer_range": 0.1}  # fmt: skip


def write_model(folder: Path) -> Path:
    """A model that writes digits at random, of which some are right."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*MARKS, *WORDS])}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    initialize_by_name(model, 0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_sums(path: Path) -> Path:
    """Sums of one digit, with their last digit as the answer."""
    with path.open("w") as file:
        for number in range(60):
            first, second = number % 10, number // 6
            row = {
                "prompt": f"{first} + {second} = ",
                "completion": str((first + second) % 10),
                "terms": [first, second],
            }
            file.write(json.dumps(row) + "\n")
    return path


TERMS = """
def terms(generations):
    return [one.prompt.split()[::2] == [str(term) for term in one.columns["terms"]] for one in generations]
"""
"""A reward that is 1 where the columns are those of the prompt."""

EVEN = """
import re


def even(generations):
    return [[(word.end(), float(word[0] in "02468")) for word in re.finditer(r"\\S+", one.text)] for one in generations]
"""
"""A reward of each word: 1 for an even digit."""


MOODY = '''
import os

from hfdist.environments.guess import Guess


class Moody(Guess):
    """The guessing game, which fails for some numbers, and gives no number twice as much."""

    def reset(self, row):
        super().reset(row)
        if self._number == 7:
            raise ValueError("no room")

    def step(self, text):
        if self._number in (1, 4):
            raise ValueError("not today")
        observation, reward, done = super().step(text)
        return ("3 + 4" if observation == "higher" else observation), reward + 0.125, done
'''
"""The environment `moody`: some of its episodes fail."""


def trained_prompts(run_dir: Path) -> list[tuple[int, int]]:
    """Step and number of each prompt that generators have answered and a step has trained, in order."""
    return [(line["step"], line["number"]) for line in read_lines(RunFolder(run_dir).rollouts_ledger)]


def each_once(num_steps: int) -> list[tuple[int, int]]:
    """What `trained_prompts` gives where nothing was lost or repeated."""
    return [(number // GLOBAL_BATCH + 1, number) for number in range(num_steps * GLOBAL_BATCH)]


def draw_answers(model, prompts: list[list[int]], first_number: int, temperature: float = 1.0) -> list[list[int]]:
    """Answer prompts as a run does whose first one has this number; each stands there once for each answer."""
    seeds = [
        int.from_bytes(hashlib.blake2b(f"0:{n}:{place % ANSWERS}".encode(), digest_size=8).digest(), "little")
        for place, n in enumerate(first_number + place // ANSWERS for place in range(len(prompts)))
    ]
    model.eval()
    with torch.no_grad():
        drawn = Sampler(
            limits=GenerationLimits(max_new_tokens=NEW_TOKENS, end_ids=frozenset({1}), most_tokens=None),
            sampling=Sampling(temperature=temperature),
            topology=Topology(),
            uses_cache=False,
        ).draw(prompts, seeds, lambda batch, function: [function(model, batch)], rows_at_once=len(prompts))
    model.train()
    return [one.tokens for one in drawn]


class _OurAnswers:
    """Put before a trainer of TRL's: its answers are ours, from its own weights."""

    num_prompts = 0

    def _generate_single_turn(self, prompt_ids, *_others):
        first, self.num_prompts = self.num_prompts, self.num_prompts + len(prompt_ids) // ANSWERS
        answers = draw_answers(self.model, prompt_ids, first, self.args.temperature)
        return (answers, None) if isinstance(self, trl.GRPOTrainer) else answers


class GRPO(_OurAnswers, trl.GRPOTrainer):
    """With our answers."""


class RLOO(_OurAnswers, trl.RLOOTrainer):
    """With our answers."""


def score(completions, reference, **_):
    """The reward that the runs have."""
    [reward] = load_rewards({"arithmetic": 2.0})
    generations = [Generation(prompt="", text=c, reference=r) for c, r in zip(completions, reference, strict=True)]
    return [2.0 * value for value in reward(generations)]


def train_plainly(folder: Path, model: Path, task: str, steps: list, arguments: dict) -> list[dict]:
    """Train TRL's class on the prompts of each step; give its lines, and leave the model in the folder."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer.decode(prompt) for step in steps for prompt, *_ in step]
    references = [tokenizer.decode(answer, skip_special_tokens=True) for step in steps for _, answer, _ in step]
    trainer, config = (GRPO, trl.GRPOConfig) if task == "grpo" else (RLOO, trl.RLOOConfig)
    fields = {"beta": 0.0} | arguments
    args = config(
        str(folder),
        **PLAIN,
        per_device_train_batch_size=GLOBAL_BATCH * ANSWERS,
        shuffle_dataset=False,
        num_generations=ANSWERS,
        max_completion_length=NEW_TOKENS,
        **fields,
    )
    own = trainer(
        AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        args=args,
        reward_funcs=score,
        train_dataset=Dataset.from_list(
            [{"prompt": p, "reference": r} for p, r in zip(prompts, references, strict=True)]
        ),
        processing_class=tokenizer,
    )
    own.train()
    own.save_model(str(folder / "model"))
    return [line for line in own.state.log_history if "loss" in line]
