"""What goes wrong in a run, in words and early, from the lines that it writes. Loads no torch."""

from hfdist.tools.alerts.alert import Alert, AlertKind
from hfdist.tools.alerts.monitor import Monitor

__all__ = ["Alert", "AlertKind", "Monitor"]
