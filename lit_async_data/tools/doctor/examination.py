"""`examination`: measures a source in several settings, and puts the report together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lit_async_data.errors import MemoryBudgetError
from lit_async_data.host.resources.cores import cores
from lit_async_data.loader.async_loader import AsyncLoader
from lit_async_data.loader.label_mixing import label_evenness
from lit_async_data.options import LoaderOptions, Shuffle
from lit_async_data.order.mixing import mixing
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.contract.source import Source
from lit_async_data.tools.doctor import advice, page_cache
from lit_async_data.tools.doctor.examined import Examined
from lit_async_data.tools.doctor.rates import MOST_TIMES, Rate, measured
from lit_async_data.tools.doctor.report import DoctorReport, Reading, Trial
from lit_async_data.tools.doctor.risks import risks
from lit_async_data.tools.overrides import override
from lit_async_data.tools.terminal import counted

# Files of a table that are dropped from the page cache, and looked at, at most.
MOST_FILES = 20_000
# A short epoch is read from the disk up to this many times; the median counts.
MOST_COLD = 3
# The most chunks that a better mixing may take.
MOST_CHUNKS = 4096

Say = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of a source.

    Attributes:
        paths: Some of them.
        count: Number of all.
        nbytes: Bytes of all.
        apart: Whether samples have files of their own.
    """

    paths: list[str]
    count: int
    nbytes: int
    apart: bool


def examination(examined: Examined, seconds: float, *, cold: bool, say: Say = lambda _: None) -> DoctorReport:
    """Measure a source.

    Args:
        examined: The source and the options that it has now.
        seconds: For each measurement, at least.
        cold: Whether to drop its files from the page cache and measure that, too.
        say: Called with what is being measured.

    Raises:
        SourceError, ReadError, TransformError: Samples cannot be read.
        MemoryBudgetError: No setting fits the budget.
    """
    source, rates, trials = examined.source, list[Rate](), list[Trial]()
    for options in _settings(examined):
        say(f"shuffle={options.shuffle}, {counted(int(options.workers), 'worker')}")
        # The first look brings what this order reads into the page cache.
        if not trials or trials[-1].shuffle != options.shuffle:
            measured(examined.build(options), seconds / 2, once=True)
        loader = examined.build(options)
        rates.append(measured(loader, seconds))
        trials.append(_trial(loader, rates[-1]))
    chosen = advice.best(trials)
    options = _options(examined.options, trials[chosen])
    files = _files(source)
    say("the same from the disk")
    from_disk, why_not = _cold(examined, options, rates[chosen], seconds) if cold else (None, "left out (--warm)")
    warm = _reading(rates[chosen])
    why = advice.why_pack(trials, trials[chosen], source.chunks.reading, warm.decoding, files=files.apart)
    changed = _changed(examined.options, options)
    return DoctorReport(
        source=source.name,
        samples=len(source),
        batch={key: {"dtype": str(each.dtype), "shape": each.shape} for key, each in source.spec.items()},
        batch_size=options.batch_size,
        reading=source.chunks.reading,
        cores=cores(),
        trials=trials,
        chosen=chosen,
        warm=warm,
        cold=from_disk,
        why_not_cold=why_not,
        files=files.count,
        bytes=files.nbytes,
        free_memory=page_cache.free_memory(),
        risks=list(risks(source, files.paths[:100])),
        options=changed,
        override=" ".join(override(f"{examined.prefix}{name}", value) for name, value in changed.items()),
        python=_python(examined, options, changed),
        command=examined.command,
        pack=examined.pack if why else "",
        why_pack=why,
        notes=list(_notes(source, options, trials[chosen])),
    )


# -- what is measured -------------------------------------------------------------------------------------------------


