"""The waits of `StreamQueue` are enough, and each is needed, whatever the streams do in time.

`Traced` notes, in the order of the program, what touches memory and what waits, on an allocator that reuses memory at
once. Vector clocks tell whether waits order every two accesses to the same memory of which one writes.
"""

import collections
import contextlib
import itertools
import sys
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.device.training_loop import new_schedule, queue_on
from waiting.on_device.fake_streams import FakeStreams, raw

from lit_async_data.engine.device import queues
from lit_async_data.engine.device.queues import DeviceTransform, StreamQueue
from lit_async_data.engine.prefetch.iterator_feed import IteratorFeed, Packer, PinnedBufferPool
from lit_async_data.order.plan import BatchIndex


class Note(NamedTuple):
    """What one of host, side and compute does: it records or waits for an event, or touches memory."""

    who: str
    event: Any = None
    waits: bool = False
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()


def extent(memory):
    begin = memory.ctypes.data if isinstance(memory, np.ndarray) else memory.data_ptr()
    return begin, begin + memory.nbytes


class Traced(FakeStreams):
    """Notes what happens. ``without``: a guard of `StreamQueue`, by its name in `guards`, that is left out."""

    def __init__(self, slow="side", without=None):
        super().__init__(slow)
        self.notes, self.guards, self._without = [], set(), without

    def left_out(self, name):
        frame = sys._getframe(2)
        if frame.f_globals["__name__"] != queues.__name__:
            return False  # of the clock, or of the allocator
        guard = f"{name} in {frame.f_code.co_qualname.split('.')[1]}"
        if guard.endswith("_wait_for_compute"):
            guard += f" of {frame.f_back.f_code.co_name}"
        self.guards.add(guard)
        return guard == self._without

    def touch(self, who, reads=(), writes=()):
        self.notes.append(Note(who, reads=tuple(map(extent, reads)), writes=tuple(map(extent, writes))))

    def record(self, stream):
        event = super().record(stream)
        self.notes.append(Note(stream.name, event))
        return event

    def wait(self, stream, event):
        if not self.left_out("wait"):
            self.notes.append(Note(stream.name, event, waits=True))
            super().wait(stream, event)

    def happened(self, event, *, block):
        if self.left_out("happened"):
            return True
        if (happened := super().happened(event, block=block)) and not event.timed:
            self.notes.append(Note("host", event, waits=True))
        return happened

    def record_stream(self, value, stream):
        return self.left_out("record_stream") or super().record_stream(value, stream)

    def copy(self, destination, source):
        self.touch(self._current.name, [source], [destination])
        super().copy(destination, source)


def pieces(notes):
    cuts = sorted({cut for note in notes for touched in note.reads + note.writes for cut in touched})
    number = {cut: index for index, cut in enumerate(cuts)}
    return lambda places: {piece for begin, end in places for piece in range(number[begin], number[end])}


def races(notes):
    """Pairs of accesses to the same memory that no wait orders, by vector clocks."""
    clocks = {who: collections.Counter() for who in ("host", "side", "compute")}
    known, history, found, pieces_of = {}, collections.defaultdict(list), [], pieces(notes)
    for note in notes:
        clock = clocks[note.who]
        clock |= clocks["host"]  # what the host enqueues comes after what it has seen
        if note.waits:
            clock |= known[note.event]
        elif note.event is not None:
            known[note.event] = clock.copy()
        else:
            clock[note.who] += 1
            writes = pieces_of(note.writes)
            for piece in writes | pieces_of(note.reads):
                for other, time, wrote in history[piece]:
                    if (wrote or piece in writes) and clock[other.who] < time:
                        found.append((other, note))
                history[piece].append((note, clock[note.who], piece in writes))
    return found


class Holder:
    """An object that moves itself, knows nothing of streams, and hides its memory."""

    def __init__(self, streams, tensor):
        self._streams, self.tensor = weakref.ref(streams), tensor

    @property
    def streams(self):
        return self._streams()

    def to(self, device=None, **options):
        made = self.streams.empty(tuple(self.tensor.shape), self.tensor.dtype)
        self.streams.copy(made, self.tensor)
        return type(self)(self.streams, made)


class Noting(Holder):
    def record_stream(self, stream):
        self.streams.record_stream(self.tensor, stream)


def tensors(batch):
    leaves = batch.values() if isinstance(batch, dict) else batch
    return [leaf.tensor if isinstance(leaf, Holder) else leaf for leaf in leaves]


