"""Arrays that are kept on the machine."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hfdist.data import cache


def test_headers_are_parsed_by_one_thread_at_a_time(tmp_path, monkeypatch):
    """Two at a time raise SystemError in Python 3.11 and 3.12, about once in a million."""
    np.save(tmp_path / "a.npy", np.arange(3))
    load, inside, most = np.load, threading.Semaphore(0), []

    def watched(*arguments, **named):
        inside.release()
        most.append(inside._value)
        time.sleep(0.01)
        inside.acquire()
        return load(*arguments, **named)

    monkeypatch.setattr(cache.np, "load", watched)
    with ThreadPoolExecutor(8) as pool:
        arrays = list(pool.map(lambda _: cache.load_array(tmp_path / "a.npy"), range(16)))
    assert all(array.tolist() == [0, 1, 2] for array in arrays)
    assert max(most) == 1
