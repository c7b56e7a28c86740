"""`prefetched` and device transforms in users' programs: tests of the promises, not of the implementation."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import logging
import threading
import typing
import weakref

import numpy as np
import pytest
import torch
from support.lightning.runs import (
    BATCH,
    SAMPLES,
    WARNINGS,
    WIDTH,
    Learner,
    Loader,
    Numbers,
    Run,
    Stream,
    our_threads,
)
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, DistributedSampler

from lit_async_data import AsyncDataModule, AsyncLoader, DevicePrefetcher, LoaderOptions, Normalize, ToFloat, prefetched
from lit_async_data.device import streams as device_streams
from lit_async_data.errors import AsyncDataError, ClosedError, ConfigError, TransformError
from lit_async_data.testing import ArraySource

pytestmark = WARNINGS

TIME = 20  # seconds after which a wait in these tests is a failure

ON = {"the CPU": False, "a device": True}


@pytest.fixture(params=ON)
def anywhere(request):
    """On the CPU, and on a simulated device whose copies run late."""
    if ON[request.param]:
        request.getfixturevalue("pretended")
    return request.param


@pytest.fixture(params=ON)
def transformed(request):
    """As `device`, but copies run at once, since torch's own functions do not wait for a simulated stream."""
    if ON[request.param]:
        request.getfixturevalue("pretended")
        streams_of = device_streams.streams_of

        def eager(device):
            made = streams_of(device)
            made.side.eager = True
            return made

        request.getfixturevalue("monkeypatch").setattr(device_streams, "streams_of", eager)
    return request.param


def numbers(count=6):
    return [torch.full((3,), float(number)) for number in range(count)]


def listed(batches):
    return [batch[0].item() for batch in batches]


def rest(pass_):
    """The rest of a pass; ``for … in pass_`` would begin a new one."""
    return listed(iter(functools.partial(next, pass_, None), None))


def some_of(pass_, count):
    return [next(pass_)[0].item() for _ in range(count)]


class Logged:
    """A loader that records its calls, and their threads."""

    def __init__(self, count=4):
        self.count, self.calls = count, []
        self.sampler = self

    def call(self, what):
        self.calls.append((what, threading.current_thread() is threading.main_thread()))

    def set_epoch(self, epoch):
        self.call(f"set_epoch {epoch}")

    def __iter__(self):
        self.call("iter")
        return iter(numbers(self.count))

    def __len__(self):
        return self.count


# -- any iterable ------------------------------------------------------------------------------------------------------


class OnlyGetitem:
    def __getitem__(self, number):
        return numbers()[number]


class OwnIterator:
    """An object that is its own iterator, and restarts with each ``iter``."""

    def __iter__(self):
        self.number = -1
        return self

    def __next__(self):
        self.number += 1
        if self.number == 6:
            raise StopIteration
        return numbers()[self.number]


def function():
    yield from numbers()


class Yielding:
    def __iter__(self):
        yield from numbers()


ITERABLES = {
    "a list": numbers,
    "a tuple": lambda: tuple(numbers()),
    "a tensor": lambda: torch.arange(6.0)[:, None].expand(-1, 3).contiguous(),
    "a deque": lambda: collections.deque(numbers()),
    "the values of a dict": lambda: dict(enumerate(numbers())).values(),
    "an object that yields": Yielding,
    "an object with __getitem__ alone": OnlyGetitem,
    "its own iterator": OwnIterator,
    "a DataLoader": lambda: DataLoader(numbers(), batch_size=None, num_workers=1),
    "a DataLoader without workers": lambda: DataLoader(numbers(), batch_size=None),
    "persistent workers": lambda: DataLoader(numbers(), batch_size=None, num_workers=1, persistent_workers=True),
}


@pytest.mark.parametrize("depth", [0, 1, 2, 10])
@pytest.mark.parametrize("kind", ITERABLES)
def test_any_iterable_is_read_in_order_pass_after_pass(kind, depth, anywhere):
    loader = ITERABLES[kind]()
    with prefetched(loader, depth, device="cpu") as batches:
        for _ in range(3):
            assert listed(batches) == [0, 1, 2, 3, 4, 5]
    if kind == "persistent workers":
        del loader, batches
        gc.collect()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("made", [function, lambda: iter(numbers()), lambda: map(torch.clone, numbers())])
