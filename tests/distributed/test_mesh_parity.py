"""One cell of the mesh's table, and that its comparison sees mistakes. `make mesh` fills in the whole table."""

import pytest

from proofs.mesh_controls import CONTROLS, is_seen, run_control
from proofs.mesh_runs import (
    MAX_GRAD_NORM,
    MIDDLE,
    SINGLE,
    checkpoint,
    read_course,
    run_layout,
)

# Families beside one process are in test_layouts.py and test_experts.py, and on more ranks in test_pipeline_mesh.py.
pytestmark = [pytest.mark.distributed, pytest.mark.many]

TRAINED = ("llama", "mixtral")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """One process has trained."""
    folder = tmp_path_factory.mktemp("grid")
    run_layout(folder, SINGLE, dict.fromkeys(TRAINED))
    for family in TRAINED:
        # Without clipping the weights would not show whether all ranks scale by the same norm.
        assert min(read_course(folder / SINGLE / family).norms.values()) > MAX_GRAD_NORM
    return folder


def test_families_train_and_go_on_in_a_layout_as_in_one_process(root):
    start = {family: checkpoint(root / SINGLE / family, MIDDLE) for family in TRAINED}
    for family, rows in run_layout(root, "fsdp2 x2", start).items():
        assert len(rows) == 6
        for row in rows:
            assert row.passed, (family, row)


# Those that no other test has: of masks, and of what has stayed gathered.
@pytest.mark.parametrize("number", [1, 2])
def test_a_mistake_shows(root, tmp_path, number):
    row = run_control(root, CONTROLS[number], tmp_path)
    assert is_seen(row), row
