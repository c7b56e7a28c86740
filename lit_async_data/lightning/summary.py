"""The lines that describe a loader before training: samples and fields, steps and shuffle, workers and memory."""

from __future__ import annotations

import math

from lit_async_data.batch.transforms import Normalize
from lit_async_data.engine.hooks.callables import Function, Hook
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.resources.memory import readable
from lit_async_data.options import Balanced
from lit_async_data.order.buckets import Buckets
from lit_async_data.order.chunk_order import ChunkOrder
from lit_async_data.order.weights import WeightedChunkOrder
from lit_async_data.sources.contract.source import described

# Bytes of a sample that batches by length keep: its length, its bucket, and its place in the order of two epochs.
LENGTH_BYTES = 8 + 2 + 2 * 8


def summary_lines(loader: AsyncLoader) -> list[str]:
    """Three lines: samples and fields; batch, steps and the cost of the shuffle; workers and memory."""
    source, options, footprint = loader.source, loader.options, loader.footprint
    step = options.batch_size * loader.world_size
    ranks = f" × {loader.world_size} ranks = {step}" if loader.world_size > 1 else ""
    most = "at most " if options.batch_by is not None else ""
    workers, drawing = str(footprint.workers), _drawing(loader) + _seed(loader)
    if footprint.workers.threads:
        workers += f", queue depth {options.queue_depth}"
    return [
        described(source, source.name, loader.spec),
        f"batch {most}{options.batch_size}{ranks}, {len(loader):,} steps, {drawing}shuffle {_shuffle(loader)}",
        f"{workers}: {footprint.budget}",
    ]


def normalizing_lines(transform: Function | None, loader: AsyncLoader) -> list[str]:
    """A line for each field that a ``device_transform`` normalises."""
    normalize = transform and Hook(transform, "").function
    return [f"device  {line}" for line in normalize.lines(loader.spec)] if isinstance(normalize, Normalize) else []


def _drawing(loader: AsyncLoader) -> str:
    """How samples are drawn with replacement; empty if they are not."""
    options = loader.options
    if not options.drawn:
        return ""
    by = f"balanced {options.weights.field}" if isinstance(options.weights, Balanced) else "weights"
    return f"{loader.order.length:,} samples drawn by {by}, "


def _seed(loader: AsyncLoader) -> str:
    """The seed; empty if nothing depends on it."""
    schedule = loader._machinery.wiring.schedule
    return f"seed {schedule.seed}, " if schedule.shuffled or loader.order.shuffle != "none" else ""


def _shuffle(loader: AsyncLoader) -> str:
    order, source, amplification = loader.order, loader.source, loader.footprint.amplification
    if order.buckets is not None:
        return f"{order.shuffle}, {_by_length(loader, order.buckets)}"
    if order.shuffle == "none":
        return "none"
    if order.chunk_order is not None:
        chunks = order.chunk_order
        own = chunks.width // math.gcd(chunks.width, order.world_size)  # the chunks of a group that a rank reads
        groups = math.ceil(order.batch_size * order.world_size / (chunks.width * chunks.rows))
        stored = chunks.chunks * source.chunks.chunks_per_run
        several = min(groups * own * source.chunks.chunks_per_run, order.batch_size, stored)
        return (
            f"chunk: a batch draws from about {several:,} of {stored:,} chunks; "
            f"{_decoding_cost(loader, chunks, amplification)}"
        )
    rows = source.chunks.rows
    if rows == 1:
        often = "each time it is drawn" if loader.options.drawn else "once per epoch"
        return f"global: every sample is read alone, {often}"
    if amplification == 1:
        return "global: each chunk is decoded once and kept"
    return (
        f"global: {amplification:.1f} samples are decoded for each one used, since {rows} share a compressed chunk; "
        "shuffle=chunk decodes each chunk once"
    )


def _by_length(loader: AsyncLoader, buckets: Buckets) -> str:
    (padding, mixed), held, decoded = buckets.padding(loader.order.batch_size), LENGTH_BYTES, ""
    if loader.order.chunk_order is not None:
        held += 2 * 8  # and the place by chunks
        decoded = f"{loader.footprint.amplification:.1f} samples are decoded for each one used; "
    return (
        f"batches by length, padded to one of {len(buckets.bounds)} lengths up to {buckets.bounds[-1]:,}: "
        f"{padding:.0%} of all elements are padding, {mixed:.0%} in batches of any samples; {decoded}"
        f"lengths and order take {readable(held * len(buckets.lengths))}"
    )


def _decoding_cost(loader: AsyncLoader, order: ChunkOrder | WeightedChunkOrder, amplification: float) -> str:
    chunks, held = loader.source.chunks, loader.footprint.budget.decoded
    if not held:
        return "files of one folder are read together" if chunks.reading == "decoded" else "nothing is decoded"
    which = "every chunk" if chunks.largest else "every chunk of the largest field"
    decoded = order.ranks_per_chunk(loader.world_size)
    often = "once per epoch" if decoded == 1 else f"by {decoded:.2g} ranks each"
    again = (
        f", and {chunks.spread - 1:.2f} of them again for samples that reach into the next chunk"
        if chunks.spread > 1 and amplification != 1
        else ""
    )
    if loader.options.drawn:
        again += f", {amplification:.1f} samples for each one used"
    return f"{which} is decoded {often}{again}; decoded chunks take {readable(held)}"