def test_an_iterator_has_one_pass(made, depth, anywhere):
    with prefetched(made(), depth, device="cpu") as batches:
        assert listed(batches) == [0, 1, 2, 3, 4, 5]
        assert listed(batches) == []


def test_an_empty_loader_gives_nothing(anywhere):
    with prefetched([], device="cpu") as batches:
        assert [len(batches), list(batches), list(batches)] == [0, [], []]


def test_batches_without_end_are_read_as_far_as_they_are_wanted(anywhere):
    with prefetched((torch.tensor([n]) for n in itertools.count()), device="cpu") as batches:
        assert listed(itertools.islice(batches, 50)) == list(range(50))


def test_next_works_as_on_an_iterator(anywhere):
    with prefetched(numbers(2), device="cpu") as batches:
        pass_ = iter(batches)
        assert [next(pass_)[0].item(), next(pass_)[0].item(), next(pass_, None), next(pass_, None)] == [
            0,
            1,
            None,
            None,
        ]


def test_zip_and_enumerate_and_two_loaders_at_a_time(anywhere):
    with prefetched(numbers(), device="cpu") as one, prefetched(numbers(3), device="cpu") as other:
        assert [(n, a[0].item(), b[0].item()) for n, (b, a) in enumerate(zip(other, one))] == [
            (0, 0, 0),
            (1, 1, 1),
            (2, 2, 2),
        ]


# -- any batch ---------------------------------------------------------------------------------------------------------


class Pair(typing.NamedTuple):
    left: object
    right: object = 1


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: str = ""
    derived: object = dataclasses.field(init=False, default=None)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    inner: object = None


class Movable:
    """Knows how to move itself, as batches of other libraries do."""

    def __init__(self, x):
        self.x, self.moves = x, 0

    def to(self, device, non_blocking=False):
        made = Movable(self.x.clone())
        made.moves = self.moves + 1
        return made

    def __eq__(self, other):
        return torch.equal(self.x, other.x)

    __hash__ = None


class Encoding(collections.UserDict):
    """A batch as tokenizers return it."""

    def to(self, device, **options):
        return Encoding({key: value.to(device) for key, value in self.items()})


