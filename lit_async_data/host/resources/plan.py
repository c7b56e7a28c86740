"""`ResourcePlan`: the threads and the memory that a loader will take, known before it takes any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from lit_async_data.batch.spec import BatchLayout, BatchSpec
from lit_async_data.host.resources.memory import Budget, default_budget
from lit_async_data.host.resources.workers import Workers
from lit_async_data.options import LoaderOptions
from lit_async_data.order.plan import EpochPlan, Order, Schedule, amplification
from lit_async_data.order.weighted import WeightedChunkOrder
from lit_async_data.sources.contract.source import Source

# Batches between what is read and what is fetched from the disk, if that must be.
AHEAD = 8
# Room for files that are read ahead: twice the estimated bytes of the next batches, between these bounds, and at most
# half of what slots and chunks leave of the budget, since a user who keeps batches needs more slots.
LEAST_FETCHED, MOST_FETCHED = 2**25, 2**30
# Small batches are coalesced: read at once into one slot, up to this many bytes and batches. Samples per second against
# one batch at a time, where reading is a copy, two cores: batches of 3 MiB 1.2 to 1.4 times at 2, 1.2 to 1.5 at 4; of
# 128 KiB 1.9 times at 16, 2.1 at 32, 2.2 at 64.
COALESCED_BYTES, COALESCED_BATCHES = 12 * 2**20, 32
# They take this part at most of what chunks leave of the budget: more slots and files that are read ahead need room.
COALESCED_SHARE = 0.25
# Samples decoded for each one used.
WORTH_A_WARNING = 1.5


@dataclasses.dataclass(frozen=True)
class ResourcePlan:
    """What a loader takes.

    Attributes:
        workers: Who reads.
        layout: Where the batches of a slot lie in it, and how many there are.
        budget: Memory, against what there may be.
        chunks: Decoded chunks that are in use at a time: those that samples are dealt from, and those of the group
            that is decoded meanwhile. 0 where the order does not go by chunks.
        amplification: Samples that are decoded for each one used; see `plan.amplification`.
    """

    workers: Workers
    layout: BatchLayout
    budget: Budget
    chunks: int
    amplification: float

    @classmethod
    def of(
        cls,
        source: Source,
        spec: BatchSpec,
        options: LoaderOptions,
        schedule: Schedule,
        *,
        ahead: bool,
        streams: bool,
        scratch: int | None = None,
        refusal: str = "",
        ranks: int | None = None,
    ) -> ResourcePlan:
        """The footprint of a loader.

        Args:
            source: Where samples come from.
            spec: The fields of its batches.
            options: As given.
            schedule: Its order.
            ahead: Whether anything is read ahead.
            streams: Whether batches are copied to a device with streams.
            scratch: Bytes in which each thread transforms samples; None without host hooks.
            refusal: Why no reader process can be used; empty if one can.
            ranks: Processes of this job on this machine; None for the number that torchrun sets, or 1.
        """
        hooks, first = scratch is not None, schedule.plan(0)
        workers = Workers.of(
            source,
            options,
            ahead=ahead,
            hooks=hooks,
            refusal=refusal,
            ranks=ranks,
            sample_bytes=spec.nbytes,
            shareable=source.chunks.rows == 1 or first.chunk_order is not None or first.order is None,
        )
        limit = options.memory_budget or default_budget(ranks)
        layout = BatchLayout(spec, schedule.capacity)
        scratch = layout.nbytes if workers.shared else scratch or 0
        workers = _within(workers, limit, scratch)
        shared = workers.shared and workers.processes > 0
        slots = max(options.queue_depth, workers.threads) + 1 if workers.threads else 2
        most = max(workers.most, 1)
        cache = min(options.cache_bytes, source.decodable_bytes)
        in_hand = most * options.batch_size * first.world_size
        chunks = _chunks(first, in_hand)
        decoded = source.decoded_bytes(chunks) + most * source.decode_bytes
        # Where the loop reads by itself, it waits for all that is read together. A copy takes less time than the calls
        # that several batches share, so it gains all the same.
        reading = source.chunks.reading
        coalesced = reading == "copied" or (reading in ("opened", "decoded") and workers.threads > 0) or shared
        if ahead and coalesced and not (streams or hooks):
            # Each worker has as many decoded chunks in hand, and scratch memory of that size if it shares slots.
            copies = slots + most * (chunks > 0) + workers.processes * shared
            left = int(COALESCED_SHARE * (limit - decoded - cache))
            batches = coalesced_batches(layout.nbytes, min(left // (copies * layout.nbytes), schedule.steps))
            layout = BatchLayout(spec, schedule.capacity, batches)
            chunks = _chunks(first, in_hand * batches)
            decoded = source.decoded_bytes(chunks) + most * source.decode_bytes
            scratch = layout.nbytes if shared else 0
        # While a worker process starts, the thread that it belongs to transforms.
        scratches = workers.processes + (most if hooks else 0)
        budget = Budget(slots, layout.nbytes, limit, decoded, cache, scratch=scratch * scratches)
        if workers.threads:
            fetched = _fetched_bytes(source, schedule.capacity * (AHEAD + layout.batches), limit - budget.total)
            budget = dataclasses.replace(budget, fetched=fetched)
        return cls(workers, layout, budget, chunks, _amplification(source, first, cache))

    def reserve(self, source: Source, readers: int = 1) -> Callable[[], None]:
        """Have a source reserve room for what is read ahead; call the result to give the room back.

        Args:
            source: Where samples come from.
            readers: Number of worker processes that share it.
        """
        # The chunks of a group do not fall to all of them evenly, and there are two groups.
        chunks = self.chunks if readers == 1 else self.chunks // readers + 2
        return source.reserve(chunks, self.budget.cache // readers, self.budget.fetched // readers)


def _within(workers: Workers, limit: int, scratch: int) -> Workers:
    """As many workers as have scratch memory in a quarter of the budget."""
    if not scratch:
        return workers
    # Every thread has some, and so has every worker process.
    room = limit // (8 * scratch)
    if workers.shared and room < workers.threads:
        return workers._replace(apart=False, shared=False, most=workers.threads)  # threads need none
    return workers._replace(most=max(workers.threads, min(workers.most, room)))


def _chunks(plan: EpochPlan, in_hand: int) -> int:
    """Decoded chunks that are in use at a time, if workers have so many samples in hand."""
    order = plan.chunk_order
    if order is None:
        return 0
    # Groups that are read at a time: one, unless workers have more samples in hand than are in one.
    groups = -(-in_hand // (order.width * order.rows))
    return min((groups + 1) * order.width, order.chunks)


def coalesced_batches(batch_bytes: int, most: int) -> int:
    """How many batches to read at once, at most.

    Args:
        batch_bytes: Bytes of one batch.
        most: The most that there may be.

    Example:
        >>> coalesced_batches(3 * 2**20, 100), coalesced_batches(2**30, 100), coalesced_batches(1000, 100)
        (4, 1, 32)
    """
    return max(min(COALESCED_BYTES // batch_bytes, COALESCED_BATCHES, most), 1)


def _fetched_bytes(source: Source, samples: int, left: int) -> int:
    """Bytes for files that are read ahead, for this many samples."""
    size = source.file_bytes
    return max(min(max(2 * size * samples, LEAST_FETCHED), MOST_FETCHED, left // 2), 0) if size else 0


def _amplification(source: Source, plan: EpochPlan, cache: int) -> float:
    kept = 0 < source.decodable_bytes <= cache
    if kept or not source.chunks.compressed or plan.shuffle == "none":
        return 1.0
    if plan.chunk_order is None:
        return amplification(len(source), source.chunks.rows, plan.batch_size) * source.chunks.spread
    drawn = plan.chunk_order.amplification() if isinstance(plan.chunk_order, WeightedChunkOrder) else 1.0
    return drawn * source.chunks.spread


def amplified(shuffle: Order, times: float, rows: int) -> str:
    """In words for people: how much is decoded in vain, and what would help.

    Args:
        shuffle: Of the order.
        times: As `ResourcePlan.amplification`.
        rows: Samples that share a compressed chunk.
    """
    if shuffle == "global":
        return (
            f"shuffle=global decodes {times:.1f} samples for each one used, since {rows} share a compressed chunk; "
            "shuffle=chunk decodes each chunk once per epoch, and cache_bytes keeps what was decoded"
        )
    return (
        f"shuffle=chunk decodes {times:.1f} samples for each one used, since windows reach from chunk to chunk, or few "
        "samples of a chunk are drawn; cache_bytes keeps what was decoded, and smaller chunks waste less"
    )


def slow(
    source: Source, options: LoaderOptions, footprint: ResourcePlan, order: EpochPlan, *, ahead: bool
) -> Iterator[str]:
    """What will take longer than it must, in words for people.

    Args:
        source: Where samples come from.
        options: Of the loader.
        footprint: Of the loader.
        order: One of its epochs.
        ahead: Whether anything is read ahead.
    """
    if footprint.workers.kind == "caller" and options.workers == "auto" and ahead:
        yield (
            f"workers=auto reads each batch of {source.name} when it is asked for, since Python code per sample "
            "would, in a thread, keep the training loop from running, and no reader process can be used "
            f"({footprint.workers.why}); workers=1 reads ahead in a thread, for code that releases the GIL"
        )
    if footprint.amplification > WORTH_A_WARNING:
        yield amplified(order.shuffle, footprint.amplification, source.chunks.rows)
