"""Write samples of HDF5 files, a table or a folder of classes into one HDF5 file that is fast to read at random.

Every value is compared. A pack that fails or is interrupted leaves no file.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TextIO

from lit_async_data.errors import ConfigError
from lit_async_data.tools.call import Call
from lit_async_data.tools.given_source import add_source_arguments, given_source
from lit_async_data.tools.pack.packing import Packed, pack
from lit_async_data.tools.pack.plan import NAMES
from lit_async_data.tools.terminal import counted, sized


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("input", nargs="+", metavar="INPUT", help="HDF5 files, or one table, or one folder")
    add("-o", "--output", required=True, metavar="OUT.h5", help="the file to write")
    add_source_arguments(parser)
    add("--columns", nargs="+", default=[], metavar="NAME", help="keep more columns, for groups of a split")
    auto = "auto: deflate where it saves a third, none if the input has none"
    add("--codec", choices=["auto", *NAMES], default="auto", help=auto)
    add("--chunk", type=int, metavar="N", help="samples per chunk; by default one, or 64 KiB of small ones")
    add("--keep-parts", action="store_true", help="files, or groups in them, become groups; windows cross no group")
    add("--force", action="store_true", help="replace OUT.h5 if it exists")


def run(arguments: argparse.Namespace) -> None:
    given = {name: getattr(arguments, name) for name in ("codec", "chunk", "columns", "keep_parts", "force")}
    call = given_source(arguments.input, arguments)
    if call.source == "ManifestSource" and not call.fields:
        raise ConfigError(f"fields: missing; which columns of {call.path}? For example --fields x=path y=label")
    with contextlib.closing(call.build()) as source:
        progress = ProgressLine(sys.stderr)
        try:
            packed = pack(source, arguments.output, progress=progress, **given)
        finally:
            progress.end()
    sys.stdout.write(report(packed, arguments.output))


class ProgressLine:
    """One line on a terminal, which changes; otherwise a line every ten seconds, for logs."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock, self._step = stream, clock, ""
        self._before, self._behind, self._every = ("\r\x1b[K", "", 0.1) if stream.isatty() else ("", "\n", 10.0)

    def __call__(self, step: str, done: int, total: int) -> None:
        now = self._clock()
        if step != self._step:
            self._step, self._started, self._told = step, now, now
        if done and now - self._told >= self._every:
            self._told, rate = now, done / (now - self._started)
            share, left = f"{100 * done // total} % of {sized(total)}", timedelta(seconds=round((total - done) / rate))
            self._stream.write(f"{self._before}{step}: {share}, {sized(rate)}/s, {left} left{self._behind}")
            self._stream.flush()

    def end(self) -> None:
        self._stream.write(self._before)


def report(packed: Packed, path: str) -> str:
    """What was written, and how to read it."""
    plan, took = packed.plan, timedelta(seconds=round(packed.seconds))
    sizes = f"{sized(packed.nbytes)} ({sized(packed.decoded)} decoded)"
    lines = [f"{path}: {packed.samples:,} samples, {sizes}, every value compared, in {took}"]
    width = max(len(field.key) for field in plan.fields)
    for field in plan.fields:
        shape = f" {field.shape}" if field.shape else ""
        classes = f", {len(field.classes)} classes" if field.classes else ""
        codec = f"{'shuffle and ' if field.shuffle else ''}{plan.codec}"
        how = f"chunks of {counted(field.chunk, 'sample')}, {codec}" if field.chunk else "contiguous"
        lines.append(f"  {field.key:<{width}}  {field.dtype}{shape}{classes}; {how}")
    fields = {field.key: field.given(unpacked=field.packed) for field in plan.fields}
    program = Call("HDF5Source", path, fields, plan.source_options).python()
    return "\n".join([*lines, "Read it with", *(f"  {line}" for line in program.splitlines()), ""])