def _settings(examined: Examined) -> Iterator[LoaderOptions]:
    """The settings to measure: each shuffle with all workers, and with fewer."""
    given = examined.options
    most = examined.build(given).footprint.workers.most
    numbers = sorted({most, max(most // 2, 1), 1} - {0}, reverse=True) or [0]
    kinds: list[Shuffle] = ["global", "none"]
    if examined.source.chunks.rows > 1 or given.shuffle == "chunk":
        kinds.insert(0, "chunk")
    for shuffle in kinds:
        if shuffle == "none" and given.drawn:
            continue
        base = dataclasses.replace(given, shuffle=shuffle)
        base = _mixed_better(examined, base) if shuffle == "chunk" else base
        for workers in numbers if shuffle != "none" else numbers[:1]:
            yield dataclasses.replace(base, workers=workers)


def _mixed_better(examined: Examined, options: LoaderOptions) -> LoaderOptions:
    """The options with as many chunks at a time as it takes to mix well, if memory suffices."""
    while True:
        loader = examined.build(options)
        order = loader.order.chunk_order
        if order is None or _mixing(loader) >= advice.MIXED or order.width >= order.chunks:
            return options
        more = dataclasses.replace(options, shuffle_chunks=2 * options.shuffle_chunks)
        try:
            examined.build(more).footprint.budget.check()
        except MemoryBudgetError:
            return options
        if more.shuffle_chunks > MOST_CHUNKS:
            return options
        options = more


def _mixing(loader: AsyncLoader) -> float:
    order = loader.order
    if order.chunk_order is not None:
        return min(mixing(order.chunk_order, order.batch_size, order.world_size), 1.0)
    return 0.0 if order.shuffle == "none" else 1.0


def _trial(loader: AsyncLoader, rate: Rate) -> Trial:
    """A setting that was measured."""
    plan, source = loader.footprint, loader.source
    # What was decoded for each sample, where its bytes are known.
    whole, decoded = source.decodable_bytes / len(source), rate.decoded / max(rate.samples, 1)
    return Trial(
        loader.order.shuffle,
        loader.options.shuffle_chunks,
        plan.workers.threads,
        plan.workers.kind,
        rate.samples_per_s,
        decoded / whole if whole and decoded else plan.amplification,
        _mixing(loader),
        {} if loader.order.shuffle == "global" else dict(label_evenness(source, loader.order)),
        plan.budget.total,
    )


def _reading(rate: Rate) -> Reading:
    return Reading(rate.samples_per_s, rate.stages.read.mb_per_s, rate.stages.decode.mb_per_s, rate.decoding)


def _cold(examined: Examined, options: LoaderOptions, warm: Rate, seconds: float) -> tuple[Reading | None, str]:
    """The same setting with the files that it reads on the disk; or why that cannot be measured."""
    source = examined.source
    with examined.build(options) as loader:
        wanted = min(int(MOST_TIMES * seconds * warm.samples_per_s) + warm.samples, loader.order.length)
        paths = _paths(source, loader.order.samples(np.arange(wanted)))[:MOST_FILES]
    rates = list[Rate]()
    while len(rates) < MOST_COLD and sum(rate.seconds for rate in rates) < seconds:
        source.close()  # the pages of mapped files would stay
        try:
            if not page_cache.dropped(paths):
                return None, "the system keeps the files in the page cache, or does not tell"
        except OSError as error:
            return None, f"{error.filename or paths[0]}: {error.strerror}"
        rates.append(measured(examined.build(options), seconds, once=True))
        if not rates[-1].samples_per_s:
            return None, "the samples are too few: most are read or decoded with the first batches"
    return _reading(sorted(rates, key=lambda rate: rate.samples_per_s)[len(rates) // 2]), ""


def _paths(source: Source, samples: Indices) -> list[str]:
    """The files of samples: of a table, those that it names."""
    located = source.locate(source.ids(samples))
    return list(dict.fromkeys(getattr(each, "path", None) or each.file for each in located))


def _files(source: Source) -> Files:
    """The files of a source; estimated from `MOST_FILES` samples if there are more."""
    samples = np.arange(0, len(source), max(len(source) // MOST_FILES, 1))
    parts = list(dict.fromkeys(part.file for part in source.parts))
    paths = _paths(source, samples)
    apart = len(paths) > len(parts)
    paths = paths if apart else parts
    try:
        nbytes = page_cache.stored_bytes(paths)
    except OSError:  # computed data have no files
        return Files([], 0, 0, apart=False)
    whole = len(source) / len(samples) if apart else 1.0
    return Files(paths, round(len(paths) * whole), round(nbytes * whole), apart)


# -- what is advised --------------------------------------------------------------------------------------------------


def _options(given: LoaderOptions, trial: Trial) -> LoaderOptions:
    shuffle: Any = trial.shuffle
    return dataclasses.replace(given, shuffle=shuffle, shuffle_chunks=trial.shuffle_chunks, workers=trial.workers)


def _changed(given: LoaderOptions, options: LoaderOptions) -> dict[str, Any]:
    """The options that decide about speed, where they are not as given."""
    names = ("shuffle", "shuffle_chunks", "workers")
    return {name: value for name in names if (value := getattr(options, name)) != getattr(given, name)}


def _python(examined: Examined, options: LoaderOptions, changed: dict[str, Any]) -> str:
    if not examined.python:
        return ""
    given = "".join(f", {name}={json.dumps(value)}" for name, value in changed.items())
    loader = f"loader = AsyncLoader(source, LoaderOptions(batch_size={options.batch_size}{given}))"
    begin = "from lit_async_data import "
    imported, _, rest = examined.python.removeprefix(begin).partition("\n")
    names = sorted(["AsyncLoader", "LoaderOptions", *imported.split(", ")])
    return f"{begin}{', '.join(names)}\n{rest}\n{loader}"


def _notes(source: Source, options: LoaderOptions, trial: Trial) -> Iterator[str]:
    nbytes, budget = source.decodable_bytes, page_cache.free_memory() // 4
    kept = round(trial.amplification, 1) < 1
    if 0 < nbytes <= budget and not options.cache_bytes and not kept:
        yield (
            f"all chunks together take {nbytes / 1e6:,.0f} MB of memory when they are decoded: cache_bytes={nbytes} "
            "decodes each of them once in the whole run"
        )
