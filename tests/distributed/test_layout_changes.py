"""Some of the changes of layout at a checkpoint, of which `make layouts` makes all."""

import pytest

from tests.distributed.layout_changes import (
    BOUND,
    CONTROLS,
    LAYOUTS,
    LEAST_OF_CONTROLS,
    SINGLE,
    change_checkpoint,
    check_clipped,
    course_of,
    go_on,
    middle,
    run_through,
)

pytestmark = pytest.mark.distributed

PAIRS = [
    # Each layout once as the first and once as the second.
    ("single", "zero3 x4"),
    ("ddp x2", "pp4 interleaved"),
    ("zero1 x2", "pp2 x zero1 x2"),
    ("zero2 x2", "zero3 x2"),
    ("zero3 x2", "pp2"),
    ("zero3 x4", "zero2 x2"),
    ("pp2", "zero1 x2"),
    ("pp2 x zero1 x2", "ddp x2"),
    ("pp4 interleaved", "single"),
]


@pytest.fixture(scope="module")
def through(tmp_path_factory, cache_dir):
    """Runs that nothing interrupts, made when first asked for."""
    made = {}

    def run(name):
        if name not in made:
            made[name] = run_through(tmp_path_factory.mktemp("through"), name)
            check_clipped(made[name])
        return made[name]

    return run


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_other_layout_goes_on_as_one_process_would(through, tmp_path, source, target):
    run = go_on(tmp_path, target, middle(through(source)))
    assert course_of(run).difference(course_of(through(SINGLE)).second_half()) < BOUND


def test_all_layouts_are_among_them():
    assert {source for source, _ in PAIRS} == {target for _, target in PAIRS} == set(LAYOUTS)


@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_left_out_shows(through, tmp_path, name):
    changed = change_checkpoint(middle(through(SINGLE)), tmp_path / "changed", CONTROLS[name])
    run = go_on(tmp_path / "run", SINGLE, changed)
    assert course_of(run).difference(course_of(through(SINGLE)).second_half()) > LEAST_OF_CONTROLS
