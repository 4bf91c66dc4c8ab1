"""Small encoders with a tokenizer of BERT's kind, and runs that begin with them."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedTokenizerFast

from hfdist.config.task import Head
from hfdist.models.heads import HEADS
from hfdist.models.initialize import initialize_by_name
from hfdist.models.shrink import shrink
from tests.distributed.trl_runs import WORDS

MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_tokenizer(*, has_segments: bool = True) -> PreTrainedTokenizerFast:
    """Words of `WORDS`; a text is [CLS] text [SEP], and a pair [CLS] first [SEP] second [SEP]."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*MARKS, *WORDS])}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    second = int(has_segments)
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", MARKS.index("[CLS]")), ("[SEP]", MARKS.index("[SEP]"))],
    )
    inputs = ["input_ids", *(["token_type_ids"] if has_segments else []), "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=inputs,
    )  # fmt: skip


def write_encoder(folder: Path, kind: str, *, head: Head = Head.none, **fields: object) -> Path:
    """Write a small model of a type, without dropout, and its tokenizer."""
    tokenizer = make_tokenizer(has_segments=kind in ("bert", "electra"))
    config = shrink(AutoConfig.for_model(kind), num_blocks=4)
    for name, value in vars(config).items():
        if "dropout" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    for name, value in {"pad_token_id": 0, "vocab_size": len(tokenizer), **fields}.items():
        setattr(config, name, value)
    model = HEADS[head].auto.from_config(config)
    initialize_by_name(model, 0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
