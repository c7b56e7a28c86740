"""Ctrl-C at any point: raises an interrupt at the n-th place at which CPython can deliver one.

Counts places in the package, and in `threading` where the package calls it.

CPython checks for signals only when a Python function begins, when a call has returned, and when a loop jumps back. So
no interrupt can come between two statements without calls; the end of `AsyncLoader.__next__` relies on that.
"""

import contextlib
import dis
import functools
import sys
import threading
from pathlib import Path

import lit_async_data

# `threading` holds locks while Python code runs.
WATCHED = (str(Path(lit_async_data.__file__).parent), threading.__file__)


@functools.cache
def places(code):
    """Offsets of a function's instructions before which an interrupt can arrive; none if it is not watched."""
    if not code.co_filename.startswith(WATCHED):
        return frozenset()
    if code.co_name == "<genexpr>" and sys.version_info[:2] == (3, 12):
        return frozenset()  # it is traced also while it is closed, where no interrupt can arrive
    bytecode = dis.Bytecode(code)

    def handlers(offset):
        """Exception handlers of an instruction.

        CPython uses those of the call that has returned; a trace function raises in the next instruction. A place
        counts only if both are the same.
        """
        return [entry.target for entry in bytecode.exception_entries if entry.start <= offset < entry.end]

    offsets, call = set(), None
    for instruction in bytecode:
        if call is not None and handlers(call.offset) == handlers(instruction.offset):
            offsets.add(instruction.offset)
        call = instruction if instruction.opname.startswith(("CALL", "RESUME")) else None
        jumps_back = instruction.opname.startswith("JUMP_BACKWARD")
        if jumps_back and handlers(instruction.offset) == handlers(instruction.argval):
            offsets.add(instruction.argval)
    return frozenset(offsets)


@contextlib.contextmanager
def interrupted(after, act=None):
    """Raises `KeyboardInterrupt` in the block, at the place of this number, counted from 0; with None, only counts.

    With ``act``, calls that instead, as garbage collection would call a finaliser.

    Yields the list of places passed so far: file and line.
    """
    passed = []

    def trace(frame, event, argument):
        code = frame.f_code
        if not places(code):
            return None
        frame.f_trace = trace  # CPython 3.14 traces no opcodes of a frame without
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
    sys._getframe().f_trace_opcodes = True  # CPython 3.12 traces opcodes only if a frame has asked for them by now
    sys.settrace(trace)
    try:
        yield passed
    finally:
        sys.settrace(before)
