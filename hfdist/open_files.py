"""How many files and connections a process may have open: its own limit is raised, and named where it is too low.

Most systems allow 1,024 at first. A rank on a CPU has a connection to each other one, as gloo makes them.
"""

from __future__ import annotations

import errno
import resource
from contextlib import suppress

from hfdist.errors import ResourceError

TOO_MANY = (errno.EMFILE, errno.ENFILE)
_MOST = 1 << 20
"""There are programs that walk through all numbers that a file may have."""
_HINT = "nofile in /etc/security/limits.conf, LimitNOFILE of a service, --ulimit nofile of a container"


def raise_limit(num_connections: int = 0) -> None:
    """Let this process, and those that it starts, open as many as the system lets it.

    Raises:
        ResourceError: that is less than so many connections need.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    # Where the system has a limit below the hard one, it refuses.
    with suppress(OSError, ValueError):
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_connections and soft != resource.RLIM_INFINITY and soft < num_connections:
        what = "this process may not open as many connections as it needs to the other ranks"
        raise ResourceError(
            what, found=f"RLIMIT_NOFILE {soft}, of at most {hard}", allowed=f">= {num_connections}", hint=_HINT
        )


def too_many_open(error: OSError) -> ResourceError:
    """Say which limit was reached; `error` is one of `TOO_MANY`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_own = error.errno == errno.EMFILE
    return ResourceError(
        f"{'this process' if is_own else 'the machine'} has as many files and connections open as it may",
        where=str(error.filename) if error.filename else None,
        found=f"RLIMIT_NOFILE {soft}, of at most {hard}" if is_own else "the limit in /proc/sys/fs/file-max",
        hint=_HINT if is_own else "sysctl fs.file-max, or fewer processes on this machine",
    )
