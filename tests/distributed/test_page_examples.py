"""The examples of pages that make their own model, in small: their programs, then two steps of their experiments."""

import json

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoModelForTokenClassification

from hfdist.config.composition.compose import compose_config
from hfdist.records import RunFolder, read_lines
from hfdist.testing import run_ranks
from proofs.captions import read_held_out, share_right, write_captions
from proofs.follow_readme import ROOT, shown_programs
from proofs.pretraining import SIDES
from proofs.search import Found, search_embeddings
from proofs.search import words as words_of
from recipes import finetune, tune

pytestmark = pytest.mark.distributed

SHORT = ("train.max_steps=2", "train.eval_every=2", "train.global_batch_size=8", "train.micro_batch_size=4",
         "optimizer.warmup_steps=1", "data.eval_sequences=8", "data.workers=0", "report=quiet")  # fmt: skip


def run_program(page, name, **numbers):
    """Run the program of a page, with other numbers; give what it has named."""
    program = shown_programs(ROOT / "docs" / page)[name]
    for old, new in numbers.items():
        assert program.count(old[1:]) == 1
        program = program.replace(old[1:], new)
    # What it imports is here already.
    names = {}
    exec(compile(program, name, "exec"), names)
    return names


def train(main, experiment, primary, *words):
    config = compose_config([f"+experiment={experiment}", *SHORT, *words], name=primary)
    run_ranks(main.main.__wrapped__, 2, config)
    return config.run


def test_a_small_model_of_image_and_text_is_made_and_trains(tmp_path, cache_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_program("image-text.md", "shapes.py", _4000="32", _200="8")
    train(finetune, "shapes_captions", "finetune")
    images, questions, expected = read_held_out(tmp_path / "shapes")
    model = tmp_path / "runs" / "shapes_captions" / "model"
    assert AutoModelForImageTextToText.from_pretrained(model).config.model_type == "llava"
    written = write_captions(model, images, questions)
    assert len(written) == len(expected) == 8
    assert share_right(expected, expected) == 1
    assert share_right(["a red circle, top left"], ["a red cross, top left"]) == 0
    assert share_right(["a red circle, top left"], ["a red cross, top right"], part=2) == 1
    assert not {path.read_bytes() for path in images} & {
        path.read_bytes() for path in (tmp_path / "shapes" / "train").iterdir()
    }


@pytest.mark.many
def test_a_classifier_begins_with_the_pretrained_encoder(tmp_path, cache_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    smaller = {"_NUM_HELD_OUT = 200, 400": "NUM_HELD_OUT = 16, 8", '_root.rglob("*.py")': 'root.glob("[a-e]*.py")'}
    names = run_program("encoders-and-decoders.md", "replaced.py", _1024="400", **smaller)
    train(tune, "stdlib_mlm", "tune")
    for number, words in enumerate(SIDES.values()):
        train(tune, "stdlib_replaced", "tune", *words, f"run.dir=side-{number}")
        lines = read_lines(RunFolder(tmp_path / f"side-{number}").metrics)
        assert [line["step"] for line in lines if "eval_accuracy" in line] == [0, 2]
    found = [AutoModelForTokenClassification.from_pretrained(tmp_path / f"side-{n}" / "model") for n in range(2)]
    assert [{*one.config.id2label.values()} for one in found] == [{"replaced", "written"}] * 2
    rows = [json.loads(line) for line in (tmp_path / "replaced" / "held_out.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    for row in rows:
        kept = {index: word for index, word in enumerate(row["tokens"]) if row["tags"][index] != "replaced"}
        long = len(row["tokens"])
        fits = [
            [words for words in names[some] if len(words) == long and all(words[at] == kept[at] for at in kept)]
            for some in ("seen", "unseen")
        ]
        # It is of the held-out files, and no text that the encoder is pretrained on.
        assert [len(some) for some in fits] == [0, 1]


@pytest.mark.many
def test_an_encoder_learns_to_find_functions_that_it_has_not_seen(tmp_path, cache_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    packages = 'files += functions(Path(sysconfig.get_path("purelib")))'
    run_program(
        "embeddings.md", "library.py", **{"_16384": "400", "_HELD_OUT = 8": "HELD_OUT = 80", f"_{packages}": ""}
    )
    train(tune, "docstrings_search", "tune")
    rows = [json.loads(line) for line in (tmp_path / "library" / "held_out.jsonl").read_text().splitlines()]
    queries, functions = ([row[column] for row in rows] for column in ("query", "positive"))
    run = tmp_path / "runs" / "docstrings_search"
    [said] = [line for line in read_lines(RunFolder(run).metrics) if line["step"] == 2 and "eval_mrr" in line]
    # The run holds out 8 sequences of rows, and the page all rows.
    found = search_embeddings(run / "model", queries, functions)
    assert 0 < found.recall_at_1 <= found.mrr < 1
    assert said["eval_recall_at_1"] <= said["eval_mrr"]
    trained = (tmp_path / "library" / "train.jsonl").read_text()
    assert not {*map(json.dumps, rows)} & {*trained.splitlines()}
    assert Found.of(torch.tensor([[2.0, 1.0], [1.0, 0.0]]))[:3] == (0.5, 1.0, 0.75)
    assert words_of("readLine of_x2") == ["read", "line", "of", "x", "2"]
