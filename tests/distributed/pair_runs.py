"""Small encoder-decoders and rows for them, runs of the recipe, and transformers' own trainer on the same rows."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from torch.utils.data import SequentialSampler
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from hfdist.models.initialize import initialize_by_name
from hfdist.records import RunFolder, read_lines
from hfdist.run import prepare_run
from hfdist.tune.seq2seq import split_pair
from tests.distributed.preference_runs import EPSILON, GLOBAL_BATCH, RATE, STEPS
from tests.distributed.runs import eval_losses, losses
from tests.distributed.trl_runs import MARKS, WORDS, make_tokenizer

_BART = {
    "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0, "attention_dropout": 0.0,
    "max_position_embeddings": 64, "forced_eos_token_id": 1, "bos_token_id": 4,
}  # fmt: skip
_T5 = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16, "dropout_rate": 0.0}
SHAPES = {
    "t5": _T5,
    # An untied head, and a gated layer.
    "mt5": _T5,
    "bart": _BART | {"decoder_start_token_id": 9},
    # Its targets begin with their last token.
    "mbart": _BART,
    "marian": _BART | {"decoder_start_token_id": 9, "decoder_vocab_size": len(WORDS) + len(MARKS)},
}
"""Fields of small models, by their types."""
SAVES = ("checkpoint.every=2", "checkpoint.keep=9")


def write_model(folder: Path, kind: str, *, num_sentinels: int = 0) -> Path:
    """A model and a tokenizer that ends each text."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<extra_id_{number}>" for number in range(num_sentinels)], special_tokens=True)
    special = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1}
    if "decoder_start_token_id" not in SHAPES[kind] and kind != "mbart":
        special["decoder_start_token_id"] = 9
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, **special, **SHAPES[kind]))
    initialize_by_name(model, 0)
    model.save_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    return folder


def write_pairs(path: Path, num_rows: int = 60) -> Path:
    """Rows of sources and targets of many lengths."""
    generator = torch.Generator().manual_seed(0)

    def say(most: int) -> str:
        length = int(torch.randint(1, most, (), generator=generator))
        return " ".join(WORDS[pick] for pick in torch.randint(len(WORDS), (length,), generator=generator))

    with path.open("w") as file:
        for _ in range(num_rows):
            file.write(json.dumps({"source": say(14), "target": say(9)}) + "\n")
    return path


def read_pairs(config) -> list[dict[str, list[int]]]:
    """The rows that a run reads in its steps, in order."""
    run = prepare_run(config)
    run.find_model()
    run.open_data()
    batches = iter(run.data.stream.at_beginning().loader(batch_size=GLOBAL_BATCH))
    pairs = [
        split_pair(*row)
        for batch in itertools.islice(batches, STEPS)
        for row in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    return [{"input_ids": source.tolist(), "labels": target.tolist()} for source, target in pairs]


class InOrder(Seq2SeqTrainer):
    """Reads the rows in their order."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


def train_plainly(folder: Path, start: Path, rows: list[dict[str, list[int]]]) -> tuple[list[float], dict]:
    """Train transformers' own class on rows, all of a step at once; give the losses, and the weights."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(start, dtype=torch.float32), make_tokenizer()
    arguments = Seq2SeqTrainingArguments(
        str(folder), per_device_train_batch_size=GLOBAL_BATCH, max_steps=STEPS, learning_rate=RATE,
        lr_scheduler_type="constant", adam_epsilon=EPSILON, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    trainer = InOrder(model, arguments, train_dataset=Dataset.from_list(rows), data_collator=collator)
    trainer.train()
    found = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return found, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def difference(ours: dict, reference: dict) -> float:
    """The largest of all tensors; of biases of keys, which nothing moves but rounding, not relative to themselves."""
    assert ours.keys() == reference.keys()
    return max(float((ours[k] - value).norm() / value.norm().clamp_min(0.1)) for k, value in reference.items())


def as_of_step_2(run: Path, folder: Path) -> Path:
    """A copy of a run with `SAVES`, as if it had been killed after its second step."""
    copy = shutil.copytree(run, folder / "run")
    shutil.rmtree(copy / "checkpoints" / f"step-{STEPS:08}")
    shutil.rmtree(copy / "model")
    return copy


def tokens(run: Path) -> list[int]:
    """Tokens that were read by each step."""
    return [line["tokens"] for line in read_lines(RunFolder(run).metrics) if "loss" in line]


def check_alike(run: Path, reference: Path) -> None:
    """Two runs have read, lost and learned the same."""
    assert tokens(run) == tokens(reference)
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    assert eval_losses(run) == pytest.approx(eval_losses(reference), rel=1e-5)
    assert difference(opened(run), opened(reference)) < 1e-5


def opened(run: Path) -> dict:
    """The weights of a run's folder, opened as users do it."""
    [name] = AutoConfig.from_pretrained(run / "model").architectures
    return getattr(transformers, name).from_pretrained(run / "model").state_dict()
