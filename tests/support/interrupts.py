"""Ctrl-C at any point: an interrupt at the n-th place of the package at which CPython can deliver one.

Also inside `threading`, where the package calls that.

CPython looks for signals when a Python function begins, when a call has returned, and when a loop goes round; nowhere
else. So nothing comes between two statements that call nothing, which the end of `AsyncLoader.__next__` relies on.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import threading
from pathlib import Path

import lit_async_data

# Of the standard library what holds locks while Python code runs.
WATCHED = (str(Path(lit_async_data.__file__).parent), threading.__file__)
# A pretended device is one call to a real one.
ATOMIC = ("testing.py", "checksum.py")


@functools.cache
def places(code):
    """The offsets of a function's instructions before which an interrupt can arrive; none in what is not watched."""
    if not code.co_filename.startswith(WATCHED) or code.co_filename.endswith(ATOMIC):
        return frozenset()
    bytecode = dis.Bytecode(code)

    def handler(offset):
        """Of an exception there. CPython asks by the call that has returned, a trace function by what comes next."""
        return [each.target for each in bytecode.exception_entries if each.start <= offset < each.end]

    found, before = set(), None
    for each in bytecode:
        if before is not None and handler(before.offset) == handler(each.offset):
            found.add(each.offset)
        before = each if each.opname.startswith(("CALL", "RESUME")) else None
        if each.opname.startswith("JUMP_BACKWARD") and handler(each.offset) == handler(each.argval):
            found.add(each.argval)
    return frozenset(found)


@contextlib.contextmanager
def interrupted(after, act=None):
    """Raise `KeyboardInterrupt` at the place of this number in the block, counted from 0; with None, count only.

    With ``act``, that is called there instead, as garbage collection would call it.

    Yields a list of the places that were passed: file and line.
    """
    passed = []

    def trace(frame, event, argument):
        code = frame.f_code
        if not places(code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_lasti in places(code):
            passed.append((Path(code.co_filename).name, frame.f_lineno))
            if after is not None and len(passed) > after:
                sys.settrace(None)
                if act is None:
                    raise KeyboardInterrupt
                act()
                return None
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield passed
    finally:
        sys.settrace(before)
