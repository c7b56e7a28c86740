"""The workers of a loader, the batches that they read together, and the memory that they take; pinned memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from lit_async_data import system
from lit_async_data.batch.spec import BatchLayout, BatchSpec, Bytes
from lit_async_data.errors import ConfigError, MemoryBudgetError
from lit_async_data.order.chunk_order import ChunkExtents
from lit_async_data.order.permutation import Indices
from lit_async_data.order.plan import EpochPlan, Schedule, Shares, amplification
from lit_async_data.sources.contract.source import LEAST_WIDTH, Source, StorageLayout
from lit_async_data.system import core_limit, ranks_here, usable_cores

if TYPE_CHECKING:
    import torch

    from lit_async_data.engine.hooks import Transformation
    from lit_async_data.options import LoaderOptions


log = logging.getLogger(__name__)

# The share of the machine's memory that one loader may take by default.
DEFAULT_SHARE = 0.25


def allocated(nbytes: int, *, pinned: bool) -> Bytes:
    """Memory for one slot: uint8, page-aligned, not touched yet; a warning is logged if it cannot be pinned."""
    if pinned:
        import torch

        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            _say_pageable(nbytes, str(error))
    # An anonymous map rather than np.empty: its memory returns to the system at once.
    # Private, so that a forked child cannot write to it.
    try:
        return np.frombuffer(system.private_memory(nbytes), np.uint8)
    except OSError as error:
        ways = "set a smaller batch_size or queue_depth, or a higher limit (ulimit -v)"
        what = f"the system refuses {readable(nbytes)} for a slot ({error.strerror}); {ways}"
        raise MemoryBudgetError(what, "memory_budget") from error


def pinned_bytes(nbytes: int) -> int:
    """Bytes that torch pins for a request: the next power of two."""
    return 1 << (nbytes - 1).bit_length()


def register(memory: Bytes, device: torch.device) -> None:
    """Pin memory for a CUDA device until the array is freed; a warning is logged if that fails."""
    address = memory.ctypes.data
    if code := _called(device, "cudaHostRegister", address, memory.nbytes, 0):
        _say_pageable(memory.nbytes, f"CUDA error {code}")
    else:
        weakref.finalize(memory, _unregister, device, address, os.getpid()).atexit = False


def _unregister(device: torch.device, address: int, process: int) -> None:
    if os.getpid() == process:  # a fork has the array, and no CUDA
        _called(device, "cudaHostUnregister", address)


def _called(device: torch.device, name: str, *arguments: int) -> int:
    """The error code of a call of the CUDA runtime; 0 for success."""
    import torch

    with torch.cuda.device(device):  # CUDA would open a context on the current device, of some hundred MB
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if code := int(getattr(runtime, name)(*arguments)):
            # CUDA keeps the error until the next kernel is launched, where torch raises it: so one is launched here.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
    return code


@functools.cache
def _say_pageable(nbytes: int, why: str) -> None:  # once, and not for each slot
    log.warning("pinning %d bytes failed, copies to the device will be slower: %s", nbytes, why)


def pinned(value: Any) -> Any:
    """A pinned copy; the object itself if it has no ``pin_memory``, or cannot be pinned."""
    try:
        there = value.pin_memory() if callable(getattr(value, "pin_memory", None)) else value
    except RuntimeError:  # its copy to the device will be slower
        return value
    return value if there is None else there  # it was pinned in place


@dataclasses.dataclass(frozen=True)
class Budget:
    slots: int  # slots before the first batch: to be filled, filled, and one for the batch handed out
    slot_bytes: int  # bytes of one slot
    limit: int  # the most bytes that the loader may hold
    decoded: int = 0  # bytes of decoded chunks that are in use
    cache: int = 0  # bytes of decoded chunks that are kept for good
    scratch: int = 0  # bytes of all workers for samples that are yet to be transformed or copied to a slot
    shuffle_chunks: int = 0  # below this number, less is decoded; 0 if no number helps

    @property
    def total(self) -> int:
        return self.slots * self.slot_bytes + self.decoded + self.cache + self.scratch

    @property
    def most_slots(self) -> int:
        return self.slots + (self.limit - self.total) // self.slot_bytes

    @property
    def _parts(self) -> str:
        named = {"decoded": self.decoded, "cache": self.cache, "scratch": self.scratch}
        parts = [f"{readable(nbytes)} {name}" for name, nbytes in named.items() if nbytes]
        return " + ".join([f"{self.slots} slots of {readable(self.slot_bytes)}", *parts])

    def check(self) -> None:
        if self.total > self.limit:
            smaller, fewer = ["batch_size or queue_depth"], f"shuffle_chunks (below {self.shuffle_chunks})"
            smaller += [fewer] * (self.shuffle_chunks > 1)
            smaller += ["cache_bytes"] * (self.cache > 0)
            limit = f"{self.limit} ({readable(self.limit)}); set a smaller {', '.join(smaller)}, or raise it"
            what = f"{self._parts} need {self.total} bytes ({readable(self.total)}), over the budget of {limit}"
            raise MemoryBudgetError(what, "memory_budget")

    def __str__(self) -> str:
        return f"{self._parts} = {readable(self.total)}, of at most {readable(self.limit)}"


def default_budget(ranks: int | None = None) -> int:
    return int(DEFAULT_SHARE * system.memory() / system.ranks_here(ranks))


def readable(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


# The least number of batches in a window of `WorkerTuner`; fewer workers have begun the first of them.
WINDOW = 16
# Another worker is tried if the loop waits for more than this share of the time. It stays if it brings this share of
# the possible gain: a second worker can halve the waiting.
WORTH_A_WORKER, WORTH_KEEPING = 0.05, 0.5


@dataclasses.dataclass
class WorkerTuner:
    """Adds a worker while the loop waits for batches, and removes it if that does not help. Not thread-safe."""

    count: int  # to begin with
    most: int
    window_s: float  # the least seconds of a window
    clock: Callable[[], float] = time.monotonic
    # The first batch and the first moment of the window, and the seconds waited in it.
    _first: int | None = None
    _began: float = 0.0
    _waited: float = 0.0
    # Seconds waited per batch before the worker on trial began; None without a trial.
    _before: float | None = None

    @property
    def settled(self) -> bool:
        return self.count >= self.most and self._before is None

    def stay(self, count: int) -> None:
        self.count = self.most = count
        self._before = None

    def waited(self, seconds: float, batches: int) -> int:
        """Count a wait of the loop for a batch; returns the number of workers from now on."""
        if self.settled:
            return self.count
        now = self.clock()
        if self._first is None:
            self._first, self._began, self._waited = batches, now, 0.0
            return self.count
        self._waited += seconds
        if batches - self._first >= WINDOW and now - self._began >= self.window_s:
            self._judge(self._waited / (batches - self._first), self._waited / max(now - self._began, 1e-9))
            self._first = None
        return self.count

    def _judge(self, per_batch: float, share: float) -> None:
        if self._before is not None and per_batch > (1 - WORTH_KEEPING / self.count) * self._before:
            self.stay(self.count - 1)
            return
        self._before = None
        if share > WORTH_A_WORKER and self.count < self.most:
            self.count, self._before = self.count + 1, per_batch


# Two threads read 1.5 to 1.9 times as fast as one; more gain less, since Python code between chunks holds the GIL.
MOST_THREADS = 4
# Windows of a `WorkerTuner`. A process takes a part of a second to start.
THREAD_S, PROCESS_S = 0.25, 1.0
# Reasons to read in another process, by `StorageLayout.reading`, or because of host hooks.
_COSTS = {
    "opened": "a file is opened for each sample",
    "locked": "reading holds a lock",
    "decoded": "samples are decoded",
    "python": "Python code reads the samples",
    "transformed": "Python code transforms the samples",
}


class Workers(NamedTuple):
    # ``"caller"``: the loop itself, when it asks for a batch. ``"thread"``: threads of this process. ``"process"``:
    # threads of a reader process, or several processes, which leave the GIL to the loop.
    kind: Literal["caller", "thread", "process"]
    threads: int  # number of threads, or processes, to begin with; 0 for the caller
    why: str  # the reason for the kind, for people
    most: int = 0  # the most workers later, if the loop waits for batches
    apart: bool = False  # whether each worker is a process, since the work holds the GIL
    shared: bool = False  # whether these processes share each slot, so that only one decodes a chunk
    by_auto: int = 1  # the most workers that ``workers=auto`` starts

    @classmethod
    def of(cls, wanted: Wanted) -> Workers:
        source, options, hooks = wanted.source, wanted.options, wanted.hooks
        if not wanted.ahead or options.workers == 0:
            return cls("caller", 0, "workers=0" if wanted.ahead else "nothing is read ahead")
        chunks, free = source.chunks, cores(wanted.ranks)
        work = "transformed" if hooks is not None else chunks.reading
        kind, why = _kind(work, options, wanted.refusal or system_refusal(), free)
        python = work in ("transformed", "python")
        apart = kind == "process" and python
        shared = apart and chunks.compressed and bool(chunks.runs) and (chunks.rows > 1 or options.cache_bytes > 0)
        shared = shared and not (hooks is not None and hooks.takes_batches)
        most = free if apart else min(free, MOST_THREADS) if work == "decoded" else 1
        if options.workers != "auto":
            return cls(kind, options.workers, why, options.workers, apart, shared and options.workers > 1, most)
        if python and kind == "thread" and options.worker_kind == "auto" and has_gil():
            return cls("caller", 0, why)
        return cls(kind, 1, why, most, apart, shared and most > 1, most)

    @property
    def most_threads(self) -> int:
        return 1 if self.apart else self.most

    @property
    def copies(self) -> int:
        return self.most if self.apart and not self.shared else 1  # processes that each cache any chunk for themselves

    @property
    def seeds(self) -> bool:
        """Whether code of the user has the global random generators for itself."""
        return self.kind == "process" and self.most_threads == 1

    def tuner(self) -> WorkerTuner | None:
        if self.most == self.threads:
            return None
        return WorkerTuner(self.threads, self.most, PROCESS_S if self.apart else THREAD_S)

    def __str__(self) -> str:
        if self.kind == "caller":
            return f"no workers ({self.why}): the training loop reads"
        what = "reader process" if self.apart else "reader thread"
        several = f"{self.threads} {what}{'es' if self.apart else 's'}" if self.threads > 1 else f"1 {what}"
        text = several if self.most == self.threads else f"{several}, at most {self.most}"
        inside = self.kind == "thread" or self.apart
        return f"{text} ({self.why})" if inside else f"a reader process with {text} ({self.why})"


def _kind(work: str, options: LoaderOptions, refusal: str, cores: int) -> tuple[Literal["thread", "process"], str]:
    if options.worker_kind == "process":
        if refusal:
            raise ConfigError(f"process is not possible here: {refusal}; set worker_kind=thread", "worker_kind")
        return "process", "worker_kind=process"
    if options.worker_kind == "thread":
        return "thread", "worker_kind=thread"
    against = {
        "reading is a copy": work == "copied",
        "there is no GIL": not has_gil(),
        refusal: bool(refusal),
        "no core is free": cores < 2,
    }
    why = next((reason for reason, holds in against.items() if holds), None)
    return ("process", _COSTS[work]) if why is None else ("thread", why)


def system_refusal() -> str:
    return "" if os.name == "posix" else f"{sys.platform} passes no descriptors to a new process"


def cores(ranks: int | None = None) -> int:
    """This rank's share of the cores that this process may use, or all, if SLURM has given each task its own."""
    limit = core_limit()
    here = usable_cores() if limit is None else min(usable_cores(), int(limit))
    tasks, own = (os.environ.get(f"SLURM_{name}", "") for name in ("NTASKS", "CPUS_PER_TASK"))
    by_slurm = "LOCAL_WORLD_SIZE" not in os.environ and tasks.isdigit() and int(tasks) > 1
    alone = by_slurm and own.isdigit() and usable_cores() <= int(own)
    return max(here if alone else here // ranks_here(ranks), 1)


def has_gil() -> bool:
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


# Batches between the batch that is read and the batch whose files are fetched.
AHEAD = 8
# As many more of a source behind a network, in case that its order has no chunks.
REMOTE_AHEAD = 24
# The most bytes and batches that are coalesced, which means read together into one slot (docs/design/engine.md).
COALESCED_BYTES, COALESCED_BATCHES = 12 * 2**20, 32
# The most that they take of the budget without chunks: more slots need room.
COALESCED_SHARE = 0.25
# Samples decoded per sample used.
WORTH_A_WARNING = 1.5


@dataclasses.dataclass(frozen=True)
class ResourcePlan:
    workers: Workers
    layout: BatchLayout  # number and places of the batches in a slot
    budget: Budget
    # Decoded chunks in use at a time, of the group that is dealt and of the next; 0 without an order by chunks.
    chunks: int
    amplification: float = 1.0  # samples decoded per sample used; see `plan.amplification`
    # How several reader processes share each slot.
    shares: Shares = dataclasses.field(default_factory=functools.partial(Shares, None))

    def __repr__(self) -> str:
        return f"<ResourcePlan of {self.workers}; {self.budget}>"

    @classmethod
    def of(cls, wanted: Wanted) -> ResourcePlan:
        plan = wanted.coalesced(wanted.within_limit())
        budget, source, schedule = plan.budget, wanted.source, wanted.schedule
        chunks, kept = source.chunks, budget.cache > 0
        extents = ChunkExtents(chunks.runs) if chunks.rows > 1 or (kept and chunks.runs) else None
        return dataclasses.replace(
            plan,
            amplification=_amplification(source, schedule.plan(0), budget.cache // plan.workers.copies, plan.chunks),
            shares=Shares(extents, kept, chunks.order),
        )

    def reserve(self, source: Source, parts: int = 1) -> Callable[[], None]:
        """Reserve memory of one of ``parts`` processes for decoded chunks; call the result to give it back."""
        return source.reserve(-(-self.chunks // (parts if self.workers.shared else 1)), self.budget.cache // parts)


@dataclasses.dataclass(frozen=True)
class Wanted:
    source: Source
    spec: BatchSpec
    options: LoaderOptions
    schedule: Schedule
    ahead: bool  # whether anything is read ahead
    pinned: bool = False  # whether a device copies from the slots
    hooks: Transformation | None = None
    refusal: str = ""  # why there can be no reader process
    ranks: int | None = None  # the ranks that share this machine
    concat: Mapping[str, Indices] = dataclasses.field(default_factory=dict)  # lengths of concatenated samples, by field

    @functools.cached_property
    def limit(self) -> int:
        return self.options.memory_budget or default_budget(self.ranks)

    @property
    def scratch(self) -> int:
        return 0 if self.hooks is None else self.hooks.scratch_bytes

    def within_limit(self) -> ResourcePlan:
        """Single batches, with as many workers as the budget allows."""
        limit, workers = self.limit, Workers.of(self)
        if self.scratch:  # takes at most a quarter of the budget
            most = max(workers.threads, min(workers.most, limit // (4 * self.scratch)))
            workers = workers._replace(most=most)
        plan = self.planned(workers, 1)
        while plan.budget.total > limit and workers.most > max(workers.threads, 1):
            workers = workers._replace(most=workers.most - 1)
            plan = self.planned(workers, 1)
        return plan

    def coalesced(self, plan: ResourcePlan) -> ResourcePlan:
        workers, budget = plan.workers, plan.budget
        whole = self.hooks is not None and self.hooks.takes_batches
        reading = self.source.chunks.reading
        suits = reading not in ("locked", "python")
        if not workers.threads:
            # The loop waits for all batches that are read together, but a copy takes less time than the shared calls.
            suits = reading == "copied" and self.hooks is None
        if whole or not self.ahead or plan.layout.alone or not suits:
            return plan
        # Room for the slots, their scratch memory and the chunks that are decoded for them.
        room = int(COALESCED_SHARE * (self.limit - budget.decoded - budget.cache)) + budget.total
        room = min(room - budget.slots * budget.slot_bytes, self.limit)
        # Samples may be large before a transform, and small after it.
        batches = coalesced_batches(max(plan.layout.nbytes, self.scratch), self.schedule.steps)
        plan = self.planned(workers, batches)
        while batches > 1 and plan.budget.total > room:
            batches -= 1
            plan = self.planned(workers, batches)
        return plan

    def planned(self, workers: Workers, batches: int) -> ResourcePlan:
        """The plan for workers that read ``batches`` batches together, without the memory of files read ahead."""
        source, options, schedule, hooks = self.source, self.options, self.schedule, self.hooks
        plan, most = schedule.plan(0), max(workers.most, 1)
        layout = BatchLayout(
            self.spec,
            schedule.capacity,
            batches,
            buckets=schedule.buckets,
            concat=self.concat,
            repeats=plan.repeats or options.on_error == "substitute",
            least=options.batch_size if options.pad_last else 0,
        )
        slots = max(options.queue_depth, workers.threads) + 1 if workers.threads else 2
        chunks = _chunks(plan, most * batches * plan.batch_size * plan.world_size)
        needs = source.memory(chunks)
        cacheable = needs.cacheable * workers.copies
        if workers.shared and options.cache_bytes:
            # Shares by stored chunks are uneven, and samples may reach into a chunk of another process.
            needs = source.memory(chunks := 2 * chunks)
            cacheable = int(cacheable * source.chunks.spread) + most * source.memory(1).decoded
        decoded = needs.decoded * workers.copies + most * needs.per_thread
        cache = min(options.cache_bytes, cacheable)
        scratch = most * batches * self.scratch
        if hooks is None:  # a process reads its share into scratch memory, and then copies it to the slot
            scratch = most * (layout.padded_bytes + workers.shared * layout.nbytes)
        # Slots of reader processes are pinned by `register`, which rounds nothing up.
        slot_bytes = pinned_bytes(layout.nbytes) if self.pinned and workers.kind != "process" else layout.nbytes
        width = max((each.width for each in plan.deck.chunk_orders), default=0) * (decoded > 0)
        fewer = width if width <= LEAST_WIDTH else width * source.chunks.chunks_per_run
        budget = Budget(slots, slot_bytes, self.limit, decoded, cache, scratch, fewer)
        return ResourcePlan(workers, layout, budget, chunks)


def _chunks(plan: EpochPlan, in_hand: int) -> int:
    """Decoded chunks in use at a time, if the workers together read ``in_hand`` samples."""
    most = 0
    for order in plan.deck.chunk_orders:
        # Groups that are read at a time: as many as have ``in_hand`` samples, and one more if batches wait for samples
        # of their length.
        own = -(-in_hand * order.length // plan.length)
        groups = -(-own // (order.width * order.rows)) + (plan.decks.buckets is not None)
        most = max(most, min((groups + 1) * order.width, order.chunks))
    return most


def coalesced_batches(batch_bytes: int, most: int) -> int:
    return max(min(COALESCED_BYTES // batch_bytes, COALESCED_BATCHES, most), 1)


def _amplification(source: Source, plan: EpochPlan, cache: int, chunks: int) -> float:
    needs = source.memory(chunks)  # perhaps of all chunks
    once = plan.decks.shuffle == "none" and plan.decks.buckets is None
    if once or not source.chunks.compressed or 0 < needs.cacheable <= max(cache, needs.decoded):
        return 1.0
    if plan.deck.chunk_orders:
        return source.chunks.spread
    of, rows = source.chunks, source.chunks.rows / source.chunks.chunks_per_run
    alone = of.alone / (of.amplification or 1)  # 0 but for patches
    return alone or amplification(len(source), rows, plan.batch_size, of.chunks_per_sample)


def decoded_again(times: float, chunks: StorageLayout) -> str:
    """How much a global shuffle decodes in vain, why, and a remedy."""
    if chunks.alone:
        less = f"; shuffle=chunk decodes {chunks.amplification:.1f}" * (times > 1)
        return f"about {chunks.alone:.1f} bytes are decoded for each one that patches use{less}"
    rows = math.ceil(chunks.rows / chunks.chunks_per_run)
    why = [f"{rows} share a compressed chunk"] * (rows > 1)
    why += [f"each reads about {chunks.chunks_per_sample:.1f} chunks"] * (not why or chunks.chunks_per_sample >= 1.5)
    often = "once" if chunks.spread == 1 else f"{chunks.spread:.1f} times"
    again = f"{times:.1f} samples are decoded for each one used, since {' and '.join(why)}"
    return f"{again}; shuffle=chunk decodes each chunk {often}"


def batches_ahead(source: Source, order: EpochPlan, together: int) -> int:
    """Batches whose files are fetched at a time, if ``together`` batches are read into a slot."""
    batches = AHEAD + together
    if source.chunks.remote:  # two groups of chunks, since the next one is decoded before its first batch is read
        group = max((order.length / each.groups for each in order.deck.chunk_orders), default=0)
        batches += max(math.ceil(2 * group / (order.batch_size * order.world_size)), REMOTE_AHEAD)
    return batches


def fetched_twice(source: Source, footprint: ResourcePlan, order: EpochPlan) -> Iterator[str]:
    """A warning if the memory for remote files has no room for twice what is fetched ahead."""
    remote, widths = source.chunks.remote, [each.width for each in order.deck.chunk_orders]
    if remote is None or remote.room is None:
        return
    # Ranks share the chunks of a group, as far as they can; in another order, each sample brings all of its block.
    shared = [order.world_size // math.gcd(width, order.world_size) for width in widths]
    whole = max((run.rows for run in source.chunks.runs), default=1) if order.decks.shuffle == "global" else 1
    samples = 2 * batches_ahead(source, order, footprint.layout.batches) * order.batch_size
    needed = min(math.ceil(samples * max(shared, default=whole) * remote.nbytes / len(source)), remote.nbytes)
    if remote.room < needed:
        cure = f"cache={remote.folder or 'FOLDER'} with a cache_limit that has room for all files"
        yield (
            f"{source.name}: parts of files are dropped before they are used, and fetched again and again, since "
            f"{remote.room} bytes stay in memory, and the order needs {needed}; set "
            f"{'' if remote.folder else f'cache_limit={needed}, '}smaller shuffle_chunks or batch_size, or {cure}"
        )


def slow(
    source: Source, options: LoaderOptions, footprint: ResourcePlan, order: EpochPlan, *, ahead: bool
) -> Iterator[str]:
    """Warnings of what makes reading slow, each with a remedy."""
    yield from fetched_twice(source, footprint, order)
    if footprint.workers.kind == "caller" and options.workers == "auto" and ahead:
        yield (
            f"workers=auto reads each batch of {source.name} when it is asked for, since Python code per sample "
            "would, in a thread, keep the training loop from running, and no reader process can be used "
            f"({footprint.workers.why}); workers=1 reads ahead in a thread, for code that releases the GIL"
        )
    if (times := footprint.amplification) <= WORTH_A_WARNING:
        return
    if order.decks.shuffle == "global":
        yield f"shuffle=global: {decoded_again(times, source.chunks)} per epoch, and cache_bytes keeps decoded chunks"
    else:
        yield (
            f"shuffle=chunk decodes {times:.1f} samples for each one used, since windows reach from chunk to chunk; "
            "cache_bytes keeps decoded chunks, and smaller chunks waste less"
        )
