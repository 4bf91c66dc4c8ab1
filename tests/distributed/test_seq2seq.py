"""Encoder-decoders: transformers' Seq2SeqTrainer on the same rows; and the same in every layout."""

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hfdist.records import RunFolder, read_lines
from hfdist.testing import run_ranks
from tests.distributed.pair_runs import (
    SAVES,
    SHAPES,
    as_of_step_2,
    check_alike,
    difference,
    read_pairs,
    train_plainly,
    write_model,
    write_pairs,
)
from tests.distributed.preference_runs import GLOBAL_BATCH, STEPS, make_config, tune
from tests.distributed.runs import losses, weights
from tests.marks import many

pytestmark = pytest.mark.distributed

WRITES = (
    "task=seq2seq",
    'evaluate.prompts=["the cat sees"]',
    "evaluate.metrics=[word_f1]",
    "evaluate.max_new_tokens=6",
    "evaluate.num_generations=5",
    *SAVES,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {kind: write_model(folder / kind, kind) for kind in SHAPES}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def single(tmp_path_factory, models, rows, cache_dir):
    folder, known = tmp_path_factory.mktemp("single"), {}

    def of(kind):
        if kind not in known:
            known[kind] = tune(folder / kind, models[kind], rows, 1, *WRITES)
        return known[kind]

    return of


def written(folder):
    """What evaluations have written, and how good it is."""
    scores = [line["eval_word_f1"] for line in read_lines(RunFolder(folder).metrics) if "eval_word_f1" in line]
    return [line["text"] for line in read_lines(RunFolder(folder).samples)], scores


def check_equal(run, reference):
    check_alike(run, reference)
    assert written(run) == written(reference)


@pytest.mark.parametrize(
    ("kind", "layout", "num_ranks"),
    [
        # A run goes on in fsdp2, below, and test_sampling.py writes in zero3.
        many("bart", "zero3 train.micro_batch_size=1", 2),
        many("t5", "zero3 train.micro_batch_size=1", 2),
        many("t5", "single train.micro_batch_size=1", 1),
        many("t5", "ddp", 2),
        many("bart", "zero1", 2),
        many("marian", "zero2 train.micro_batch_size=1", 2),
        many("mt5", "zero3", 2),
        many("t5", "fsdp2 train.micro_batch_size=1", 4),
        many("mbart", "ddp train.micro_batch_size=1", 4),
        many("marian", "fsdp2", 2),
        many("t5", "zero3 train.gradient_checkpointing=true", 2),
    ],
)
def test_a_layout_changes_nothing(single, tmp_path, models, rows, kind, layout, num_ranks):
    run = tune(tmp_path, models[kind], rows, num_ranks, *WRITES, *f"strategy={layout}".split())
    check_equal(run, single(kind))
    assert len(set(losses(run))) == len(losses(run)) > 3


def test_a_run_goes_on_in_another_layout(single, tmp_path, models, rows):
    run = tune(as_of_step_2(single("bart"), tmp_path), models["bart"], rows, 2, *WRITES, "strategy=fsdp2")
    check_equal(run, single("bart"))


@pytest.mark.parametrize("kind", ["bart", many("t5"), many("mbart"), many("marian"), many("mt5")])
def test_losses_and_weights_are_those_of_transformers(single, tmp_path, models, rows, kind):
    config = make_config(tmp_path / "read", models[kind], rows, *WRITES)
    [pairs] = run_ranks(read_pairs, 1, config, group=False)
    assert len(pairs) == STEPS * GLOBAL_BATCH
    run = single(kind)
    wanted, state = train_plainly(tmp_path / "plain", models[kind], pairs)
    assert losses(run) == pytest.approx(wanted, rel=1e-5)
    found = weights(run)
    assert difference(found, {name: state[name] for name in found}) < 1e-5
    check_folder(run, state)


def check_folder(run, state):
    """The folder opens as users open it, and its model writes what the last evaluation has written."""
    model, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(run / "model"),
        AutoTokenizer.from_pretrained(run / "model"),
    )
    assert model.state_dict().keys() == state.keys()
    texts, _ = written(run)
    # After the start token; of some types the last one is always an end.
    ids = model.generate(**tokenizer("the cat sees", return_tensors="pt"), max_new_tokens=7, num_beams=1)[0, 1:7]
    assert tokenizer.decode(ids, skip_special_tokens=True) == texts[-1]
