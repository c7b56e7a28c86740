"""Whether Python runs with the GIL; and, where it was built to run without it, why it runs with it all the same."""

from __future__ import annotations

import logging
import sys
import sysconfig

log = logging.getLogger(__name__)

# Of the warning with which CPython turns the GIL on for an extension module; the module's name follows, quoted.
_WARNED = "(GIL) has been enabled to load module '"
# Holds one item until a line has been logged. A list: of several threads, one gets it.
_unlogged = [True]


def has_gil() -> bool:
    """Whether one thread at a time runs Python code in this process at present."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


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
