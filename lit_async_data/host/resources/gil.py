"""Whether Python runs with the GIL, and whether threads take it from each other; and why it runs with it at all.

The last is for a Python that was built to run without.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import threading
import time

from lit_async_data.system import thread_seconds

log = logging.getLogger(__name__)

# Of the warning with which CPython turns the GIL on for an extension module; the module's name follows, quoted.
_WARNED = "(GIL) has been enabled to load module '"
# Holds one item until a line has been logged. A list: of several threads, one gets it.
_unlogged = [True]
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


def why_gil() -> str:
    """Why a free-threaded build runs with the GIL, for people; empty if it does not, and on any other build."""
    if not sysconfig.get_config_var("Py_GIL_DISABLED") or not has_gil():
        return ""
    if getattr(sys.flags, "gil", None) == 1:
        return "PYTHON_GIL=1 or -X gil=1 turned it on"
    module = _module_with_gil()
    if module:
        return f"the extension module {module!r} turned it on, which does not declare that it can run without"
    return (
        "an extension module turned it on, which does not declare that it can run without; Python names it in a "
        "RuntimeWarning at its import, which was filtered out here: python -W always shows it"
    )


def log_why_gil() -> None:
    """Log one line per process if a free-threaded build runs with the GIL."""
    why = why_gil() if _unlogged else ""
    if not why:
        return
    try:
        _unlogged.pop()
    except IndexError:  # another thread has logged it
        return
    log.warning(
        "this Python was built to run without the GIL, but runs with it: %s. Threads that read then hold up the "
        "training loop as on any other Python; PYTHON_GIL=0 keeps the GIL off, at your own risk",
        why,
    )


def _module_with_gil() -> str:
    """The module for which CPython turned the GIL on; empty if nothing recorded it.

    CPython says so only by a warning, attributed to the import system. The filters that are in force by default have
    warnings recorded where they occurred, so that they are shown once.
    """
    recorded = vars(sys.modules["_frozen_importlib"]).get("__warningregistry__", {})
    texts = [str(key[0]) for key in list(recorded) if isinstance(key, tuple)]
    return next((text.partition(_WARNED)[2].partition("'")[0] for text in texts if _WARNED in text), "")
