"""What goes wrong in a run, in words and early, from the lines that it writes. Loads no torch."""

from hfdist.alerts.alert import Alert, AlertKind
from hfdist.alerts.monitor import Monitor

__all__ = ["Alert", "AlertKind", "Monitor"]
