"""Runs of TRL's trainers on tiny models and datasets, plain or through the mixin, and what they leave to compare."""

from __future__ import annotations

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import hfdist
from hfdist.models.initialize import initialize_by_name

WORDS = ["the", "a", "red", "blue", "big", "small", "cat", "dog", "bird", "sees", "likes", "eats", "and", "then", "now"]
MARKS = ["<pad>", "<end>", "<user>", "<assistant>", "<unknown>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}"
    "{% if message['role'] == 'assistant' %} {% generation %}{{ message['content'] + ' <end>' }}{% endgeneration %} "
    "{% else %}{{ ' ' + message['content'] + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": len(WORDS) + len(MARKS)}  # fmt: skip
GLOBAL_BATCH, STEPS = 8, 3
NUM_ROWS = GLOBAL_BATCH * STEPS
METRICS = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens")


class DistributedSFT(hfdist.DistributedTrainerMixin, trl.SFTTrainer):
    """As a user writes it."""


class DistributedDPO(hfdist.DistributedTrainerMixin, trl.DPOTrainer):
    """As a user writes it."""


def make_tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*MARKS, *WORDS])}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>",
        additional_special_tokens=["<user>", "<assistant>"],
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(seed=0):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))
    initialize_by_name(model, seed)
    return model


def say(generator, length):
    picks = torch.randint(len(WORDS), (length,), generator=generator)
    return " ".join(WORDS[pick] for pick in picks)


def make_dataset(kind, num_rows=NUM_ROWS):
    """Rows of very different lengths, and shares of targets."""
    generator = torch.Generator().manual_seed(0)

    def row(number):
        question, answer = say(generator, 1 + number * 5 % 11), say(generator, 1 + number * 3 % 13)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        match kind:
            case "text":
                return {"text": f"{question} {answer}"}
            case "prompt":
                return {"prompt": f"{question} ", "completion": answer}
            case "chat":
                return {"messages": messages * (1 + number % 2)}
            case "chat_prompt":
                return {"prompt": messages[:1], "completion": messages[1:]}
            case "preference":
                return {"prompt": f"{question} ", "chosen": answer, "rejected": say(generator, 1 + number % 4)}

    return Dataset.from_list([row(number) for number in range(num_rows)])


def fields(folder, **more):
    return {
        "output_dir": str(folder), "max_steps": STEPS, "learning_rate": 1e-3, "logging_steps": 1, "report_to": "none",
        "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True, "max_length": 24,
        "per_device_eval_batch_size": 2,
    } | more  # fmt: skip


def strategy_of(layout, **more):
    sizes = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": 1, "sequence_length": 24}
    return hfdist.make_strategy(**sizes | more, **layout)


def history(trainer, names=METRICS):
    return [
        {name: line[name] for name in names if name in line} for line in trainer.state.log_history if "loss" in line
    ]
