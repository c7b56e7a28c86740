"""What a loader will do, in lines for people, said before it begins."""

from __future__ import annotations

from lit_async_data.loader import AsyncLoader
from lit_async_data.plan import amplification


def lines(loader: AsyncLoader) -> list[str]:
    """Samples and fields; batches, steps and the price of the shuffle; workers, slots and their memory."""
    source, options = loader.source, loader.options
    fields = ", ".join(
        f"{key} {field.dtype}{' ' + str(tuple(field.shape)) if field.shape else ''}"
        for key, field in loader.spec.fields.items()
    )
    step = options.batch_size * loader.world_size
    ranks = f" × {loader.world_size} ranks = {step}" if loader.world_size > 1 else ""
    workers = (
        f"{options.worker_count} worker{'s' if options.worker_count > 1 else ''}, queue depth {options.queue_depth}"
    )
    if not options.worker_count:
        workers = "no workers, read in the training loop"
    return [
        f"{len(source):,} samples from {source}: {fields}",
        f"batch {options.batch_size}{ranks}, {len(loader):,} steps, shuffle {_shuffle(loader)}",
        f"{workers}: {loader.budget}",
    ]


def _shuffle(loader: AsyncLoader) -> str:
    if loader.options.shuffle == "none":
        return "none"
    rows = loader.source.chunks.rows
    if rows == 1:
        return "global: every sample is read alone, once per epoch"
    decoded = amplification(len(loader.source), rows, loader.options.batch_size)
    return f"global: {decoded:.1f} samples are decoded for each one used, since {rows} share a compressed chunk"
