"""What each axis of the mesh sends in a step, and what a rank holds: no more than the formulas say."""

import pytest

from benchmarks.mesh import costs
from hfdist.strategies.tensor import linear
from tests.marks import chosen, many

pytestmark = pytest.mark.distributed

BOUND = 0.02


# Of the others, what is sent is in test_traffic.py and test_plan_traffic.py.
ALWAYS = ("tensor, own plan", "expert")


@pytest.fixture(scope="module")
def measured(request):
    """Of the cases that are asked for."""
    asked = chosen(request, "name")
    return costs.measure([name for name in costs.CASES if name in asked])


@pytest.mark.parametrize("name", [name if name in ALWAYS else many(name) for name in costs.CASES])
def test_a_rank_sends_and_holds_what_the_formulas_say(measured, name):
    of_case = measured[name]
    expected = of_case.expected_sent
    assert {key: of_case.sent[key] for key in expected} == pytest.approx(dict(expected), rel=BOUND)
    assert of_case.sent["other", "all"] < BOUND * expected.total()
    assert of_case.held == pytest.approx(of_case.expected_held, rel=BOUND)
    # gloo's reduce-scatter sends what an all-reduce does.
    more = sum(num_bytes for (_, kind), num_bytes in expected.items() if kind == "reduce-scatter")
    assert of_case.socket_bytes == pytest.approx(expected.total() + more, rel=0.05)


def test_a_gradient_that_each_layer_sums_shows(monkeypatch):
    monkeypatch.setattr(
        linear.SharedInputs, "__call__", lambda inputs, value: linear._SumGradient.apply(value, inputs._group)
    )
    [name] = [name for name in costs.CASES if "own plan" in name]
    assert costs.measure([name])[name].ratio > 1.3
