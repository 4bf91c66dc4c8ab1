"""How many files and connections a process may have open: its own limit is raised, and named where it is too low.

Most systems allow 1,024 at first, and a rank has a connection to each other one in each of its groups.
"""

from __future__ import annotations

import errno
import resource
from contextlib import suppress

from hfdist.errors import ResourceError

TOO_MANY = (errno.EMFILE, errno.ENFILE)
_MOST = 1 << 20
"""There are programs that walk through all numbers that a file may have."""


def raise_limit() -> None:
    """Let this process, and those that it starts, open as many as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    # Where the system has a limit below the hard one, it refuses.
    with suppress(OSError, ValueError):
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def too_many_open(error: OSError) -> ResourceError:
    """Say which limit was reached; `error` is one of `TOO_MANY`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_own = error.errno == errno.EMFILE
    return ResourceError(
        f"{'this process' if is_own else 'the machine'} has as many files and connections open as it may",
        where=str(error.filename) if error.filename else None,
        found=f"RLIMIT_NOFILE {soft}, of at most {hard}" if is_own else "the limit in /proc/sys/fs/file-max",
        hint="nofile in /etc/security/limits.conf, LimitNOFILE of a service, --ulimit nofile of a container"
        if is_own
        else "sysctl fs.file-max, or fewer processes on this machine",
    )
