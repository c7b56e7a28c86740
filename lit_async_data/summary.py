"""What a loader will do, in lines for people, said before it begins."""

from __future__ import annotations

from lit_async_data.loader import AsyncLoader
from lit_async_data.memory import readable
from lit_async_data.mixing import mixing, ranks_per_chunk


def lines(loader: AsyncLoader) -> list[str]:
    """Samples and fields; batches and steps; the price of the shuffle; workers, slots and their memory."""
    source, options, footprint = loader.source, loader.options, loader.footprint
    fields = ", ".join(
        f"{key} {field.dtype}{' ' + str(tuple(field.shape)) if field.shape else ''}"
        for key, field in loader.spec.fields.items()
    )
    step = options.batch_size * loader.world_size
    ranks = f" × {loader.world_size} ranks = {step}" if loader.world_size > 1 else ""
    workers = f"{footprint.workers} worker{'s' if footprint.workers > 1 else ''}, queue depth {options.queue_depth}"
    if not footprint.workers:
        workers = "no workers, read in the training loop"
    return [
        f"{len(source):,} samples from {source}: {fields}",
        f"batch {options.batch_size}{ranks}, {len(loader):,} steps, shuffle {_shuffle(loader)}",
        f"{workers}: {footprint.budget}",
    ]


def _shuffle(loader: AsyncLoader) -> str:
    """The shuffle and its price, in one line."""
    order, rows = loader.order, loader.source.chunks.rows
    if order.shuffle == "none":
        return "none"
    if order.chunk_order is not None:
        chunks = order.chunk_order
        mixed = mixing(chunks, order.batch_size, order.world_size)
        decoded = ranks_per_chunk(chunks, order.world_size)
        times = "once per epoch" if decoded == 1 else f"by {decoded} ranks each"
        held = loader.footprint.budget.decoded
        price = (
            f"every chunk is decoded {times}, and takes {readable(held)} meanwhile" if held else "nothing is decoded"
        )
        return (
            f"chunk: {chunks.width} of {chunks.chunks:,} chunks at a time, {mixed:.2f} of the mixing of a global "
            f"shuffle; {price}"
        )
    if rows == 1:
        return "global: every sample is read alone, once per epoch"
    if loader.footprint.amplification == 1:
        return "global: what is decoded is kept, and decoded once"
    return (
        f"global: {loader.footprint.amplification:.1f} samples are decoded for each one used, since {rows} share a "
        "compressed chunk; shuffle=chunk decodes each chunk once"
    )
