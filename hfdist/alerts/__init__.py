"""What goes wrong in a run, in words and early, from the lines of its files. Loads no torch."""

from hfdist.alerts.alert import Alert, Kind
from hfdist.alerts.monitor import Monitor, find_alerts

__all__ = ["Alert", "Kind", "Monitor", "find_alerts"]
