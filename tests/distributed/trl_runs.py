"""Runs of TRL's trainers on tiny models and datasets, plain or through the mixin, and what they leave to compare."""

from __future__ import annotations

import torch
import trl
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

import hfdist
from hfdist.models.initialize import initialize_by_name
from hfdist.testing import forget_parent

WORDS = ["the", "a", "red", "blue", "big", "small", "cat", "dog", "bird", "sees", "likes", "eats", "and", "then", "now"]
MARKS = ["<pad>", "<end>", "<user>", "<assistant>", "<unknown>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}"
    "{% if message['role'] == 'assistant' %} {% generation %}{{ message['content'] + ' <end>' }}{% endgeneration %} "
    "{% else %}{{ ' ' + message['content'] + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": len(WORDS) + len(MARKS), "pad_token_id": 0}  # fmt: skip
GLOBAL_BATCH, STEPS = 8, 3
# By default TRL recomputes blocks: some runs say so.
QUIET = {"logging_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no",
         "disable_tqdm": True, "gradient_checkpointing": False}  # fmt: skip
"""Arguments of TRL's classes that have nothing to do with what is trained."""
TRAINERS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "reward": (trl.RewardTrainer, trl.RewardConfig),
    "kto": (trl.KTOTrainer, trl.KTOConfig),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
}


def make_tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*MARKS, *WORDS])}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>",
        additional_special_tokens=["<user>", "<assistant>"],
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_models(folder, **fields):
    """Where all runs start from."""
    for name, kind in (("lm", AutoModelForCausalLM), ("scores", AutoModelForSequenceClassification)):
        model = kind.from_config(AutoConfig.for_model("llama", num_labels=1, **TINY | fields))
        initialize_by_name(model, 0)
        model.save_pretrained(folder / name)
    make_tokenizer().save_pretrained(folder / "lm")


def make_dataset(kind, num_rows=GLOBAL_BATCH * STEPS):
    """Rows of very different lengths, and shares of targets."""
    generator = torch.Generator().manual_seed(0)

    def say(length):
        return " ".join(WORDS[pick] for pick in torch.randint(len(WORDS), (length,), generator=generator))

    def row(number):
        question, answer = say(1 + number * 5 % 11), say(1 + number * 3 % 13)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {
            "text": {"text": f"{question} {answer}"},
            "prompt": {"prompt": f"{question} ", "completion": answer},
            "chat": {"messages": messages * (1 + number % 2)},
            "preference": {"prompt": f"{question} ", "chosen": answer, "rejected": say(1 + number % 4)},
            "judged": {"prompt": f"{question} ", "completion": answer, "label": bool(number % 3)},
            "asked": {"prompt": question},
        }[kind]

    return Dataset.from_list([row(number) for number in range(num_rows)])


def count_letters(completions, **_):
    return [float(len(completion)) for completion in completions]


def lora(**fields):
    """For a run's `more`: what a trainer is given besides."""
    return {"peft_config": LoraConfig(target_modules=["q_proj", "down_proj"], r=4, **fields)}


def make_model(models_folder, trainer="sft"):
    if trainer == "reward":
        return AutoModelForSequenceClassification.from_pretrained(models_folder / "scores", num_labels=1)
    return AutoModelForCausalLM.from_pretrained(models_folder / "lm", dtype="float32")


def make_trainer(folder, models_folder, run):
    """Make the trainer of a run: a dict of `trainer`, `data`, `layout` (None: plain TRL), `arguments`, `model`."""
    name, layout = run.get("trainer", "sft"), run.get("layout")
    trainer_class, config_class = TRAINERS[name]
    fields = QUIET | {"output_dir": str(folder), "max_steps": STEPS, "learning_rate": 1e-3}
    fields["per_device_eval_batch_size"] = 32
    if name not in ("grpo", "rloo"):
        fields["max_length"] = 24
    more = dict(run.get("more", {}))
    if layout is None:
        micro_batch_size = run.get("micro_batch_size", 2)
        sizes = {"per_device_train_batch_size": micro_batch_size,
                 "gradient_accumulation_steps": GLOBAL_BATCH // micro_batch_size}  # fmt: skip
    else:
        sizes = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": run.get("micro_batch_size", 2)}
        strategy = hfdist.make_strategy(sequence_length=24, **sizes, **layout)
        sizes = strategy.training_arguments()
        trainer_class = type("Mine", (hfdist.DistributedTrainerMixin, trainer_class), {})
        more["strategy"] = strategy
    arguments = config_class(**fields | run.get("arguments", {}) | sizes)
    if layout is not None:
        strategy.start()
    if run.get("on_disk"):
        # Not in `folder`, where all ranks would write.
        data = [load_from_disk(run["on_disk"][part]) for part in ("train", "eval")]
    else:
        data = [make_dataset(run["data"]), make_dataset(run["data"], 7)]
    model = run.get("model") or make_model(models_folder, name)
    return trainer_class(
        model, args=arguments, train_dataset=data[0], eval_dataset=data[1], processing_class=make_tokenizer(), **more
    )


def train_all(folder, models_folder, runs):
    """Train all runs one after the other in this process, and give what each has logged."""
    logged = {}
    for name, run in runs.items():
        forget_parent()
        trainer = make_trainer(folder / name, models_folder, run)
        trainer.train(resume_from_checkpoint=run.get("resume"))
        held_out = trainer.evaluate()
        trainer.save_model(str(folder / name / "model"))
        logged[name] = ([line for line in trainer.state.log_history if "loss" in line], held_out)
    return logged


def weights(folder):
    """Of a run: all of the model, or its adapter."""
    [file] = (folder / "model").glob("*model.safetensors")
    return load_file(file)


def difference(ours, reference):
    """The largest relative one of all tensors, as norms."""
    assert ours.keys() == reference.keys()
    return max(float((ours[name] - value).norm() / value.norm().clamp_min(1e-12)) for name, value in reference.items())
