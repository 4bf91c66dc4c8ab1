"""Random generators go on where they stood."""

import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

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


def words(size, value=0):
    return torch.full((size,), value, dtype=torch.int64)


@pytest.mark.parametrize(
    "change",
    [
        {"torch": torch.zeros(3, dtype=torch.uint8)},
        {"torch": torch.zeros(5056)},
        {"torch": torch.zeros(5056, dtype=torch.uint8)},
        {"numpy": words(3)},
        {"python": words(3)},
        {"python": words(625, -1)},
        {"python": words(625, 2**40)},
        # numpy would read beside its words.
        {"rest": {"numpy": [-5, 0, 0.0], "python": [3, None]}},
        {"rest": {"numpy": [10**8, 0, 0.0], "python": [3, None]}},
        {"rest": {"numpy": [10**400, 0, 0.0], "python": [3, None]}},
        {"rest": []},
        None,
    ],
)
def test_a_state_that_is_none_is_refused(tmp_path, change):
    path = save(tmp_path, 1)
    python = torch.tensor(random.getstate()[1], dtype=torch.int64)
    good = {"torch": torch.get_rng_state(), "numpy": words(624), "python": python}
    good["rest"] = {"numpy": [1, 0, 0.0], "python": [3, None]}

    def write(content):
        tensors = {name: value for name, value in content.items() if name != "rest"}
        save_file(tensors, path / random_file(0), {"rest": json.dumps(content["rest"])})

    write(good)
    assert restore_random_state(path)
    if change is None:
        (path / random_file(0)).write_bytes(b"12345678 nonsense")
    else:
        write(good | change)
    with pytest.raises(CheckpointError, match="random state"):
        restore_random_state(path)
