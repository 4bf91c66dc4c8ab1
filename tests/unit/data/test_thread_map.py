"""Files are opened several at a time, in order."""

import time

import pytest

from hfdist.data.storage.files import thread_map


@pytest.mark.parametrize("count", [0, 1, 127, 1000])
def test_the_order_is_that_of_the_items(count):
    doubled = thread_map(lambda a, b: a + b, range(count), range(count))
    assert list(doubled) == [2 * number for number in range(count)]


@pytest.mark.parametrize("bad", [0, 500, 999])
def test_what_is_raised_comes_behind_all_that_went_well(bad):
    def refuse(number):
        if number >= bad:
            raise ValueError(number)
        return number

    seen = []
    with pytest.raises(ValueError, match=f"^{bad}$"):
        for number in thread_map(refuse, range(1000)):
            seen.append(number)  # each as it comes
    assert seen == list(range(bad))


def test_an_error_does_not_wait_for_what_nobody_takes_any_more():
    called = []

    def fail_at_once(number):
        called.append(number)
        if number == 0:
            raise ValueError("no such file")
        time.sleep(0.001)

    with pytest.raises(ValueError, match="no such file"):
        list(thread_map(fail_at_once, range(5000)))

    assert len(called) < 1000
