"""Write samples of HDF5 files, a table or a folder of classes into one HDF5 file that is fast to read at random.

Every value is compared. A pack that fails or is interrupted leaves no file.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from datetime import timedelta

from lit_async_data.errors import ConfigError, counted
from lit_async_data.tools.call import Call, add_source_arguments, given_source
from lit_async_data.tools.pack.packing import Packed, pack
from lit_async_data.tools.pack.plan import NAMES
from lit_async_data.tools.terminal import ProgressLine, sized


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


def report(packed: Packed, path: str) -> str:
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
