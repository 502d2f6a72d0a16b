"""How many descriptors the process may open, and so how many connections. Knows the system's limits alone."""

from __future__ import annotations

import resource

from bertserve.service.errors import SettingsError

RESERVE = 96  # for files, the log, pipes, metrics of several workers, and connections that only ask probes
MOST_RAISED = 65536
MOST_BY_DEFAULT = 4096


def raise_limit() -> None:
    """Raises the number of descriptors that the process may open, as far as it may by itself and can use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_RAISED if hard == resource.RLIM_INFINITY else min(hard, MOST_RAISED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections(asked: int | None) -> int:
    """Returns how many connections the process may have open.

    Args:
        asked: What the settings say; None takes what descriptors allow, up to MOST_BY_DEFAULT.

    Raises:
        SettingsError: There are too few descriptors.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST_RAISED if soft == resource.RLIM_INFINITY else soft - RESERVE
    if max(asked or 1, 1) > allowed:
        raise SettingsError(
            f"--max-connections is {asked or 'not set'}, and the process may open {soft} descriptors, of which {RESERVE} are kept for other "
            f"things; lower it, or raise the limit (`ulimit -n`)."
        )
    return asked or min(allowed, MOST_BY_DEFAULT)
