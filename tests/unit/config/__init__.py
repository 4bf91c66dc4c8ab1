"""Tests of composing, checking and explaining configs."""
