"""Alerts: what goes wrong in a run is found early, in the lines that it writes, and said in words. Loads no torch."""

from hfdist.tools.alerts.alert import Alert, AlertKind
from hfdist.tools.alerts.monitor import Monitor

__all__ = ["Alert", "AlertKind", "Monitor"]
