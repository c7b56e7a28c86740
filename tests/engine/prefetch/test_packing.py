"""Batches of any form on their way to a device that is not there."""

import collections
import dataclasses
import threading
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.failures import raising
from support.threads.waits import until
from torch.nn.utils.rnn import pack_sequence
from waiting.on_device.fake_streams import FakeStreams, raw

from lit_async_data import prefetched
from lit_async_data.batch.spec import SMALL_BYTES
from lit_async_data.batch.tree import flatten
from lit_async_data.engine.device.queues import StreamQueue
from lit_async_data.engine.pipeline.pipeline import Lease
from lit_async_data.engine.prefetch.iterator_feed import (
    IteratorFeed,
    Packer,
    PinnedBufferPool,
    ReaderThread,
    Unpacked,
    dense,
    raw_bytes,
)
from lit_async_data.engine.resources import pinned
from lit_async_data.order.plan import BatchIndex

STEPS = 6


def numbers(shape, seed=0, dtype=torch.int16):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 100, shape)).to(dtype)


def detection(step):
    """A batch of object detection, as ``tuple(zip(*batch))`` collates it: images of different sizes, and targets."""
    images = [numbers((3, 100 + 40 * step, 90 + number), seed=step + number) for number in range(2)]
    targets = [
        {"boxes": numbers((step % 3, 4), seed=step), "labels": numbers((step % 3,), seed=step), "name": f"{step}.jpg"}
        for _ in images
    ]
    return tuple(zip(*zip(images, targets)))


class Step:
    """A training step: kernels that read the batch when they run and record the paths of wrong tensors."""

    def __init__(self, streams):
        self._streams = streams
        self.wrong = []
        self.seen = 0

    def __call__(self, batch, expected_batch):
        given = batch, expected_batch
        tensors, expected = (flatten(each, lambda value: isinstance(value, torch.Tensor))[0] for each in given)
        assert list(tensors) == list(expected)
        for path, tensor in tensors.items():
            host = dense(expected[path])
            assert (tensor.shape, tensor.dtype, tensor.stride()) == (host.shape, host.dtype, host.stride()), path
            if not tensor.numel():
                continue
            content, values = raw(tensor), raw_bytes(host).copy()

            def kernel(content=content, values=values, path=path):
                self.seen += 1
                if not np.array_equal(content(), values):
                    self.wrong.append(path)

            self._streams.launch("step", kernel)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    image: Any
    name: str


def everything(step):
    """Whatever a tensor can be, in whatever it can stand in."""
    image = numbers((2, 3, 90, 80), seed=step)
    return {
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "expanded": numbers((3, 1), seed=step).expand(3, 70_000),
        "part": numbers((60, 2000), seed=step)[:, 3:1500],
        "transposed": numbers((400, 300), seed=step).t(),
        "number": torch.tensor(float(step)),
        "empty": torch.empty((0, 4)),
        "flags": numbers((5,), seed=step) > 50,
        "half": numbers((7,), seed=step, dtype=torch.bfloat16),
        "complex": torch.tensor([step + 1j], dtype=torch.complex64).conj(),
        "negative": torch.tensor([step - 1j], dtype=torch.complex64).conj().imag,
        "twice": [image, image],
        "point": Point(numbers((4,), seed=step), None),
        "sample": Sample(numbers((200, 200), seed=step), f"{step}"),
        "array": np.arange(step),
        "text": "text",
    }


def same_shapes(step):
    return [numbers((4, 3, 70, 70), seed=step), numbers((4,), seed=step)]


class Memory:
    def __init__(self):
        self.sizes = []
        self.threads = set()

    def __call__(self, nbytes):
        self.sizes.append(nbytes)
        self.threads.add(threading.current_thread())
        return np.zeros(nbytes, np.uint8)


def packer_of(memory=None, *, most=1):
    """One that takes no tensor for pinned."""
    return Packer(PinnedBufferPool(memory or Memory(), most=most), is_pinned=lambda tensor: False)


