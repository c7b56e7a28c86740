"""Write samples of HDF5 files, a table or a folder of classes into one HDF5 file that is fast to read at random.

Every value is compared. A pack that fails or is interrupted leaves no file.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TextIO

from lit_async_data.errors import AsyncDataError, ConfigError
from lit_async_data.tools.given_source import GivenSource, add_source_arguments
from lit_async_data.tools.pack.fields import NAMES
from lit_async_data.tools.pack.packing import Packed, pack
from lit_async_data.tools.suggestion import Call, Suggestion
from lit_async_data.tools.terminal import sized


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
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


def run(args: argparse.Namespace) -> int:
    """Run the command: 0; 1 if it failed, 2 if an argument is wrong, 130 after Ctrl-C."""
    progress = ProgressLine(sys.stderr)
    given = {name: getattr(args, name) for name in ("codec", "chunk", "columns", "keep_parts", "force")}
    try:
        source = GivenSource.of(args.input, args).open()
        try:
            packed = pack(source, args.output, progress=progress, **given)
        finally:
            progress.end()
            source.close()
    except KeyboardInterrupt:
        sys.stderr.write("pack: interrupted; nothing is left\n")
        return 130
    except AsyncDataError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2 if isinstance(error, ConfigError) else 1
    sys.stdout.write(report(packed, args.output))
    return 0


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
            share, left = f"{100 * done // total} % of {sized(total)}", _duration((total - done) / rate)
            self._stream.write(f"{self._before}{step}: {share}, {sized(rate)}/s, {left} left{self._behind}")
            self._stream.flush()

    def end(self) -> None:
        self._stream.write(self._before)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def report(packed: Packed, path: str) -> str:
    """What was written, and how to read it."""
    plan, sizes = packed.plan, f"{sized(packed.nbytes)} ({sized(packed.decoded)} decoded)"
    lines = [f"{path}: {packed.samples:,} samples, {sizes}, every value compared, in {_duration(packed.seconds)}"]
    width = max(len(field.key) for field in plan.fields)
    for field in plan.fields:
        shape = f" {field.shape}" if field.shape else ""
        classes = f", {len(field.classes)} classes" if field.classes else ""
        rows = "one sample" if field.chunk == 1 else f"{field.chunk} samples"
        how = (
            f"{rows} per chunk, {'shuffle and ' if field.shuffle else ''}{plan.codec}" if field.chunk else "contiguous"
        )
        lines.append(f"  {field.key:<{width}}  {field.dtype}{shape}{classes}; {how}")
    read = {field.key: dataclasses.replace(field.source_field, mask_and_scale=field.packed) for field in plan.fields}
    fields = {key: field if field.classes or field.mask_and_scale else key for key, field in read.items()}
    program = Suggestion("", {"all": Call("HDF5Source", path, fields, plan.source_options)}).python()
    return "\n".join([*lines, "Read it with", *(f"  {line}" for line in program.splitlines()), ""])
