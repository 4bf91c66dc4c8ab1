"""What streams give, byte for byte, as it was before documents became columns: batches, cursors and ledgers."""

import hashlib
import json
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hfdist.config.data import (
    BadRows,
    DataConfig,
    Packing,
    RowFormat,
    SourceConfig,
    SourceKind,
    TooLong,
    WeightChange,
)
from hfdist.data import open_corpus
from hfdist.data.pretokenize import pretokenize
from hfdist.data.stream.ledger import Ledger
from tests.unit.data.streams import Run

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{{ eos_token }} {% endfor %}"
# By hand, so that no release of a library changes a token.
WORDS = [f"w{number}" for number in range(200)]
FIXED = Tokenizer(
    models.WordLevel({"?": 0, "<end>": 1, "user": 2, "assistant": 3} | {w: n for n, w in enumerate(WORDS, 4)}, "?")
)
FIXED.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
LENGTHS = (0, 1, 3, 10, 40, 200, 17, 5)


def tokenizer():
    made = PreTrainedTokenizerFast(tokenizer_object=FIXED, eos_token="<end>", unk_token="?")
    made.chat_template = TEMPLATE
    return made


def text(number):
    return " ".join(WORDS[(number * 31 + place * place) % len(WORDS)] for place in range(LENGTHS[number * 5 % 8]))


def chat(number):
    answer = text(number) or "w0"
    return [{"role": "user", "content": text(number + 2)[:60] or "w1"}, {"role": "assistant", "content": answer[:200]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows of text, of which every 37th is bad, and of conversations; and both as token files."""
    root = tmp_path_factory.mktemp("golden")
    texts = [json.dumps({"text": 5 if number % 37 == 36 else text(number)}) for number in range(400)]
    (root / "text.jsonl").write_text("\n".join(texts) + "\n")
    (root / "chat.jsonl").write_text("".join(json.dumps({"messages": chat(n)}) + "\n" for n in range(200)))
    for name, form in (("text", RowFormat.text), ("chat", RowFormat.messages)):
        sources = {"x": SourceConfig(path=str(root / f"{name}.jsonl"), format=form)}
        config = DataConfig(sources=sources, cache_dir=str(root / "cache"))
        pretokenize(open_corpus(config).shards, tokenizer(), root / name, workers=0, on_bad_rows=BadRows.skip)
    return root


def tokens(folder, name="text", **more):
    return SourceConfig(kind=SourceKind.tokens, path=str(folder / name), **more)


def rows(folder, name="text", **more):
    return SourceConfig(path=str(folder / f"{name}.jsonl"), **more)


def mixed(folder):
    return {
        "t": tokens(folder, weight=2.0),
        "c": tokens(folder, "chat", weight=1.0, epochs=1),
        "b": rows(folder, weight=1.0, epochs=2),
    }


QUARANTINE = ["t:00000:7", "t:00000:8", "t:00000:33"]
ANNEAL = [WeightChange(step=3, weights={"t": 1.0, "c": 3.0, "b": 2.0})]
SOURCES = {
    "tokens": lambda folder: {"t": tokens(folder)},
    "two folders": lambda folder: {"t": tokens(folder), "u": tokens(folder, "chat")},
    "ends": lambda folder: {"t": tokens(folder, epochs=1)},
    "text": lambda folder: {"b": rows(folder)},
    "chat": lambda folder: {"c": rows(folder, "chat", format=RowFormat.messages)},
    "mixed": mixed,
}
SHORT = {"sequence_length": 16, "quarantine": QUARANTINE}
CUT = {"sequence_length": 24, "too_long": TooLong.truncate_start}
# With what came of each.
CASES = {
    "tokens, end to end": ("da6d30967fd05dd6", "tokens", SHORT),
    "tokens, held out": ("3c1cda161ca87f9b", "tokens", {"eval_fraction": 0.2, "quarantine": QUARANTINE}),
    "tokens, by a worker": (
        "da6d30967fd05dd6",
        "tokens",
        SHORT | {"workers": 1},
    ),
    "tokens, cut at the start": (
        "f0619c906af446ed",
        "tokens",
        {"sequence_length": 24, "too_long": TooLong.truncate_start},
    ),
    "tokens that end": ("24869c6d82f118d4", "ends", {"sequence_length": 64, "quarantine": QUARANTINE}),
    "tokens by themselves": ("acea8079a72c2ea7", "tokens", {"packing": Packing.none}),
    "tokens, fitted": ("6113b2f50a375ceb", "tokens", {"packing": Packing.best_fit, "quarantine": QUARANTINE}),
    "tokens of two folders": ("2ae9069d87418e20", "two folders", {"quarantine": QUARANTINE, "eval_fraction": 0.1}),
    "text, long ones left out": ("fb065b33c860bcbe", "text", {"too_long": TooLong.drop}),
    "conversations": ("4d68b496e57c1c4b", "chat", {}),
    "a mixture": ("0b1519bc9d921c1c", "mixed", {"quarantine": QUARANTINE, "anneal": ANNEAL, "eval_fraction": 0.1}),
    "a mixture, fitted": ("7bb714a6f92ce2f2", "mixed", {"packing": Packing.best_fit, "anneal": ANNEAL}),
}


def as_before(state):
    """A cursor in format 2, without what was added to it since."""
    places = [[lane, chained, *(pool[:5] for pool in pools)] for lane, chained, *pools in state["places"]]
    state = {**state, "format": 2, "identity": "", "places": places}
    del state["contents"]
    return state


def digest_of(config, ledger_folder, rows_folder):
    """Of all that 3, then 1, then 4 ranks are given in 4 steps each, and of what they keep."""
    corpus, state = open_corpus(config), None
    digest = hashlib.blake2b(digest_size=8)
    for num_ranks in (3, 1, 4):
        ledger = partial(Ledger, ledger_folder, corpus, config.on_bad_rows)
        run = Run(corpus, config, num_ranks, state, ledger=ledger, encoder=tokenizer())
        for _ in range(4):
            shares = [next(share) for share in run.batches]
            for name in sorted(shares[0]):
                # Sequence s is of rank s mod ranks; documents by themselves differ in length.
                of_ranks = zip(*(share[name] for share in shares), strict=True)
                digest.update(name.encode())
                for row in (row for turn in of_ranks for row in turn):
                    assert row.dtype is torch.int64
                    digest.update(row.contiguous().numpy().tobytes())
        run.flush()
        state = run.state()
        digest.update(json.dumps(as_before(state)).encode())
        for share in run.batches:
            share.close()
    for file in sorted(ledger_folder.glob("lane-*")):
        # Bad rows are named with the folder that they are in.
        digest.update(file.name.encode() + file.read_bytes().replace(str(rows_folder).encode(), b""))
    return digest.hexdigest()


@pytest.mark.parametrize("case", CASES)
def test_nothing_has_changed(case, folder, tmp_path):
    expected, sources, settings = CASES[case]
    defaults = {"lanes": 12, "sequence_length": 32, "eval_fraction": 0.0, "workers": 0}
    defaults["on_bad_rows"] = BadRows.quarantine
    config = DataConfig(sources=SOURCES[sources](folder), cache_dir=str(tmp_path / "cache"), **(defaults | settings))
    assert digest_of(config, tmp_path / "ledger", folder) == expected