def equal(one, other):  # noqa: PLR0911
    """Whether values and types are equal at every level."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.layout != torch.strided:
            one, other = one.to_dense(), other.to_dense()
        return (
            (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
            and one.stride() in (other.stride(), torch.empty_like(other).stride())  # as Tensor.to gives it
            and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    if isinstance(one, PackedSequence):
        return all(equal(a, b) for a, b in zip(tuple(one), tuple(other)))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, collections.abc.Mapping):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(equal, one, other))
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(equal(getattr(one, name), getattr(other, name)) for name in names)
    return one == other


def t(*shape, dtype=torch.float32):
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape).to(dtype)


def derived():
    record = Record(t(2), "a")
    record.derived = t(3)
    return record


class Slotted(dict):
    """A dict with attributes, as configurations and batches of some libraries are."""


FORMS = {
    "a tensor": lambda: t(2, 3),
    "a dict": lambda: {"x": t(2), "y": t(2, dtype=torch.int64)},
    "an OrderedDict": lambda: collections.OrderedDict(b=t(2), a=t(1)),
    "a defaultdict": lambda: collections.defaultdict(list, x=[t(2)]),
    "a subclass of dict": lambda: Slotted(x=t(2)),
    "a UserDict that moves": lambda: Encoding(x=t(2)),
    "a UserDict": lambda: collections.UserDict(x=t(2)),
    "a list": lambda: [t(2), t(3)],
    "a tuple": lambda: (t(2), t(3)),
    "a named tuple": lambda: Pair(t(2)),
    "a dataclass": lambda: Record(t(2), "name"),
    "a dataclass with a field that is no argument": derived,
    "a frozen dataclass": lambda: Frozen(t(2), Frozen(t(1))),
    "all in one another": lambda: {"a": [Pair(({"b": t(2)},), Frozen(t(1), [t(3)]))], 1: None, ("k",): "text"},
    "images of different sizes": lambda: ([t(3, 5, 4), t(3, 2, 7)], ({"boxes": t(0, 4)}, {"boxes": t(2, 4)})),
    "strings, numbers, None": lambda: ["text", b"bytes", 1, 2.5, 1j, None, True, ...],
    "nothing": lambda: None,
    "an empty dict": dict,
    "an empty list": list,
    "an empty tuple": tuple,
    "arrays": lambda: {"n": np.arange(3), "s": np.array(["a", "bc"]), "x": t(2)},
    "no dimension": lambda: torch.tensor(3.5),
    "no element": lambda: {"x": torch.zeros(0, 3), "y": torch.zeros(2, 0, dtype=torch.uint8)},
    "channels last": lambda: t(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "not contiguous": lambda: t(4, 6)[:, ::2].mT,
    "one element of a big one": lambda: t(100, 100)[3:4, 5:6],
    "packed": lambda: pack_sequence([t(3), t(2), t(1)]),
    "sparse": lambda: {"s": t(3, 3).to_sparse(), "c": t(3, 3).to_sparse_csr()},
    "what moves itself": lambda: {"m": Movable(t(3)), "x": t(2)},
    "a set": lambda: ({1, 2}, frozenset([3])),
    "a range": lambda: {"r": range(3), "x": t(2)},
    **{
        str(dtype): lambda dtype=dtype: {"x": t(3, 2, dtype=dtype), "y": t(1)}
        for dtype in (
            *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16),
            *(torch.float64, torch.complex64, torch.uint16, torch.float8_e4m3fn),
        )
    },
}
NOT_COMPARED = {"torch.float8_e4m3fn": torch.uint8, "torch.uint16": torch.int16}


def comparable(kind, batch):
    if kind in NOT_COMPARED:
        return {"x": batch["x"].view(NOT_COMPARED[kind]), "y": batch["y"]} if batch["x"].dtype in DTYPES else batch
    return batch


DTYPES = torch.float8_e4m3fn, torch.uint16


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("kind", FORMS)
def test_a_batch_of_any_form_arrives_as_it_is(kind, anywhere):
    # twice in a row, and once smaller ones in between: memory is used again
    given = [FORMS[kind](), {"x": t(7)}, FORMS[kind](), FORMS[kind]()]
    with prefetched(given, device="cpu") as batches:
        for _ in range(2):
            for number, (made, expected) in enumerate(zip(batches, given, strict=True)):
                if number == 1:
                    continue
                assert equal(comparable(kind, made), comparable(kind, FORMS[kind]())), made
                assert equal(comparable(kind, expected), comparable(kind, FORMS[kind]())), (
                    "the loader's own was changed"
                )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("kind", FORMS)
def test_on_the_cpu_a_batch_is_the_very_object(kind):
    given = [FORMS[kind]() for _ in range(3)]
    with prefetched(given, device="cpu") as batches:
        assert all(made is expected for made, expected in zip(batches, given, strict=True))


def test_what_stands_twice_in_a_batch_is_equal_twice(anywhere):
    x = t(3)
    with prefetched([{"a": x, "b": x, "part": x[1:]}], device="cpu") as batches:
        (made,) = list(batches)
    assert [made["a"].tolist(), made["b"].tolist(), made["part"].tolist()] == [[0, 1, 2], [0, 1, 2], [1, 2]]


def test_what_is_kept_never_changes(anywhere):
    with prefetched([(torch.full((1000,), float(n)), [torch.tensor(n)]) for n in range(30)], device="cpu") as batches:
        kept = list(batches)
        list(batches)
    assert [(x.unique().tolist(), y.item()) for x, (y,) in kept] == [([n], n) for n in range(30)]


def test_a_loader_that_fills_the_same_memory_again_is_not_read_too_far_behind():
    """If a loader reuses its buffer, the user must copy what they keep, in a plain loop as at depth 0."""
    buffer = torch.zeros(3)

    class Reusing:
        def __iter__(self):
            for number in range(4):
                yield buffer.fill_(number)

    with prefetched(Reusing(), 0, device="cpu") as batches:
        assert listed(batches) == [0, 1, 2, 3]


def test_gradients_flow_into_what_a_batch_is_multiplied_with(anywhere):
    weight = torch.ones(3, requires_grad=True)
    with prefetched(numbers(3), device="cpu") as batches:
        for batch in batches:
            assert not batch.requires_grad
            assert not batch.is_inference()
            (weight * batch).sum().backward()
    assert weight.grad.tolist() == [3, 3, 3]


def test_batches_of_an_evaluation_may_be_trained_on_later(anywhere):
    """A pass begun under inference mode gives tensors that autograd accepts."""
    weight = torch.ones(3, requires_grad=True)
    with prefetched(numbers(4), device="cpu") as batches:
        pass_ = iter(batches)
        with torch.inference_mode():
            next(pass_)
        batch = next(pass_)
        (weight * batch).sum().backward()
        batch += 1  # in place, outside
    assert weight.grad.tolist() == [1, 1, 1]


# -- errors and ends ---------------------------------------------------------------------------------------------------


class BrokenError(Exception):
    """Of a user's loader."""