def trained(streams, make, *, depth=2, ahead=2, epochs=2, late=False, packer=None, memory=None):
    """Passes as a training loop would make them; the places at which a step saw wrong values.

    With ``late``, host batches are not ready at the start of a step but at its end.
    """
    step = Step(streams)
    packer = packer or packer_of(memory, most=depth + ahead + 1)
    feed = IteratorFeed(EpochCursor(make), packer, ahead)
    queue = StreamQueue(feed, streams, depth, None)
    poll = feed.poll
    try:
        for epoch in range(epochs):
            for number in range(STEPS):
                batch = queue.take(BatchIndex(epoch, number))
                feed.poll = (lambda key: None) if late else poll
                queue.prefetch(BatchIndex(epoch, number + 1))  # on_train_batch_start
                feed.poll = feed.get if late else poll
                step(batch, make(number))
                del batch
                queue.prefetch(BatchIndex(epoch, number + 1))  # on_train_batch_end
            with pytest.raises(StopIteration):
                queue.take(BatchIndex(epoch, STEPS))
            queue.close()
        streams.synchronize()
    finally:
        queue.close()
        feed.rest(wait=True)
    assert step.seen >= epochs * STEPS
    return step.wrong


class EpochCursor:
    def __init__(self, make):
        self._make = make

    def __iter__(self):
        return map(self._make, range(STEPS))


@pytest.mark.parametrize("slow", ["side", "compute"])
@pytest.mark.parametrize(("depth", "ahead", "late"), [(0, 2, False), (1, 0, True), (2, 2, True), (4, 0, False)])
@pytest.mark.parametrize("make", [detection, everything, same_shapes])
def test_every_step_sees_its_own_batch(slow, depth, ahead, late, make):
    assert trained(FakeStreams(slow), make, depth=depth, ahead=ahead, late=late) == []


def test_blocks_are_allocated_once_by_the_consumer():
    memory = Memory()
    for _ in range(2):
        trained(FakeStreams("side"), same_shapes, memory=memory, epochs=5)
    assert len(memory.sizes) == 2 * 5
    assert len(set(memory.sizes)) == 1
    assert memory.threads == {threading.main_thread()}


def test_a_block_is_not_claimed_twice():
    staging = PinnedBufferPool(Memory(), most=2)
    assert staging.claim(100, allocate=False) is None
    one, other = staging.claim(100, allocate=True), staging.claim(100, allocate=False)
    assert one is not other
    for allocate in (False, True):
        assert staging.claim(1, allocate=allocate) is None  # all are in use
    staging.give_back(other)
    assert staging.claim(1, allocate=False) is other


def test_what_only_the_consumer_can_pack_is_read_no_further_before_that_is_done():
    """The first batch, and one that is larger than those before. A batch behind it might take the memory."""
    memory, batches = Memory(), [torch.zeros(count) for count in (9, 9, 9_000, 9)]
    packer = packer_of(memory, most=3)
    reader = ReaderThread(iter(batches), packer, depth=3)
    reader._reader()
    for unpacked in (True, False, True, False):
        until(reader, lambda: reader.pulled)
        assert isinstance(reader.pulled[0].host, Unpacked) is unpacked
        assert not (unpacked and reader._may_read)
        host = reader.get().host
        assert not isinstance(host, Unpacked)
        host.release()
    assert memory.threads == {threading.main_thread()}
    assert reader.close()


def test_without_a_free_block_nothing_is_read_or_packed():
    staging = PinnedBufferPool(Memory(), most=2)
    feed = IteratorFeed([torch.zeros(9), torch.zeros(9_000), torch.zeros(9)], Packer(staging, lambda tensor: False), 2)
    first = feed.get(BatchIndex(0, 0))
    until(feed.reader, lambda: feed.reader.pulled)  # one that is too large for the block that is left
    other = staging.claim(1, allocate=False)
    assert not feed.has_room
    assert not feed.reader._may_read
    assert feed.poll(BatchIndex(0, 1)) is None
    staging.give_back(other)
    assert feed.has_room
    second = feed.poll(BatchIndex(0, 1))
    assert second.nbytes == 36_000
    assert not feed.reader._may_read
    first.release()
    assert feed.reader._may_read or feed.reader.pulled
    feed.rest(wait=True)


