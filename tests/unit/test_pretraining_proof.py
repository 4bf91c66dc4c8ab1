"""The runs of `make pretraining`: both sides read the same, classifiers by words learn, and the page counts rightly."""

import json

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.config.composition.config_text import to_values
from proofs.pretraining import BAG, MAJORITY, NEIGHBOURS, PRETRAINED, RANDOM, Outcome, by_words, classifying, describe
from proofs.reinforcement import Cost


def test_the_sides_differ_in_their_first_weights_alone():
    ours, theirs = (to_values(compose_config(classifying(side, 1), name="tune")) for side in (PRETRAINED, RANDOM))
    different = [group for group, values in ours.items() if values != theirs[group]]
    assert different == ["run", "model"]
    # The folder of a pretrained encoder has its tokenizer.
    expected = {"name", "init", "allow_missing", "tokenizer"}
    assert {key for key, value in ours["model"].items() if value != theirs["model"][key]} == expected


def test_classifiers_by_words_know_what_stands_beside_a_word_and_what_its_row_has(tmp_path):
    def row(words, tags):
        return json.dumps({"tokens": words, "tags": tags})

    # After "a" a word is written; its row has the same words where it is replaced.
    written, replaced = row(["a", "x", "c"], [None, "written", None]), row(["c", "x", "a"], [None, "replaced", None])
    for name in ("labelled", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join([written, replaced, replaced, written, written]))
    assert by_words(tmp_path) == pytest.approx({MAJORITY: 0.6, BAG: 0.6, NEIGHBOURS: 1.0})
    (tmp_path / "held_out.jsonl").write_text(row(["new", "x", "new"], [None, "written", None]))
    assert by_words(tmp_path)[MAJORITY] == 1


def test_the_page_counts_the_seeds_with_which_pretraining_helps():
    def outcome(seed, pretrained, plain):
        curves = {PRETRAINED: {0: 0.5, 60: pretrained}, RANDOM: {0: 0.5, 60: plain}}
        return Outcome(seed, curves, {PRETRAINED: Cost(9.0, 20.0), RANDOM: Cost(9.0, 40.0)})

    others = {MAJORITY: 0.5, BAG: 0.51, NEIGHBOURS: 0.52}
    outcomes = [outcome(1, 0.8, 0.6), outcome(2, 0.6, 0.625)]
    page = describe({0: 7.0, 1000: 3.0}, Cost(9.0, 100.0), outcomes, others, (1234, 2345))
    assert "With 1 of 2 seeds the pretrained one is better" in page
    assert "| 1 | 80.0% | 60.0% | +20.0 |" in page
    assert "| 2 | 60.0% | 62.5% | -2.5 |" in page
    assert "from 7.00 to 3.00 nats in 100 CPU seconds" in page
    assert f"| {BAG} | 51.0% |" in page
    assert "A run takes 30 CPU seconds" in page