class Failing:
    """An iterator that fails at one batch, and continues after it."""

    def __init__(self, at=2, error=BrokenError):
        self.at, self.error = at, error

    def __iter__(self):
        self.number = -1
        return self

    def __next__(self):
        self.number += 1
        if self.number == self.at:
            raise self.error(f"batch {self.number}")
        if self.number == 5:
            raise StopIteration
        return torch.full((3,), float(self.number))


@pytest.mark.parametrize(
    "error", [BrokenError, KeyError, OSError, TimeoutError, AssertionError, SystemExit, MemoryError]
)
@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("depth", [0, 2, 10])
def test_an_error_comes_at_its_place_and_the_rest_after_it(error, at, depth, anywhere):
    with prefetched(Failing(at, error), depth, device="cpu") as batches:
        pass_ = iter(batches)
        assert some_of(pass_, at) == list(range(at))
        with pytest.raises(error, match=f"batch {at}") as caught:
            next(pass_)
        assert caught.type is error
        assert rest(pass_) == list(range(at + 1, 5))
        assert our_threads() == [] or depth


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_dataset_ends_the_pass_as_it_does_without(workers, anywhere):
    loader = Loader(Numbers(fails_at=5), BATCH, num_workers=workers)
    with prefetched(loader, device="cpu") as batches:
        for _ in range(2):
            pass_ = iter(batches)
            assert next(pass_)["index"].tolist() == [0, 1, 2, 3]
            with pytest.raises(KeyError, match="sample 5"):
                next(pass_)
    Loader.end()  # with torch 2.8, the error leads to the iterator until it is collected


def test_the_traceback_of_an_error_leads_to_where_it_was_raised(anywhere):
    def breaks():
        yield torch.zeros(1)
        raise BrokenError("here")

    with prefetched(breaks(), device="cpu") as batches, pytest.raises(BrokenError) as caught:
        list(batches)
    assert "breaks" in [entry.name for entry in caught.traceback]


def test_a_runtime_error_for_stopiteration_in_a_generator_stays_one(anywhere):
    def breaks():
        yield torch.zeros(1)
        next(iter(()))

    with prefetched(breaks(), device="cpu") as batches, pytest.raises(RuntimeError, match="generator raised"):
        list(batches)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_loop_that_is_left_begins_anew(depth, anywhere):
    with prefetched(Logged(6), depth, device="cpu") as batches:
        for stop in (1, 3, 6):
            seen = []
            for batch in batches:
                seen.append(batch[0].item())
                if len(seen) == stop:
                    break
            assert seen == list(range(stop))
        assert listed(batches) == [0, 1, 2, 3, 4, 5]


def test_an_error_in_the_loop_itself_leaves_no_thread():
    def left():
        with prefetched(numbers(), device="cpu") as batches:
            for _ in batches:
                raise BrokenError

    with pytest.raises(BrokenError):
        left()
    assert our_threads() == []


def test_without_close_threads_end_with_the_loader(anywhere):
    batches = prefetched(Logged(100), device="cpu")
    next(iter(batches))
    assert our_threads()
    threads = [thread for thread in threading.enumerate() if thread.name in our_threads()]
    ref = weakref.ref(batches)
    del batches
    gc.collect()
    assert ref() is None
    for thread in threads:
        thread.join(TIME)
        assert not thread.is_alive()


@pytest.mark.parametrize("begun", [False, True])
def test_close_is_final(begun, anywhere):
    batches = prefetched(numbers(), device="cpu")
    if begun:
        next(iter(batches))
    batches.close()
    batches.close()
    assert our_threads() == []
    with pytest.raises(ClosedError):
        next(iter(batches))