def test_a_block_is_given_back_where_packing_fails(monkeypatch):
    packer, batch, fails = packer_of(), torch.zeros(5), raising(MemoryError("mine"))
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr("lit_async_data.engine.prefetch.iterator_feed.raw_bytes", fails)
            with pytest.raises(MemoryError, match="mine"):
                packer(batch, here=True)
        packer(batch, here=True).release()


def test_blocks_beyond_what_there_may_be_go_when_they_are_given_back():
    staging = PinnedBufferPool(Memory(), most=3)
    block = staging.claim(100, allocate=True)
    staging.most = 1
    staging.give_back(block)
    assert staging._count == 2
    while (block := staging.claim(1, allocate=False)) is not None and staging._count > 1:
        staging.give_back(block)
    assert staging._count == 1


def test_pinned_and_pageable_tensors_may_come_together():
    def is_pinned(tensor):
        return tensor.ndim == 4

    packer = Packer(PinnedBufferPool(Memory(), most=5), is_pinned)
    assert trained(FakeStreams("side"), lambda step: HELD[step], packer=packer) == []


HELD = [same_shapes(step) for step in range(STEPS)]  # a copy reads a pinned tensor by its address


def test_pinned_tensors_live_until_they_have_been_copied():
    """1. The copy is enqueued on a slow side stream, and the loader drops the batch. 2. The memory of copies that have
    happened is asked back. 3. The copy runs."""
    streams = FakeStreams("side")
    lease = Lease(np.zeros(100_000, np.uint8))
    alive = weakref.ref(lease)
    batches = collections.deque([torch.zeros(100_000), torch.from_numpy(np.asarray(lease))])
    del lease
    packer = Packer(PinnedBufferPool(Memory(), most=1), is_pinned=lambda tensor: True)
    feed = IteratorFeed((batches.popleft() for _ in range(2)), packer, 0)
    queue = StreamQueue(feed, streams, 1, None)
    queue.take(BatchIndex(0, 0))
    feed.poll = feed.get
    queue.prefetch(BatchIndex(0, 1))
    queue.prefetch(BatchIndex(0, 1))
    assert alive() is not None
    streams.synchronize()
    queue.close()
    assert alive() is None


def test_small_tensors_travel_in_one_block_and_large_ones_alone():
    packer = packer_of()
    small, large = torch.zeros(SMALL_BYTES, dtype=torch.uint8), torch.zeros(SMALL_BYTES + 1, dtype=torch.uint8)
    host = packer([small, large, small.clone()], here=True)
    assert list(host.large) == ["batch[1]"]
    assert host.block.numel() == 2 * SMALL_BYTES


class Subclass(torch.Tensor): ...


