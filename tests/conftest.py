"""One thread a process, no Hub, and a cache that lives as long as the test session."""

import gc
import os

# Before torch is imported anywhere: its thread pool is sized at import.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_finish():
    """Modules and tests stay until the end: no collection need look through those millions of objects again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """A cache shared by the tests of one session, never the user's."""
    folder = tmp_path_factory.mktemp("hfdist-cache")
    os.environ["HFDIST_CACHE"] = str(folder)
    return folder
