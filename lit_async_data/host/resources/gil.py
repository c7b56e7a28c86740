"""Whether Python runs with the GIL, and whether threads take it from each other."""

from __future__ import annotations

import sys
import threading
import time

from lit_async_data.system import thread_seconds

# Seconds for which a thread lets go of the GIL to see whether another takes it, and how often it does so. Where cores
# are busy, a thread that wants the GIL may not wake up in time: being kept from it twice is enough.
LET_GO_S, TRIES = 1e-3, 5


def has_gil() -> bool:
    """Whether one thread at a time runs Python code in this process at present."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def gil_is_taken() -> bool:
    """Whether other threads keep the GIL from the calling one: it lets go of it a few times, and wants it back.

    Python code holds on to the GIL for a switch interval (5 ms) if another thread wants it; code that works without the
    GIL gives it back at once. Waits for a core do not count, where the system tells them. Takes some milliseconds; a
    few switch intervals if the GIL is taken.
    """
    if not has_gil():
        return False
    thread, waits = threading.get_native_id(), []
    for _ in range(TRIES):
        queued_s, began_s = thread_seconds(thread)[1], time.perf_counter()
        time.sleep(LET_GO_S)
        waits.append(time.perf_counter() - began_s - (thread_seconds(thread)[1] - queued_s))
    return sorted(waits)[-2] - LET_GO_S > sys.getswitchinterval() / 2