OWN = {
    "packed": lambda: pack_sequence([torch.arange(3.0), torch.arange(2.0)]),
    "subclass": lambda: torch.arange(3.0).as_subclass(Subclass),
    "parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "graph": lambda: torch.arange(3.0).requires_grad_() * 2,
    "nested": lambda: torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(3.0), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:.*(beta state|deprecated):UserWarning")
@pytest.mark.parametrize("name", OWN)
def test_tensors_that_are_more_than_values_move_themselves(name):
    value = OWN[name]()
    packer = packer_of()
    host = packer([value], here=True)
    assert list(host.movable) == ["batch[0]"]
    assert not host.large
    queue = StreamQueue(IteratorFeed([[value]], packer, 0), FakeStreams("side"), 0, None)
    made = queue.take(BatchIndex(0, 0))[0]
    assert type(made) is type(value)
    assert getattr(made, "requires_grad", None) == getattr(value, "requires_grad", None)
    queue.close()


def test_objects_are_pinned_in_their_own_way_or_stay_as_they_are():
    assert pinned(SimpleNamespace(pin_memory=lambda: "pinned")) == "pinned"
    for unpinned in (SimpleNamespace(pin_memory=lambda: None), SimpleNamespace(pin_memory=True)):
        assert pinned(unpinned) is unpinned
    assert pinned(stubborn := SimpleNamespace(pin_memory=raising(NotImplementedError))) is stubborn
    assert pinned(7) == 7


def test_an_object_that_fails_to_move_is_an_error_at_its_place():
    class Broken:
        to = raising(ZeroDivisionError("mine"))

    streams = FakeStreams("side")
    memory = Memory()
    batches = [[torch.zeros(3), Broken()], [torch.ones(3), 2]]
    packer = Packer(PinnedBufferPool(memory, most=1), is_pinned=lambda tensor: False)
    queue = StreamQueue(IteratorFeed(batches, packer, 0), streams, 0, None)
    with pytest.raises(ZeroDivisionError, match="mine"):
        queue.take(BatchIndex(0, 0))
    assert queue.take(BatchIndex(0, 1))[1] == 2  # its block, the only one, is free again
    streams.synchronize()
    queue.close()


class Encoding(collections.UserDict):
    def to(self, device, **options):
        return Encoding({key: value.to(device) for key, value in self.items()})


def described(value):
    """A value as what can be compared, with its type at every level."""
    inside = value
    if isinstance(value, torch.Tensor):
        inside = value.dtype, value.shape, value.is_contiguous(), value.tolist()
    elif isinstance(value, np.ndarray):
        inside = value.dtype, value.tolist()
    elif isinstance(value, collections.abc.Mapping):
        inside = [(key, described(each)) for key, each in value.items()]
    elif isinstance(value, tuple | list):
        inside = [described(each) for each in value]
    elif dataclasses.is_dataclass(value):
        inside = described(vars(value))
    return type(value), inside


def t(*shape, dtype=torch.float32):
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape).to(dtype)


class Slotted(dict):
    """A dict with attributes, as configurations and batches of some libraries are."""


FORMS = {
    "an OrderedDict": lambda: collections.OrderedDict(b=t(2), a=t(1)),
    "a subclass of dict": lambda: Slotted(x=t(2)),
    "a UserDict that moves": lambda: Encoding(x=t(2)),
    "all in one another": lambda: {"a": [Point(({"b": t(2)},), Sample(t(1), "name"))], 1: None, ("k",): "text"},
    "strings, numbers, None": lambda: ["text", b"bytes", 1, 2.5, 1j, None, True, ...],
    "arrays": lambda: {"n": np.arange(3), "s": np.array(["a", "bc"]), "x": t(2)},
    "no element": lambda: {"x": torch.zeros(0, 3), "y": torch.zeros(2, 0, dtype=torch.uint8)},
    **{
        str(dtype): lambda dtype=dtype: {"x": t(3, 2, dtype=dtype), "y": t(1)}
        for dtype in (torch.bool, torch.bfloat16, torch.float8_e4m3fn)
    },
}


@pytest.mark.parametrize("kind", FORMS)
def test_a_batch_of_any_form_arrives_on_a_device_as_it_is(kind, streamed):
    streamed(FakeStreams("side"))
    # twice in a row, and once smaller ones in between: memory is used again
    given = [FORMS[kind](), {"x": t(7)}, FORMS[kind](), FORMS[kind]()]
    with prefetched(given, device="cpu") as batches:
        for _ in range(2):
            for number, (made, expected) in enumerate(zip(batches, given, strict=True)):
                if number == 1:
                    continue
                assert described(made) == described(FORMS[kind]())
                assert described(expected) == described(FORMS[kind]()), "the loader's own was changed"


def test_on_the_cpu_a_batch_is_the_very_object():
    given = [made() for made in FORMS.values()]
    with prefetched(given, device="cpu") as batches:
        assert all(made is expected for made, expected in zip(batches, given, strict=True))


def test_what_is_kept_never_changes(anywhere):
    with prefetched([(torch.full((1000,), float(n)), [torch.tensor(n)]) for n in range(30)], device="cpu") as batches:
        kept = list(batches)
        list(batches)
    assert [(x.unique().tolist(), y.item()) for x, (y,) in kept] == [([n], n) for n in range(30)]
