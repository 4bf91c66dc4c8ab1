"""Cases that `make test` leaves out: others beside them see the same faults sooner. `make matrices` runs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest


def many(*values: object, id: str | None = None):
    """A case of a parametrized test, of those left out."""
    return pytest.param(*values, marks=pytest.mark.many, id=id)


def always(names: Iterable[str], cases: Mapping[str, object]):
    """All cases by their names; those of other names are left out."""
    unknown = set(names := list(names)) - set(cases)
    assert not unknown, unknown
    return [pytest.param(case, marks=[pytest.mark.many] * (name not in names), id=name) for name, case in cases.items()]


def chosen(request: pytest.FixtureRequest, argument: str) -> set[object]:
    """Values that a parametrized argument takes in the tests of this file that are run: a fixture makes no others."""
    own = (item for item in request.session.items if item.path == request.path)
    calls = (call for item in own if (call := getattr(item, "callspec", None)))
    return {call.params[argument] for call in calls if argument in call.params}
