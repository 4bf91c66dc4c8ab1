"""Callbacks of a run: metrics, trackers, bar, timeline, times of ranks, alerts, plan and record."""
