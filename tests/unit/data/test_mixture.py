"""Whose turn it is: exact shares in every window, for every lane, from any sample on."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfdist.data.order.mixture import Mixture, stride_schedule

weights = st.lists(st.floats(0.01, 10), min_size=1, max_size=6)


@given(weights=weights, start=st.integers(0, 10**7), length=st.integers(1, 3000))
@settings(max_examples=150, deadline=None)
def test_the_schedule_is_the_same_from_everywhere_and_exact_in_every_window(weights, start, length):
    turns = stride_schedule(weights, start, start + length)
    middle = length // 2
    assert np.array_equal(turns[middle:], stride_schedule(weights, start + middle, start + length))
    shares = np.array(weights) / sum(weights)
    taken = np.vstack([np.zeros(len(weights)), np.cumsum(np.eye(len(weights))[turns], axis=0)])
    error = taken - np.arange(length + 1)[:, None] * shares
    # Of any window inside: the difference of two such errors. Two sequences for two sources.
    assert (error.max(axis=0) - error.min(axis=0) <= 1 + shares * len(shares) + 1e-6).all()


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.7, 0.2, 0.1), (1 / 3, 1 / 3, 1 / 3), (0.618, 0.382), (0.96, 0.04)])
@pytest.mark.parametrize("lanes", [1, 12, 48])
def test_whole_rounds_are_exact_and_every_lane_meets_every_source(shares, lanes):
    mixture = Mixture([(0, shares)], lanes=lanes)
    available = tuple(range(len(shares)))
    rounds = 500
    picks = np.array([mixture.pick(sample, available) for sample in range(rounds * lanes)])
    taken = np.eye(len(shares))[picks].reshape(rounds, lanes, -1)
    error = np.cumsum(taken.sum(axis=1), axis=0) - np.arange(1, rounds + 1)[:, None] * lanes * np.array(shares)
    assert np.abs(error).max() < 2
    by_lane = taken.sum(axis=0) / rounds
    # Rotations are drawn, so that no weight goes along with them.
    assert np.abs(by_lane - np.array(shares)).max() < 0.08


def test_weights_change_at_their_sample_and_zero_pauses():
    mixture = Mixture([(0, (1.0, 1.0)), (120, (1.0, 0.0)), (240, (0.0, 3.0))], lanes=12)
    picks = [mixture.pick(sample, (0, 1)) for sample in range(360)]
    assert sum(picks[:120]) == 60
    assert picks[120:] == [0] * 120 + [1] * 120


def test_paused_sources_are_drawn_from_only_where_nothing_else_is_left():
    mixture = Mixture([(0, (1.0, 1.0, 1.0)), (12, (1.0, 0.0, 0.0))], lanes=12)
    assert {mixture.pick(sample, (0, 1, 2)) for sample in range(12, 240)} == {0}
    assert collections.Counter(mixture.pick(sample, (1, 2)) for sample in range(12, 252)) == {1: 120, 2: 120}
    assert mixture.pick(130, (1,)) == 1


def test_the_share_of_a_finished_source_goes_to_the_others_in_proportion():
    mixture = Mixture([(0, (0.5, 0.3, 0.2))], lanes=1)
    picks = [mixture.pick(sample, (1, 2)) for sample in range(1000)]
    assert picks.count(1) == pytest.approx(600, abs=2)
    assert set(picks) == {1, 2}
    assert mixture.pick(0, ()) is None