def test_close_while_the_loader_waits_returns(monkeypatch):
    monkeypatch.setattr("lit_async_data.host.supervisor.THREADS_S", 0.1)
    gate, entered = threading.Event(), threading.Event()

    def waits():
        yield torch.zeros(3)
        entered.set()
        gate.wait(TIME)
        yield torch.ones(3)

    batches = prefetched(waits(), device="cpu")
    try:
        assert next(iter(batches))[0] == 0
        assert entered.wait(TIME), "not read ahead"
        closer = threading.Thread(target=batches.close)
        closer.start()
        closer.join(TIME)
        assert not closer.is_alive()
    finally:
        gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("lit_async_data"):
            thread.join(TIME)


def test_memory_and_files_stay_the_same_over_many_loaders(anywhere):
    before = threading.active_count()
    for _ in range(50):
        with prefetched(numbers(), device="cpu") as batches:
            next(iter(batches))
    assert threading.active_count() == before


def test_no_more_is_read_ahead_than_is_said(anywhere):
    """1. The loop has batch k. 2. The thread reads until there is no room. 3. It has read that many and no more."""
    depth, made, reads = 2, 0, threading.Semaphore(0)

    class Counting:
        def __iter__(self):
            nonlocal made
            for batch in numbers(50):
                made += 1
                reads.release()
                yield batch

    with prefetched(Counting(), depth, device="cpu") as batches:
        for number, _ in enumerate(batches):
            assert made <= number + 1 + 2 * depth + 1  # in hand; on the host and the device; being handed over
            if number == 20:
                break


# -- its place in a program --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 2])
def test_iter_is_called_after_set_epoch_on_the_main_thread(depth, anywhere):
    loader = Logged()
    with prefetched(loader, depth, device="cpu") as batches:
        for epoch in range(3):
            batches.sampler.set_epoch(epoch)
            assert len(list(batches)) == 4
    assert loader.calls == [call for n in range(3) for call in ((f"set_epoch {n}", True), ("iter", True))]


def test_building_asking_and_iter_start_nothing(anywhere):
    loader = Logged()
    with prefetched(loader, device="cpu") as batches:
        (
            len(batches),
            bool(batches),
            repr(batches),
            iter(batches),
            batches.fill,
            batches.stats(),
            batches.machinery.prefetch(),
        )
        assert [loader.calls, our_threads()] == [[], []]


def test_the_length_is_that_of_the_loader():
    assert len(prefetched(DataLoader(Numbers(), BATCH))) == 4
    assert len(prefetched(numbers())) == 6
    for unsized in function(), DataLoader(Stream(), BATCH), Yielding():
        with pytest.raises(TypeError):
            len(prefetched(unsized))


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
def test_what_the_loader_can_do_the_result_can_do():
    def init(number):
        pass

    data = Numbers()
    sampler = DistributedSampler(data, num_replicas=2, rank=1)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=1, worker_init_fn=init, pin_memory=True)
    batches = prefetched(loader)
    assert batches.loader is loader
    assert batches.dataset is data
    assert (batches.sampler, batches.batch_sampler) == (sampler, loader.batch_sampler)
    assert (batches.worker_init_fn, batches.collate_fn) == (init, loader.collate_fn)
    assert (batches.num_workers, batches.batch_size, batches.pin_memory) == (1, BATCH, True)
    batches.sampler.set_epoch(5)
    assert sampler.epoch == 5
    batches.worker_init_fn = None
    assert loader.worker_init_fn is None
    assert not hasattr(batches, "state_dict")
    assert not hasattr(batches, "no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        batches.no_such_thing


def test_attributes_that_the_loader_gets_later_are_there():
    loader = Logged()
    batches = prefetched(loader)
    loader.later = 3
    assert batches.later == 3
    batches.later = 4
    assert loader.later == 4


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (5, {}),
        (None, {}),
        (numbers(), {"device_depth": -1}),
        (numbers(), {"device_depth": 1.5}),
        (numbers(), {"device_depth": "2"}),
        (numbers(), {"device_depth": True}),
        (numbers(), {"device": "cuda"}),
        (numbers(), {"device": "nowhere"}),
        (numbers(), {"device": "cuda:99"}),
        (numbers(), {"device_transform": 3}),
    ],
)
def test_mistakes_are_errors_that_can_be_read(given, options):
    with pytest.raises(ConfigError) as caught:
        prefetched(given, **options)
    assert len(str(caught.value)) > 20


