"""An array that was made is mapped, as one that was found: the process that made it holds no copy of its own."""

import numpy as np
import pytest

from hfdist.data import cache


@pytest.mark.parametrize(("num_numbers", "is_mapped"), [(1 << 10, False), (1 << 18, True)])
def test_both_are_mapped_alike(tmp_path, num_numbers, is_mapped):
    made, found = (
        cache.cached_array(tmp_path / "a.npy", lambda: np.arange(num_numbers, dtype=np.int64)) for _ in range(2)
    )
    assert [isinstance(one, np.memmap) for one in (made, found)] == [is_mapped, is_mapped]
    assert made.tolist() == found.tolist() == [*range(num_numbers)]
