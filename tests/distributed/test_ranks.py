"""Forked ranks do not rely on what did not come along."""

import pytest
from torch._inductor.async_compile import AsyncCompile

from hfdist.testing import RankFailed, run_ranks

pytestmark = pytest.mark.distributed


def compile_in_a_thread():
    return AsyncCompile.pool().submit(lambda: 7).result(timeout=20)


def test_an_answer_that_cannot_be_sent_is_said():
    with pytest.raises(RankFailed, match=r"(?s)rank 0 raised.*pickle"):
        run_ranks(lambda: lambda: 0, 1, group=False)


def test_threads_that_compile_are_made_anew():
    assert compile_in_a_thread() == 7
    assert run_ranks(compile_in_a_thread, 2) == [7, 7]
