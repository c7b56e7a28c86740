"""`changed_recently`: whether a file may change again without a new time."""

from __future__ import annotations

import time

# File systems that store times in seconds cannot tell two changes within this time apart.
RECENT_NS = 2 * 10**9


def changed_recently(*times_ns: int) -> bool:
    """Whether the latest of these times of a file lies within `RECENT_NS` of now."""
    return abs(time.time_ns() - max(times_ns)) < RECENT_NS
