"""Types of image and text: their small models train on images as plain transformers does; others are not taken."""

import dataclasses
import json
from functools import partial

import pytest
from transformers import AutoModelForImageTextToText

from hfdist.config.task import Head
from hfdist.errors import ConfigError
from hfdist.models.cache_check import find_cache_problem
from hfdist.testing import RankFailed
from hfdist.trainer.generation.row_images import make_cache_trial
from proofs.zoo_images import find_all, page
from tests.zoo.conftest import is_of_all
from tests.zoo.image_models import make_model_and_processor, save
from tests.zoo.images import LAYOUTS, TriedImages, _verdict_of, tokens_of, try_images
from tests.zoo.tasks import types_of

pytestmark = [pytest.mark.zoo, pytest.mark.distributed]

SAMPLE = {"ovis2": "exact", "blip": "refused", "llama4": "refused"}
"""One that no other test trains: LLaVA and Qwen-VL have tests of their own."""
EXACT = TriedImages(layouts=dict.fromkeys(LAYOUTS, "exact"), packs=True)


@pytest.mark.timeout(7200)
def test_a_type_is_exact_or_not_taken(request):
    # Of the sample one layout: other tests train families of models in all of them.
    types, layouts = (types_of(Head.tokens), LAYOUTS) if is_of_all(request.config) else (list(SAMPLE), ["zero3"])
    found = {model_type: try_images(model_type, layouts) for model_type in types}
    assert {kind: found[kind].verdict for kind in SAMPLE} == SAMPLE
    assert not [kind for kind, tried in found.items() if tried.verdict == "wrong"]


@pytest.mark.parametrize("kind", ["exaone4_5", "glm4v"])
def test_a_cache_is_exact_with_images(kind, tmp_path):
    # The first takes positions away where it generates, and would count what pads a row; the second has three kinds.
    folder = save(*make_model_and_processor(kind), tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert find_cache_problem(model, make_trial=partial(make_cache_trial, tokens_of(folder))) is None


def test_what_differs_is_wrong():
    assert EXACT.verdict == "exact"
    for wrong in ({"loss_difference": 1e-3}, {"gradient_difference": float("nan")}, {"failed": "ValueError"},
                  {"layouts": {"ddp": "wrong: lm_head.weight"}}):  # fmt: skip
        assert dataclasses.replace(EXACT, **wrong).verdict == "wrong"
    assert dataclasses.replace(EXACT, layouts={"pipeline": "refused: why"}).verdict == "exact"


@pytest.mark.parametrize(
    ("where", "verdict"), [("strategy.pipeline", "refused: "), ("model.name", "not yet: "), ("train.dtype", "wrong: ")]
)
def test_only_what_names_a_layout_is_its_refusal(where, verdict):
    error = RankFailed("rank 0 raised")
    error.__cause__ = ConfigError("why", where=where, found="what")
    assert _verdict_of(error).startswith(f"{verdict}why")


def test_a_stopped_run_goes_on_with_what_it_kept(tmp_path):
    kept = tmp_path / "kept.jsonl"
    kept.write_text("\n".join(json.dumps({"type": kind} | dataclasses.asdict(EXACT)) for kind in types_of(Head.tokens)))
    assert find_all(kept) == dict.fromkeys(types_of(Head.tokens), EXACT)


def test_the_page_has_each_type_and_reason():
    split = dataclasses.replace(EXACT, layouts={"ddp": "exact", "pipeline": "refused: it cannot be split"})
    found = {"llava": split, "blip": TriedImages(refused="no token"), "pi0": TriedImages(missing="no processor")}
    text = page(found)
    assert "| `llava` | exact | 0e+00 | 0e+00 | yes | exact | not tried | not tried | refused |" in text
    assert "* refused in pipeline: `llava`: it cannot be split" in text
    assert "* refused: `blip`: no token" in text
    assert "* not yet: `pi0`: no processor" in text
