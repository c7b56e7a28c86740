"""Measures how fast files can feed training, and says which options to use, and when to pack.

  python -m lit_async_data doctor scans/*.h5
  python -m lit_async_data doctor birds.csv --fields x=path y=species --image-size 224 --batch-size 128

Without --fields, the source is the one that inspect suggests.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from lit_async_data.engine.resources.memory import readable
from lit_async_data.errors import ConfigError, counted
from lit_async_data.options import LoaderOptions
from lit_async_data.sources.contract.storage_layout import HOW_READ
from lit_async_data.tools.call import Call, add_source_arguments
from lit_async_data.tools.inspect.command import given_call
from lit_async_data.tools.terminal import as_json, indented, section, shapes, table

if TYPE_CHECKING:
    from lit_async_data.tools.doctor.examination import Rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="HDF5 files, a table, or a folder")
    add("--batch-size", type=int, default=64, metavar="N", help="samples per batch (64)")
    add_source_arguments(parser)
    add("--seconds", type=float, default=1.0, metavar="S", help="for each measurement (1); more is more exact")
    add("--warm", action="store_true", help="leave the page cache alone: other programs are using these files")
    add("--json", action="store_true", help="print values for programs; docs/tools/doctor.md says which")


def run(arguments: argparse.Namespace) -> None:
    from lit_async_data.tools.doctor.examination import examination  # needs torch, which takes a second to import

    if not 0.05 <= arguments.seconds <= 600:
        raise ConfigError(f"{arguments.seconds} is not from 0.05 to 600", "seconds")
    options, call = LoaderOptions(batch_size=arguments.batch_size), given_call(arguments.files, arguments)
    with contextlib.closing(call.build()) as source:
        report = examination(source, options, arguments.seconds, cold=not arguments.warm)
        ragged = [json.dumps(key) for key, field in source.spec.fields.items() if field.ragged]
    changed = "".join(f", {name}={json.dumps(value)}" for name, value in report["options"].items())
    loader = f"loader = AsyncLoader(source, LoaderOptions(batch_size={arguments.batch_size}{changed}))"
    if len(ragged) == 1:  # of several, all must have the same lengths
        loader += f"  # batch_by={ragged[0]} puts samples of like length together"
    report["python"] = f"from lit_async_data import AsyncLoader, LoaderOptions\n{call.python()}\n{loader}"
    report["command"] = call.command()
    report["pack"] = pack_lines(call) if report["why_pack"] else ""
    sys.stdout.write(as_json(report, vars) if arguments.json else text_of(report))


def pack_lines(call: Call) -> str:
    """The lines that pack the samples; of windows at equal steps, their rows."""
    if "stride" in call.options:
        options = {name: value for name, value in call.options.items() if name != "stride"}
        call = dataclasses.replace(call, fields={key: call.name_of(key) for key in call.fields}, options=options)
    return f'{call.python()}\nfrom lit_async_data.tools.pack.packing import pack\npack(source, "packed.h5")'


# -- for people --------------------------------------------------------------------------------------------------------


def text_of(report: dict[str, Any]) -> str:
    how = f"{HOW_READ[report['reading']]} · {counted(report['cores'], 'core')}"
    rows = [("shuffle", "workers", "samples/s", "decoded per sample", "memory", "")]
    rows += [
        (
            f"chunk, {trial.shuffle_chunks}" if trial.shuffle == "chunk" else trial.shuffle,
            f"{trial.workers} ({trial.worker_kind})" if trial.workers else "the loop reads",
            _rounded(trial.samples_per_s),
            f"{trial.amplification:.1f}",
            readable(trial.memory),
            "use this" if number == report["chosen"] else "",
        )
        for number, trial in enumerate(report["trials"])
    ]
    cold = f"not measured: {report['why_not_cold']}" if report["cold"] is None else _rate(report["cold"])
    lines = [
        f"{report['source']}   {counted(report['samples'], 'sample')} · {shapes(report['batch'])} · {how}",
        "",
        *table(rows),
    ]
    lines += section("Rates of this setting", [f"from memory: {_rate(report['warm'])}", f"from the disk: {cold}"])
    lines += ["", "Use", *indented(report["python"].splitlines())]
    lines += indented([f"{report['command']} {report['override']}".rstrip()])
    if report["why_pack"]:
        lines += [*section("Pack", [report["why_pack"]]), *indented(report["pack"].splitlines())]
    return "\n".join([*lines, ""])


def _rate(rate: Rate) -> str:
    words = f"{_rounded(rate.samples_per_s)} samples/s"
    if not rate.read_mb_per_s:
        return f"{words}; nothing is read any more: readers copy from decoded chunks, which are kept"
    words += f"; each reader {_rounded(rate.read_mb_per_s)} MB/s while reading"
    if not rate.decode_mb_per_s:
        return words
    decoding = f"{_rounded(rate.decode_mb_per_s)} MB/s while decoding"
    return f"{words}, {decoding}, which takes {100 * rate.decoding:.0f} % of its time"


def _rounded(number: float) -> str:
    """Three digits: measurements are no better."""
    return f"{float(f'{number:.3g}'):,g}" if number < 100 else f"{int(float(f'{number:.3g}')):,}"