@contextlib.contextmanager
def queue_of(streams, kind, depth, transforms):
    """A queue of slots, or of packed batches; what every byte of a batch is; and all memory that the host wrote to."""
    memory, plan, cpu = [], new_schedule().plan, torch.device("cpu")
    moved = {"noting": [Noting], "moving": [Holder]}.get(kind, [])
    kept = []

    def noted(array):
        if array is not None:
            memory.append(array)
            streams.touch("host", writes=[array])
        return array

    def read(keyed, out):
        for array in out.values():
            noted(array).view(np.uint8)[...] = keyed.samples[0]

    def batch(value):
        large, small = (torch.full((size,), value, dtype=torch.uint8) for size in (100_000, 9))
        return [large, small, *(of(streams, large.clone()) for of in moved)]

    def transform(batch):
        """Reads the batch, and the one before, which it has kept until now."""
        given = tensors(batch)
        for tensor in kept:
            Holder(streams, tensor).to()
        kept[:] = given if transforms == "keeping" else []
        made = [Holder(streams, tensor).to() for tensor in given]
        return dict(enumerate(made if kind == "made" else tensors(made)))

    transform = transform if transforms else None
    if kind == "slots":
        with queue_on(streams, depth=depth, transform=transform, read=read, workers=0) as made:
            yield made, lambda key: plan(key.epoch).batch(key.step)[0], memory
        return
    pool = PinnedBufferPool(lambda nbytes: np.zeros(nbytes, np.uint8), most=depth + 1)
    claim = pool.claim
    pool.claim = lambda *given, **options: noted(claim(*given, **options))
    feed = IteratorFeed([batch(step) for step in range(5)], Packer(pool, is_pinned=lambda tensor: False), 0)
    yield StreamQueue(feed, streams, depth, transform and DeviceTransform(transform, cpu)), lambda key: key.step, memory
    feed.rest(wait=True)


def run(streams, story):
    """Two passes, the first of which is left before its end, and the second with copies under way. Each step changes
    its batch; in between somebody takes memory on both streams. Returns the values that a step did not see."""
    (kind, transforms, depth, late), wrong = story, []

    def overwritten(tensors, with_=0x77, wanted=None):
        """Has a kernel of the current stream look for a value, and write another."""
        contents = [raw(tensor) for tensor in tensors]

        def kernel():
            for content in contents:
                if wanted is not None and (content() != wanted).any():
                    wrong.append(wanted)
                content()[...] = with_

        streams.touch(streams._current.name, writes=tensors)
        streams.launch("kernel", kernel)

    def others(*, closed=False):
        for on in [contextlib.nullcontext] + [streams.on_side] * (closed or kind not in UNNOTED):
            with on():
                sizes = sorted({size for _, size in streams._pools}) * 2
                overwritten([streams.empty((size,), torch.uint8) for size in sizes])

    with queue_of(streams, kind, depth, transforms) as (made, value_of, memory):
        poll = lambda key: made.feed.get(key) if made.feed.has_room else None  # noqa: E731
        for epoch in range(2):
            key = BatchIndex(epoch, 0)
            for _ in range(4):
                made.feed.poll = (lambda key: None) if late else poll
                batch = made.take(key)
                made.prefetch(made.feed.following(key))
                overwritten(tensors(batch), 0xEE, value_of(key))
                del batch
                others()
                made.feed.poll, key = poll, made.feed.following(key)
                made.prefetch(key)
            if epoch or not late:  # else the first batch of the second pass comes unexpected
                made.close() if epoch else made.prefetch(BatchIndex(1, 0), copy=False)
            others(closed=epoch == 1)
        streams.touch("host", writes=memory)
    streams.synchronize()
    return wrong


KINDS, UNNOTED = ("slots", "noting", "moving", "made"), ("moving", "made")
STORIES = list(itertools.product(KINDS, (None, "plain"), (0, 1, 2), (False, True)))
STORIES += itertools.product(KINDS, ["keeping"], (1, 2), (False, True))
FOR_COMPUTE = [f"_wait_for_compute of {caller}" for caller in ("_move", "_submit", "close")]
GUARDS = [f"wait in {place}" for place in ("_submit", *FOR_COMPUTE, "_handed_out", "_let_go")]
GUARDS += ["happened in reclaim", "happened in close", "record_stream in _handed_out", "record_stream in _submit"]


@pytest.mark.parametrize("slow", ["side", "compute"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_that_touches_the_same_memory_is_ordered(kind, slow):
    guards = set()
    for story in (story for story in STORIES if story[0] == kind):
        streams = Traced(slow)
        assert run(streams, story) == []
        assert not races(streams.notes), story
        guards |= streams.guards
    assert guards <= set(GUARDS)


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_it_is_not(guard):
    for story in STORIES:
        streams = Traced(without=guard)
        run(streams, story)
        if races(streams.notes):
            return
    pytest.fail("nobody misses it")