def test_what_prefetches_by_itself_is_refused():
    source = ArraySource({"x": np.zeros((4, 2), "f4")})
    with AsyncLoader(source, LoaderOptions(batch_size=2)) as loader:
        for once in loader, prefetched(numbers()):
            with pytest.raises(ConfigError, match="by itself"):
                prefetched(once)


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)


def test_under_several_ranks_a_loader_that_is_not_dealt_is_refused(two_ranks):
    data = Numbers()
    with prefetched(DataLoader(data, BATCH), device="cpu") as batches:
        with pytest.raises(ConfigError, match=r"DistributedSampler\("):
            next(iter(batches))
        assert our_threads() == []
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=False)
    for options in (
        {"sampler": sampler, "batch_size": BATCH},
        {"batch_sampler": torch.utils.data.BatchSampler(sampler, 4, False)},
    ):
        with prefetched(DataLoader(data, **options), device="cpu") as batches:
            assert torch.cat([batch["index"] for batch in batches]).tolist() == list(range(1, SAMPLES, 2))


def test_one_rank_needs_no_sampler(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    with prefetched(DataLoader(Numbers(), BATCH), device="cpu") as batches:
        assert len(list(batches)) == 4


def test_one_line_for_a_loader_without_workers(caplog):
    with caplog.at_level(logging.INFO), prefetched(DataLoader(Numbers(), BATCH), device="cpu") as batches:
        for _ in range(3):
            list(batches)
    assert sum("num_workers" in r.getMessage() for r in caplog.records if r.name.startswith("lit_async_data")) == 1


def test_random_numbers_of_the_program_are_those_of_a_plain_loop(anywhere):
    def program(wrap):
        torch.manual_seed(3)
        loader, seen = wrap(DataLoader(Numbers(), BATCH, shuffle=True, num_workers=1)), []
        for _ in range(3):
            seen += [(batch["index"].tolist(), torch.rand(1).item()) for batch in loader]
        return seen

    with contextlib.ExitStack() as stack:
        wrapped = program(lambda loader: stack.enter_context(prefetched(loader, device="cpu")))
    assert wrapped == program(lambda loader: loader)


# -- transforms on the device ------------------------------------------------------------------------------------------


def test_a_transform_is_done_with_each_batch(transformed):
    with prefetched(numbers(), device="cpu", device_transform=lambda batch: {"x": batch * 2}) as batches:
        for _ in range(2):
            assert [batch["x"][0].item() for batch in batches] == [0, 2, 4, 6, 8, 10]


def test_a_transform_may_change_a_batch_in_place_or_its_form(transformed):
    given = [{"x": t(3), "y": [t(2)]} for _ in range(4)]

    def changed(batch):
        batch["x"] = batch["x"] + 1
        return batch["x"], batch["y"][0], "more"

    with prefetched(given, device="cpu", device_transform=changed) as batches:
        assert [(x.tolist(), y.tolist(), z) for x, y, z in batches] == [([1, 2, 3], [0, 1], "more")] * 4


@pytest.mark.parametrize("depth", [0, 2])
def test_a_transform_that_fails_is_an_error_at_its_place(depth, transformed):
    def fails(batch):
        if batch[0] == 2:
            raise BrokenError("no such thing")
        return batch

    with prefetched(numbers(), depth, device="cpu", device_transform=fails) as batches:
        pass_ = iter(batches)
        assert [next(pass_)[0].item(), next(pass_)[0].item()] == [0, 1]
        with pytest.raises(TransformError) as caught:
            next(pass_)
        assert isinstance(caught.value.__cause__, BrokenError)
        assert isinstance(caught.value, AsyncDataError)
        assert rest(pass_) == [3, 4, 5]


def test_a_module_is_a_transform_too_and_computes_no_gradient(transformed):
    module = torch.nn.Linear(3, 2)
    with prefetched(numbers(), device="cpu", device_transform=module) as batches:
        for number, batch in enumerate(batches):
            assert not batch.requires_grad
            assert not batch.is_inference()
            assert torch.equal(batch, module(numbers()[number]).detach())


def test_built_in_transforms_take_what_loaders_give(transformed):
    images = [(torch.arange(0, 240, 10, dtype=torch.uint8).reshape(2, 3, 2, 2), torch.tensor([1, 2]))] * 3
    for transform in Normalize([0.1, 0.2, 0.3], [1, 2, 3], scale="type"), ToFloat():
        with prefetched(images, device="cpu", device_transform=transform) as batches:
            for x, y in batches:
                assert y.tolist() == [1, 2]
                expected = images[0][0].float() / 255
                if isinstance(transform, Normalize):
                    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in ([0.1, 0.2, 0.3], [1.0, 2, 3]))
                    expected = (expected - mean) / std
                assert torch.allclose(x, expected, atol=1e-6)


