"""`has_gil`: whether Python runs with the GIL."""

from __future__ import annotations

import sys


def has_gil() -> bool:
    """Whether one thread at a time runs Python code in this process at present."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())
