"""A type of each head: its loss is hfdist's, ranks that shard it train it, and its folder opens; others are refused."""

import dataclasses
import json

import pytest

from hfdist.config.task import Head
from proofs.zoo_tasks import TITLES, find_all, page
from tests.zoo.conftest import is_of_all
from tests.zoo.tasks import Tried, try_apart, types_of

pytestmark = [pytest.mark.zoo, pytest.mark.distributed]

SAMPLE = {
    Head.masked: {"bert": "exact"},
    Head.labels: {"fnet": "refused"},
    Head.targets: {"t5": "exact", "prophetnet": "refused"},
}


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("head", SAMPLE, ids=lambda head: head.value)
def test_a_type_is_exact_or_not_taken(head, request):
    expected = SAMPLE[head]
    types = types_of(head) if is_of_all(request.config) else list(expected)
    found = {model_type: try_apart(model_type, head) for model_type in types}
    assert {kind: found[kind].verdict for kind in expected} == expected
    assert not [kind for kind, tried in found.items() if tried.verdict == "wrong"]


def test_what_differs_is_wrong():
    exact = Tried(sharded="exact", saved="same")
    assert exact.verdict == "exact"
    for wrong in ({"loss_difference": 1e-3}, {"gradient_difference": float("nan")}, {"sharded": "wrong"},
                  {"saved": "wrong"}, {"failed": "ValueError"}):  # fmt: skip
        assert dataclasses.replace(exact, **wrong).verdict == "wrong"


def test_a_stopped_run_goes_on_with_what_it_kept(tmp_path):
    kept, tried = tmp_path / "kept.jsonl", Tried(sharded="exact", saved="same", gradient_difference=1e-7)
    lines = [
        {"head": head.value, "type": kind} | dataclasses.asdict(tried) for head in TITLES for kind in types_of(head)
    ]
    kept.write_text("\n".join(map(json.dumps, lines)))
    assert find_all(kept) == {head: dict.fromkeys(types_of(head), tried) for head in TITLES}


def test_the_page_has_each_type_and_reason():
    found = {head: {} for head in TITLES}
    found[Head.masked] = {"bert": Tried(sharded="exact", saved="same"), "fnet": Tried(refused="it reads padding")}
    found[Head.targets] = {"fsmt": Tried(missing="no small model"), "t5": Tried(failed="ValueError: of ours")}
    text = page(found)
    assert "| `bert` | exact | 0 | 0 | exact | 0 | same |" in text
    assert "* refused: `fnet`: it reads padding" in text
    assert "* not yet: `fsmt`: no small model" in text
    assert "* wrong: `t5`: ValueError: of ours" in text
