"""Private names of other packages: all that hfdist uses stand in one table, and in the packages."""

from tests.seams import ONLY_IN_SOME_BUILDS, SEAMS, find_missing, find_uses


def test_each_private_name_of_others_stands_in_the_table():
    uses = find_uses()
    assert uses, "the walk finds what it looks for"
    missing = {name: sorted(files) for name, files in uses.items() if name not in SEAMS}
    assert not missing, "a line in tests/seams.py for each, with its owner"
    assert not SEAMS.keys() - uses.keys(), "lines that nothing needs"


def test_each_name_of_the_table_is_where_the_table_has_it():
    assert not [problem for name in SEAMS.keys() - ONLY_IN_SOME_BUILDS if (problem := find_missing(name))]
