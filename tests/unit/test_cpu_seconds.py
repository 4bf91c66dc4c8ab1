"""A run of all tests fails once it needs a tenth more CPU seconds than the last one that has landed."""

from types import SimpleNamespace

import pytest

from tests.cpu_seconds import pytest_collection_modifyitems, read_record, too_much


def of(total, yardstick=0.01):
    return {"total": total, "yardstick": yardstick, "folders": {}, "files": {}}


@pytest.mark.parametrize(
    ("found", "is_too_much"),
    [
        (of(1000), False),
        (of(1099), False),
        (of(1101), True),
        # On a machine that was busier than then, all of it takes longer; on one that was less so, nothing is added.
        (of(1500, 0.015), False),
        (of(1700, 0.015), True),
        (of(1050, 0.005), False),
        (of(1101, None), True),
    ],
)
def test_a_tenth_more_is_too_much(found, is_too_much):
    assert bool(too_much(found, of(1000))) is is_too_much


def test_the_record_is_of_folders_that_add_up():
    record = read_record()
    assert sum(record["folders"].values()) == pytest.approx(record["total"], rel=0.01)
    assert {*record["folders"]} >= {"tests/distributed", "tests/e2e", "tests/unit", "tests/zoo"}


def test_workers_begin_with_what_may_be_long():
    """Of a folder first a file that the record does not have, then the dearest."""
    dearest, *_, cheapest = sorted(
        (seconds, path) for path, seconds in read_record()["files"].items() if path.startswith("tests/e2e")
    )[::-1]
    files = ["tests/unit/test_new.py", cheapest[1], dearest[1], "tests/e2e/test_new.py"]
    items = [SimpleNamespace(nodeid=f"{path}::test") for path in files]
    pytest_collection_modifyitems(SimpleNamespace(workerinput={}), items)
    assert [item.nodeid.partition("::")[0] for item in items] == files[::-1]
