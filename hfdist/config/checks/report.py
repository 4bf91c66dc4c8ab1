"""Checks `report.*`."""

from __future__ import annotations

import os
import shlex
import shutil

from hfdist.config.checks.conflict import conflict
from hfdist.config.run import RunConfig
from hfdist.errors import ConfigError


def check_report(config: RunConfig) -> None:
    """Raise a ConfigError on a command for alerts that cannot be called."""
    command = config.report.alert_command
    if command is None:
        return
    where = "report.alert_command"
    if not config.report.alerts:
        what, hint = "no alert is looked for, so a command for alerts has no meaning", "report.alerts=true"
        raise conflict(config, f"{where} report.alerts", what, hint=hint)
    try:
        words = shlex.split(command)
    except ValueError as error:
        what = f"the command cannot be split into words: {error}"
        raise ConfigError(what, where=where, found=command, allowed="words, quoted as in a shell") from error
    if not words or shutil.which(os.path.expanduser(words[0])) is None:
        what, hint = "there is no such program", "chmod +x FILE, if it is a script of yours"
        raise ConfigError(what, where=where, found=words[0] if words else command, allowed="a program", hint=hint)
