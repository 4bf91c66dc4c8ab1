"""Cases that `make test` leaves out: others beside them see the same faults sooner. `make matrices` runs them."""

from __future__ import annotations

import pytest


def many(*values: object):
    """A case of a parametrized test, of those left out."""
    return pytest.param(*values, marks=pytest.mark.many)