def source(samples=SAMPLES):
    x = np.repeat(np.arange(samples, dtype=np.uint8)[:, None], WIDTH, axis=1)
    return ArraySource({"x": x, "index": np.arange(samples)})


def flipped(batch, rng):
    """Writes the random numbers of a batch into the batch."""
    drawn = torch.full((len(batch["index"]),), -1.0) if rng is None else torch.rand(len(batch["index"]), generator=rng)
    return {**batch, "drawn": drawn}


def drawn(epochs, **options):
    with AsyncLoader(source(), {"batch_size": 4, "shuffle": "global"}, device_transform=flipped, **options) as loader:
        return [[(batch["index"].tolist(), batch["drawn"].tolist()) for batch in loader] for _ in range(epochs)]


def test_what_a_transform_draws_is_keyed_by_epoch_and_batch():
    first, second = drawn(2)
    assert drawn(2, device_depth=0) == [first, second]
    assert len({tuple(values) for _, values in first + second}) == 8
    torch.manual_seed(12345)
    assert drawn(1) == [first]


def test_in_evaluation_nothing_is_drawn_and_each_stage_has_its_own():
    names = collections.defaultdict(set)

    class Watching(Learner):
        def see(self, stage, batch, number, loader=0):
            names[stage].add((batch.get("of"), "drawn" in batch and bool((batch["drawn"] >= 0).all())))

        def loss(self, batch):
            return self.layer(batch["x"].float()).mean()

    def named(name):
        return lambda batch, rng: {**flipped(batch, rng), "of": name}

    stages = {"train": named("train"), "val": named("val"), "eval": named("eval")}
    dm = AsyncDataModule(
        train=source(), val=source(), test=source(), predict=source(), loader={"batch_size": 4}, device_transform=stages
    )
    run = Run(0, "", [DevicePrefetcher()])
    run.model = Watching()
    fit = run.trainer(max_epochs=2)
    fit.fit(run.model, datamodule=dm)
    fit.test(run.model, datamodule=dm, verbose=False)
    fit.predict(run.model, datamodule=dm)
    assert names == {
        "train": {("train", True)},
        "val": {("val", False)},
        "test": {("eval", False)},
        "predict": {("eval", False)},
    }


@pytest.mark.parametrize("callbacks", [[], [DevicePrefetcher()], [DevicePrefetcher(0)]], ids=["none", "2", "0"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
def test_bytes_become_floats_before_the_step(callbacks, precision):
    seen = []

    class Watching(Learner):
        def training_step(self, batch, number):
            seen.append((batch["x"].dtype, batch["index"].dtype, batch["index"].tolist(), batch["x"][:, 0].tolist()))
            return self.layer(batch["x"]).mean()

        test_step = predict_step = None

        def validation_step(self, batch, number):
            assert batch["x"].is_floating_point()

    Watching.test_step, Watching.predict_step = Learner.test_step, Learner.predict_step
    transform = {"train": ToFloat("x"), "eval": Normalize(scale="type", fields="x")}
    dm = AsyncDataModule(train=source(), val=source(), loader={"batch_size": 4}, device_transform=transform)
    run = Run(0, "", callbacks)
    run.model = Watching()
    run.trainer(precision=precision).fit(run.model, datamodule=dm)
    dtype = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}[precision]
    for x, ids, numbers, values in seen:
        assert (x, ids) == (dtype, torch.int64)
        assert np.allclose(values, np.array(numbers) / 255, rtol=0.01)
    assert sorted(n for *_, numbers, _ in seen for n in numbers) == list(range(SAMPLES))
