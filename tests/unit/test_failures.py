"""What an error of a library is told to be about, and how long the next try waits."""

import errno

import pytest

from hfdist.failures import causes, is_full_disk, is_network, seconds_before_retry


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EFBIG"])
def test_a_disk_is_full_in_three_ways(name):
    assert is_full_disk(OSError(getattr(errno, name), ""))
    assert not is_full_disk(OSError(errno.EACCES, ""))
    assert not is_full_disk(ValueError(name))


def test_an_error_of_the_network_is_known_by_its_class_its_number_or_its_name():
    of_library = type("ConnectError", (type("TransportError", (Exception,), {}),), {})
    for error in (ConnectionResetError(), TimeoutError(), OSError(errno.ENETUNREACH, ""), of_library()):
        assert is_network(error)
    for error in (FileNotFoundError(), EOFError(), OSError(errno.EACCES, ""), ValueError()):
        assert not is_network(error)


def test_the_first_cause_comes_first():
    first, second, third = (ValueError(text) for text in "123")
    second.__context__, third.__cause__ = first, second
    assert causes(third) == [first, second, third]
    second.__suppress_context__ = True
    assert causes(third) == [second, third]
    # Of a circle each is named once.
    second.__cause__ = third
    assert causes(third) == [second, third]


def test_waits_double():
    for attempt, wait_seconds in enumerate((1.0, 2.0, 4.0), 1):
        assert 0.5 * wait_seconds <= seconds_before_retry(attempt, 1.0) <= 1.5 * wait_seconds
