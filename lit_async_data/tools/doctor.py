"""Measures how fast files can feed training, and says which options to use.

  python -m lit_async_data doctor scans/*.h5
  python -m lit_async_data doctor birds.csv --fields x=path y=species --image-size 224 --batch-size 128

Without --fields, the source is the one that inspect suggests.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import lit_async_data  # imports torch, which takes a second, only when a loader is built
from lit_async_data.engine.resources import cores, readable
from lit_async_data.errors import ConfigError, counted
from lit_async_data.options import LoaderOptions, Shuffle
from lit_async_data.sources.contract.source import HOW_READ, Source
from lit_async_data.sources.contract.stage_clock import Work
from lit_async_data.sources.files.files import WHOLE_BYTES
from lit_async_data.tools.call import add_source_arguments, override
from lit_async_data.tools.inspect import given_call
from lit_async_data.tools.terminal import as_json, indented, section, shapes, table

CLOSE = 0.9  # rates above this share of the best count as equal: measurements differ by as much
MOST_TIMES = 4  # a measurement of a slow loader takes at most this many times its seconds
# A file with this many groups opens slowly from a store; a request for fewer bytes takes as long as for ten times more.
MANY_GROUPS, SMALL_BYTES = 50, 2**16
GROUPS = 2  # groups of the chunk shuffle that a measurement spans: work comes with each new group


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="HDF5 files (and a table of labels), a table, or a folder")
    add("--batch-size", type=int, default=64, metavar="N", help="samples per batch (64)")
    add_source_arguments(parser)
    add("--seconds", type=float, default=1.0, metavar="S", help="for each setting (1); more is more exact")
    add("--json", action="store_true", help="print values for programs; docs/tools/doctor.md says which")


def run(arguments: argparse.Namespace) -> None:
    if not 0.05 <= arguments.seconds <= 600:
        raise ConfigError(f"{arguments.seconds} is not from 0.05 to 600", "seconds")
    options, call = LoaderOptions(batch_size=arguments.batch_size), given_call(arguments.files, arguments)
    with contextlib.closing(call.build()) as source:
        report = examination(source, options, arguments.seconds)
    changed = "".join(f", {name}={json.dumps(value)}" for name, value in report["options"].items())
    loader = f"loader = AsyncLoader(source, LoaderOptions(batch_size={arguments.batch_size}{changed}))"
    report["python"] = f"from lit_async_data import AsyncLoader, LoaderOptions\n{call.python()}\n{loader}"
    report["command"] = call.command()
    sys.stdout.write(as_json(report, vars) if arguments.json else text_of(report))


@dataclasses.dataclass(frozen=True)
class Trial:
    """A measured setting; docs/tools/doctor.md describes the values."""

    shuffle: str
    shuffle_chunks: int
    workers: int
    worker_kind: str
    samples_per_s: float
    amplification: float
    decoding: float
    memory: int


def examination(source: Source, given: LoaderOptions, seconds: float) -> dict[str, Any]:
    trials, remote = list[Trial](), source.chunks.remote
    for options in _settings(source, given):
        # The first look brings what this order reads into the page cache.
        if not trials or trials[-1].shuffle != options.shuffle:
            measured(lit_async_data.AsyncLoader(source, options), seconds / 2)
        loaders = [lit_async_data.AsyncLoader(source, options) for _ in range(2)]  # other load may slow one of them
        trials.append(max((measured(each, seconds / 2) for each in loaders), key=lambda trial: trial.samples_per_s))
    trial = trials[chosen := best(trials)]
    decided = {"shuffle": trial.shuffle, "workers": trial.workers}
    changed: dict[str, Any] = {name: value for name, value in decided.items() if value != getattr(given, name)}
    return {
        "version": 6,  # raised if a key changes its meaning or goes
        "source": source.name,
        "samples": len(source),
        "batch": {key: {"dtype": str(each.dtype), "shape": each.shape} for key, each in source.spec.items()},
        "batch_size": given.batch_size,
        "reading": source.chunks.reading,
        "cores": cores(),
        "trials": trials,
        "chosen": chosen,
        "remote": remote and remote._asdict(),
        "advice": advice(source),
        "options": changed,
        "override": " ".join(override(f"loader.{name}", value) for name, value in changed.items()),
    }


def advice(source: Source) -> list[str]:
    """What an epoch fetches, and what would make it less."""
    remote, parts = source.chunks.remote, source.parts
    if remote is None:
        return []
    files, each = len({part.file for part in parts}), remote.nbytes // max(remote.requests, 1)
    whole = remote.nbytes <= WHOLE_BYTES * files  # when they are opened
    lines = [f"an epoch fetches {f'{readable(remote.nbytes)} by ' if each else ''}about {remote.requests:,} requests"]
    if len(parts) >= MANY_GROUPS * files and not whole:
        how = "h5repack -S PAGE -G 4194304 OLD NEW puts what describes them together, and pack writes one dataset"
        lines.append(f"{len(parts):,} groups in {counted(files, 'file')} open one after the other: {how}")
    if each < SMALL_BYTES and not whole:
        lines.append(f"a request brings {readable(each)} only: pack, or h5repack with larger chunks, makes them fewer")
    if remote.folder is None:
        how = "keeps what was fetched for later epochs and jobs; fill fills it before one"
        lines.append(f"cache=FOLDER (--cache) {how}")
    return lines


def _settings(source: Source, given: LoaderOptions) -> Iterator[LoaderOptions]:
    most = lit_async_data.AsyncLoader(source, dataclasses.replace(given, shuffle="auto")).footprint.workers.most
    numbers = sorted({most, max(most // 2, 1), 1} - {0}, reverse=True) or [0]
    by_chunk: list[Shuffle] = ["chunk"] if source.chunks.rows > 1 or source.chunks.remote else []
    for shuffle in (*by_chunk, "global", "none"):
        base = dataclasses.replace(given, shuffle=shuffle)
        for workers in numbers if shuffle != "none" else numbers[:1]:
            yield dataclasses.replace(base, workers=workers)


def best(trials: Sequence[Trial]) -> int:
    """The number of the fastest trial that shuffles; of trials with close rates, the one with the fewest workers."""
    most = max(trial.samples_per_s for trial in trials if trial.shuffle != "none")
    close = [trial for trial in trials if trial.shuffle != "none" and trial.samples_per_s >= CLOSE * most]
    return trials.index(min(close, key=lambda trial: (trial.workers, -trial.samples_per_s)))


def measured(loader: lit_async_data.AsyncLoader, seconds: float) -> Trial:
    """Take batches of a new loader as fast as they come, and close it.

    The first batch of each reader does not count, since the reader imports its decoders with it; nor does the one
    that this process reads while a reader process starts.
    """
    order = loader.order.deck.chunk_order
    least = min(order.length, GROUPS * order.width * order.rows) if order is not None else 0
    plan, options, source = loader.footprint, loader.options, loader.source
    workers, whole = plan.workers, source.memory().cacheable / len(source)
    first = max(workers.threads, 1) + (workers.kind == "process")
    taken, since, now, before = 0, 0.0, 0.0, Work()
    with loader:
        for number, batch in enumerate(itertools.chain.from_iterable(itertools.repeat(loader)), 1):
            if number > first:
                now, taken = time.perf_counter(), taken + len(next(iter(batch.values())))
                if now - since >= MOST_TIMES * seconds or (now - since >= seconds and taken >= least):
                    break
            elif number == first:
                before, since = loader.stats().read, time.perf_counter()
        total = loader.stats().read
    work, samples = total.minus(before), max(total.bytes // max(source.spec.nbytes, 1), 1)
    setting = str(options.shuffle), options.shuffle_chunks, workers.threads, workers.kind
    decoded, share = total.decoded / samples / whole if whole else 1.0, work.decode_s / (work.seconds or 1.0)
    return Trial(*setting, taken / (now - since), decoded, share, plan.budget.total)


def text_of(report: dict[str, Any]) -> str:
    place = "over the network" if report["remote"] else "from memory"
    how = f"{HOW_READ[report['reading']]}, {place} · {counted(report['cores'], 'core')}"
    rows = [("shuffle", "workers", "samples/s", "decoded per sample", "decoding", "memory", "")]
    for number, trial in enumerate(report["trials"]):
        shuffle = f"chunk, {trial.shuffle_chunks}" if trial.shuffle == "chunk" else trial.shuffle
        workers = f"{trial.workers} ({trial.worker_kind})" if trial.workers else "the loop reads"
        rate = float(f"{trial.samples_per_s:.3g}")  # measurements are no better
        figures = f"{rate:,g}" if rate < 100 else f"{rate:,.0f}", f"{trial.amplification:.1f}", f"{trial.decoding:.0%}"
        rows.append((shuffle, workers, *figures, readable(trial.memory), "use this" * (number == report["chosen"])))
    title = f"{report['source']}   {counted(report['samples'], 'sample')} · {shapes(report['batch'])} · {how}"
    lines = [title, "", *table(rows)]
    lines += section("Network", report["advice"])
    lines += ["", "Use", *indented(report["python"].splitlines())]
    lines += indented([f"{report['command']} {report['override']}".rstrip()])
    return "\n".join([*lines, ""])
