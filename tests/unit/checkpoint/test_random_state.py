"""Random generators go on where they stood."""

import random

import numpy as np
import pytest
import torch

from hfdist.checkpoint import restore_random_state
from hfdist.checkpoint.random_state import random_file
from hfdist.errors import CheckpointError
from tests.unit.checkpoint.pieces import edit_manifest, save


def draw():
    return torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.gauss(0, 1), random.random()


def test_all_three_generators_go_on(tmp_path):
    # An odd number of normal draws: both libraries then hold a second one back.
    np.random.normal()
    random.gauss(0, 1)
    path = save(tmp_path, 1)
    expected = draw()
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)
    assert draw() != expected
    assert restore_random_state(path)
    assert draw() == expected


def test_another_number_of_processes_starts_afresh(tmp_path):
    path = save(tmp_path, 1)
    edit_manifest(path, lambda content: content["files"].update({random_file(1): content["files"].pop(random_file(0))}))
    before = torch.get_rng_state()
    assert not restore_random_state(path)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_damaged_file_is_refused(tmp_path):
    path = save(tmp_path, 1)
    (path / random_file(0)).write_bytes(b"12345678 nonsense")
    with pytest.raises(CheckpointError, match="random state"):
        restore_random_state(path)
