"""Anybody's loader, read ahead: nothing lost, nothing early, nothing left behind."""

import collections
import contextlib
import copy
import dataclasses
import gc
import logging
import os
import pickle
import threading
import typing
import weakref
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytest
import torch
from support.device.batches import Step, detection
from support.device.training_loop import pretend
from support.threads.waits import LONG, until
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import prefetched
from lit_async_data.engine import supervisor
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.prefetch import reader_thread as puller
from lit_async_data.errors import ClosedError, ConfigError, TransferError, WorkerError
from lit_async_data.testing import ArraySource


class Loader:
    """Writes down who calls what; each ``next`` can be held up."""

    def __init__(self, batches=6, *, fail=(), gate=None):
        self.batches = batches
        self.fail = dict(fail)
        self.gate = gate
        self.waiting = threading.Event()
        self.log = []
        self.threads = []
        self.epoch = 0
        self.batch_size = 3

    def __len__(self):
        return self.batches

    def set_epoch(self, epoch):
        self.log.append(f"set_epoch {epoch}")
        self.epoch = epoch

    def __iter__(self):
        self.log.append("iter")
        assert threading.current_thread() is threading.main_thread()
        return Iterator(self)


class Iterator:
    def __init__(self, loader):
        self.loader, self.step = loader, 0

    def __iter__(self):
        return self

    def __next__(self):
        loader, step = self.loader, self.step
        loader.threads.append(threading.current_thread())
        if loader.gate is not None and step:
            loader.waiting.set()
            assert loader.gate.acquire(timeout=LONG)
        if step >= loader.batches:
            raise StopIteration
        self.step += 1
        if step in loader.fail:
            raise loader.fail[step]
        return {"x": torch.full((2, 2), step), "epoch": loader.epoch, "step": step}


class Stateful(Loader):
    """One whose state is what its last iterator has given, as with StatefulDataLoader."""

    start = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.state = {"given": 0}

    def __iter__(self):
        iterator = super().__iter__()
        iterator.step, self.start = self.start, 0
        return self.counted(iterator)

    def counted(self, iterator):
        for batch in iterator:
            self.state["given"] = batch["step"] + 1
            yield batch
        self.state["given"] = 0

    def state_dict(self):
        return self.state  # the very dict that it goes on to change

    def load_state_dict(self, state):
        self.log.append("load")
        self.state, self.start = dict(state), state["given"]


def steps(batches):
    return [batch["step"] for batch in batches]


def read_ahead(loader, count):
    """Wait until at least `count` batches are ready on the host."""
    found = loader.machinery.engine.feed.reader
    until(found, lambda: found.ready >= count)


def reader():
    return [thread for thread in threading.enumerate() if "lit_async_data reader" in thread.name]


@pytest.fixture
def streamed(monkeypatch):
    """Has what is prefetched take this pretended device for its own."""

    def on(streams):
        pretend(monkeypatch, lambda device: streams)
        return streams

    return on


class MineError(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} {other}")


@pytest.fixture(params=["the CPU", "a device"])
def anywhere(request, streamed):
    """On the CPU, and on a simulated device whose copies run late."""
    if request.param == "a device":
        streamed(FakeStreams("side"))


def numbers(count=6):
    return [torch.full((3,), float(number)) for number in range(count)]


def listed(batches):
    return [batch[0].item() for batch in batches]


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


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


ITERABLES = {
    "a list": numbers,
    "no batches": list,
    "a tensor": lambda: torch.arange(6.0)[:, None].expand(-1, 3).contiguous(),
    "the values of a dict": lambda: dict(enumerate(numbers())).values(),
    "an object that yields": Yielding,
    "an object with __getitem__ alone": OnlyGetitem,
    "its own iterator": OwnIterator,
    "a DataLoader": lambda: DataLoader(numbers(), batch_size=None, num_workers=1),
    "a DataLoader without workers": lambda: DataLoader(numbers(), batch_size=None),
    "persistent workers": lambda: DataLoader(numbers(), batch_size=None, num_workers=1, persistent_workers=True),
}


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", ITERABLES)
def test_any_iterable_is_read_in_order_pass_after_pass(kind, depth, anywhere):
    loader = ITERABLES[kind]()
    with prefetched(loader, depth, device="cpu") as batches:
        for _ in range(2):
            assert listed(batches) == ([] if kind == "no batches" else [0, 1, 2, 3, 4, 5])
        if kind != "no batches":
            next(iter(batches))  # a pass that is left
            assert listed(batches) == [0, 1, 2, 3, 4, 5]
    if kind == "persistent workers":
        shut_down(loader._iterator)


@pytest.mark.parametrize(("made", "depth"), [(function, 0), (lambda: iter(numbers()), 2)])
def test_an_iterator_has_one_pass_and_that_is_said_once(caplog, made, depth):
    with prefetched(made(), depth, device="cpu") as batches:
        assert listed(batches) == [0, 1, 2, 3, 4, 5]
        assert "used up" not in caplog.text
        assert list(batches) == list(batches) == []
    assert caplog.text.count("is an iterator, which its first pass has used up") == 1


def test_the_length_is_that_of_the_loader():
    assert len(prefetched(DataLoader(range(14), batch_size=4))) == 4
    assert len(prefetched([1, 2])) == 2
    assert not prefetched([])
    for unsized in function(), DataLoader(Stream(), batch_size=2), Yielding():
        with pytest.raises(TypeError):
            len(prefetched(unsized))


class Pair(typing.NamedTuple):
    left: object
    right: object = 1


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: str = ""


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
            and one.tolist() == other.tolist()  # torch.equal does not know every dtype
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


class Slotted(dict):
    """A dict with attributes, as configurations and batches of some libraries are."""


FORMS = {
    "an OrderedDict": lambda: collections.OrderedDict(b=t(2), a=t(1)),
    "a subclass of dict": lambda: Slotted(x=t(2)),
    "a UserDict that moves": lambda: Encoding(x=t(2)),
    "a dataclass": lambda: Record(t(2), "name"),
    "all in one another": lambda: {"a": [Pair(({"b": t(2)},), Record(t(1)))], 1: None, ("k",): "text"},
    "images of different sizes": lambda: ([t(3, 5, 4), t(3, 2, 7)], ({"boxes": t(0, 4)}, {"boxes": t(2, 4)})),
    "strings, numbers, None": lambda: ["text", b"bytes", 1, 2.5, 1j, None, True, ...],
    "nothing": lambda: None,
    "an empty dict": dict,
    "arrays": lambda: {"n": np.arange(3), "s": np.array(["a", "bc"]), "x": t(2)},
    "no dimension": lambda: torch.tensor(3.5),
    "no element": lambda: {"x": torch.zeros(0, 3), "y": torch.zeros(2, 0, dtype=torch.uint8)},
    "channels last": lambda: t(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "not contiguous": lambda: t(4, 6)[:, ::2].mT,
    "packed": lambda: pack_sequence([t(3), t(2), t(1)]),
    "sparse": lambda: {"s": t(3, 3).to_sparse(), "c": t(3, 3).to_sparse_csr()},
    "what moves itself": lambda: {"m": Movable(t(3)), "x": t(2)},
    "a set": lambda: ({1, 2}, frozenset([3])),
    **{
        str(dtype): lambda dtype=dtype: {"x": t(3, 2, dtype=dtype), "y": t(1)}
        for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.complex64, torch.uint16, torch.float8_e4m3fn)
    },
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
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
                assert equal(made, FORMS[kind]()), made
                assert equal(expected, FORMS[kind]()), "the loader's own was changed"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_on_the_cpu_a_batch_is_the_very_object():
    given = [made() for made in FORMS.values()]
    with prefetched(given, device="cpu") as batches:
        assert all(made is expected for made, expected in zip(batches, given, strict=True))


def test_what_is_kept_never_changes(anywhere):
    with prefetched([(torch.full((1000,), float(n)), [torch.tensor(n)]) for n in range(30)], device="cpu") as batches:
        kept = list(batches)
        list(batches)
    assert [(x.unique().tolist(), y.item()) for x, (y,) in kept] == [([n], n) for n in range(30)]


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


def test_iter_is_called_with_the_first_batch_and_after_set_epoch():
    loader = Loader()
    with prefetched(loader, device="cpu") as batches:
        iter(batches), len(batches), bool(batches), repr(batches), batches.fill, batches.stats()
        batches.machinery.prefetch()
        assert (loader.log, reader()) == ([], [])
        for epoch in range(2):
            batches.set_epoch(epoch)
            assert {batch["epoch"] for batch in batches} == {epoch}
        assert loader.log == ["set_epoch 0", "iter", "set_epoch 1", "iter"]


def test_the_next_pass_is_not_begun_before_it_is_asked_for():
    loader = Loader()
    with prefetched(loader, device="cpu") as batches:
        assert steps(batches) == list(range(6))
        batches.machinery.prefetch()
        with pytest.raises(StopIteration):
            next(batches)
        assert loader.log == ["iter"]
        assert reader() == []


def test_a_pass_ends_before_the_next_begins(monkeypatch):
    """1. A pass is left while the thread is in `next`. 2. Another is begun: `iter` waits for that `next`, since a
    loader with persistent workers has one iterator for all passes."""
    monkeypatch.setattr(supervisor, "THREADS_S", 0.01)
    loader = Loader(gate=threading.Semaphore(0))
    with prefetched(loader, device="cpu") as batches:
        next(batches)
        assert loader.waiting.wait(LONG)

        def let_it_end(*_):
            monkeypatch.setattr(supervisor, "THREADS_S", LONG)
            loader.gate.release(99)

        monkeypatch.setattr(logging.Logger, "warning", let_it_end)  # called while it waits
        assert steps(batches) == list(range(6))
        assert loader.log == ["iter", "iter"]


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_is_read_ahead_than_was_asked_for(depth):
    loader = Loader(20)
    with prefetched(loader, depth, device="cpu") as batches:
        next(batches)
        for step in range(1, 5):
            read_ahead(batches, depth)
            assert len(loader.threads) == step + depth
            next(batches)
        assert set(loader.threads) == set(reader())


def test_a_depth_of_0_starts_no_thread():
    loader = Loader()
    with prefetched(loader, 0, device="cpu") as batches:
        assert steps(batches) == list(range(6))
        assert set(loader.threads) == {threading.main_thread()}


def test_a_dataloader_without_workers_is_read_in_the_loop_which_is_said_once(caplog):
    class Here(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            assert threading.current_thread() is threading.main_thread()
            return index

    with prefetched(DataLoader(Here(), batch_size=2), device="cpu") as batches:
        for _ in range(2):
            assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["the DataLoader has num_workers=0"]
    assert "num_workers=1 or more" in caplog.text


def test_the_depth_can_be_changed_in_the_middle_of_a_pass():
    loader = Loader(12)
    with prefetched(loader, 3, device="cpu") as batches:
        seen = [next(batches)["step"]]
        read_ahead(batches, 3)
        for depth in (0, 2, 1, 0, 4):
            batches.device_depth = depth
            seen += [next(batches)["step"], next(batches)["step"]]
        assert seen + steps([next(batches)]) == list(range(12))
        assert batches.device_depth == 4


@pytest.mark.parametrize(
    ("error", "at", "depth"),
    [
        (MineError(1, 2), 0, 1),
        (MineError(1, 2), 4, 10),
        (TimeoutError(), 2, 0),
        (SystemExit(3), 2, 1),
        (SystemExit(3), 0, 0),
        (KeyboardInterrupt(), 1, 2),  # of the loader's own, in its thread
    ],
    ids=repr,
)
def test_an_error_comes_at_its_place_as_it_was_raised_and_the_rest_after_it(error, at, depth, anywhere):
    with prefetched(Loader(5, fail={at: error}), depth, device="cpu") as batches:
        for _ in range(2):
            pass_ = iter(batches)
            assert [next(pass_)["step"] for _ in range(at)] == list(range(at))
            with pytest.raises(type(error)) as caught:
                next(pass_)
            assert caught.value is error
            assert steps(pass_) == list(range(at + 1, 5))


def stops():
    yield torch.zeros(1)
    next(iter(()))


def exits():
    yield torch.zeros(1)
    raise SystemExit("mine")


@pytest.mark.parametrize(
    ("breaks", "error", "said"), [(stops, RuntimeError, "generator raised StopIteration"), (exits, SystemExit, "mine")]
)
def test_a_generator_is_over_after_its_error_whose_traceback_leads_into_it(anywhere, breaks, error, said):
    with prefetched(breaks(), device="cpu") as batches:
        next(batches)
        with pytest.raises(error, match=said) as caught:
            next(batches)
        # Python makes the RuntimeError outside of the generator.
        assert breaks is stops or "exits" in [entry.name for entry in caught.traceback]
        assert list(batches) == []


def test_after_an_error_nothing_is_read_before_it_is_asked_for():
    loader = Loader(fail={1: MineError(1, 2)})
    with prefetched(loader, 4, device="cpu") as batches:
        next(batches)
        read_ahead(batches, 1)
        for thread in reader():
            thread.join(LONG)
        batches.machinery.prefetch()
        assert len(loader.threads) == 2
        with pytest.raises(MineError):
            next(batches)
        assert len(loader.threads) == 2
        assert next(batches)["step"] == 2


def test_an_error_of_iter_is_raised_and_the_pass_can_be_begun_again():
    class Fails(Loader):
        def __iter__(self):
            iterator = super().__iter__()
            if len(self.log) == 1:
                raise OSError("not yet")
            return iterator

    with prefetched(Fails(), device="cpu") as batches:
        with pytest.raises(OSError, match="not yet"):
            next(batches)
        assert [next(batches)["step"] for _ in range(6)] == list(range(6))


def test_a_keyboard_interrupt_in_a_read_of_our_own_thread_ends_the_pass():
    loader = Loader(fail={1: KeyboardInterrupt()})
    with prefetched(loader, 0, device="cpu") as batches:
        next(batches)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        for _ in range(2):
            with pytest.raises(ClosedError, match="an interrupt has ended this pass after 1 batches"):
                next(batches)
        loader.fail.clear()
        assert steps(batches) == list(range(6))


def test_a_keyboard_interrupt_while_waiting_ends_the_pass(monkeypatch):
    loader = Loader(gate=threading.Semaphore(0))
    with prefetched(loader, device="cpu") as batches:
        next(batches)
        arrived = batches.machinery.engine.feed.reader.arrived
        with monkeypatch.context() as patch:
            patch.setattr(arrived, "wait", lambda timeout: (_ for _ in ()).throw(KeyboardInterrupt))
            assert loader.waiting.wait(LONG)
            with pytest.raises(KeyboardInterrupt):
                next(batches)
        loader.gate.release(99)
        with pytest.raises(ClosedError, match="an interrupt has ended this pass after 1 batches"):
            next(batches)
        assert steps(batches) == list(range(6))


def test_an_error_keeps_no_loader_alive():
    loader = Loader(fail={0: MineError(1, 2)})
    batches = prefetched(loader, device="cpu")
    gc.disable()
    try:
        with contextlib.suppress(MineError):
            next(batches)
        alive = weakref.ref(batches)
        loader.fail[0].__traceback__ = None  # its frames are those of whoever called
        del batches
        assert alive() is None
    finally:
        gc.enable()


def test_a_long_wait_is_worth_a_line(monkeypatch):
    said = []
    monkeypatch.setattr(puller, "LONG_S", 0.0)
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)
    loader = Loader(gate=threading.Semaphore(0))
    with prefetched(loader, device="cpu") as batches:
        next(batches)
        assert loader.waiting.wait(LONG)
        monkeypatch.setattr(
            puller.log, "warning", lambda *args: (said.append(args[0] % args[1:]), loader.gate.release(99))
        )
        assert steps([next(batches) for _ in range(5)]) == [1, 2, 3, 4, 5]
    assert "has been at the loader's next() for" in said[0]
    assert "(in test_prefetched.py:" in said[0]


@pytest.mark.parametrize("begun", [False, True])
def test_close_is_final_and_may_come_twice(begun, anywhere):
    batches = prefetched(numbers(), device="cpu")
    if begun:
        next(batches)
    batches.close()
    batches.close()
    assert reader() == []
    for call in (batches.machinery.prefetch, lambda: next(batches), lambda: next(iter(batches))):
        with pytest.raises(ClosedError):
            call()
    assert batches.stats().batches == begun


def test_close_leaves_a_next_that_does_not_return_behind(monkeypatch):
    monkeypatch.setattr(supervisor, "THREADS_S", 0.01)
    loader = Loader(gate=threading.Semaphore(0))
    batches = prefetched(loader, device="cpu")
    next(batches)
    assert loader.waiting.wait(LONG)
    batches.close()
    (left,) = reader()
    loader.gate.release(99)
    left.join(LONG)
    assert not left.is_alive()
    assert len(loader.threads) == 2


def test_garbage_collection_does_the_same_as_close():
    batches = prefetched(Loader(100), device="cpu")
    next(batches)
    read_ahead(batches, 2)
    assert len(reader()) == 1
    del batches
    assert reader() == []


def test_what_was_read_ahead_goes_with_the_pass():
    class Batch:
        pass

    made = []

    def make(_):
        batch = Batch()
        made.append(weakref.ref(batch))
        return batch

    with prefetched(map(make, range(5)), device="cpu") as batches:
        next(batches)
        read_ahead(batches, 2)
    assert len(made) == 3
    assert [ref() for ref in made] == [None] * 3


def test_a_fork_is_told(monkeypatch):
    batches = prefetched(Loader(), device="cpu")
    next(batches)
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        with pytest.raises(WorkerError, match="cannot be used in its fork"):
            next(batches)
        batches.machinery.engine.close()  # nothing of another process is touched
        assert len(reader()) == 1
    batches.close()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
def test_attributes_are_those_of_the_loader():
    sampler = DistributedSampler(range(14), num_replicas=2, rank=1)
    loader = DataLoader(range(14), 4, sampler=sampler, num_workers=1, worker_init_fn=repr, pin_memory=True)
    batches = prefetched(loader)
    assert batches.loader is loader
    assert batches.dataset is loader.dataset
    assert (batches.sampler, batches.batch_sampler) == (sampler, loader.batch_sampler)
    assert (batches.worker_init_fn, batches.collate_fn) == (repr, loader.collate_fn)
    assert (batches.num_workers, batches.batch_size, batches.pin_memory) == (1, 4, True)
    batches.worker_init_fn = print  # as Lightning does
    assert loader.worker_init_fn is print
    assert "worker_init_fn" not in vars(batches)
    loader.later = 3
    assert batches.later == 3
    batches.mine = 7
    assert batches.mine == 7
    assert not hasattr(loader, "mine")
    for name in ("state_dict", "_iterator"):  # Lightning would end the workers of an _iterator
        assert not hasattr(batches, name)
    assert not isinstance(batches, HasState)
    with pytest.raises(AttributeError, match="no_such_thing"):
        batches.no_such_thing
    assert repr(batches).startswith("<PrefetchedLoader of ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loader": 7}, "7 cannot be iterated over"),
        ({"loader": None}, "None cannot be iterated over"),
        ({"loader": AsyncLoader(ArraySource({"x": np.arange(3)}), {"batch_size": 1})}, "AsyncLoader prefetches by"),
        ({"loader": prefetched([1])}, "PrefetchedLoader prefetches by itself"),
        *(({"loader": [1], "device_depth": wrong}, f"device_depth: {wrong!r}") for wrong in (-1, 1.5, "2", True)),
        *(({"loader": [1], "device": wrong}, "^device: ") for wrong in ("gpu", "nowhere", "cuda:99")),
        ({"loader": [1], "device_transform": 3}, "^device_transform: 3 cannot be called"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        prefetched(**options)


def test_it_can_be_pickled_and_copied():
    batches = prefetched([-1, 2, -3], 3, device="cpu", device_transform=abs)
    next(batches)
    for other in (pickle.loads(pickle.dumps(batches)), copy.copy(batches), copy.deepcopy(batches)):
        assert list(other) == [1, 2, 3]
        assert other.device_depth == 3
    assert next(batches) == 2
    batches.close()


def test_what_was_waited_for_and_read_is_counted():
    with prefetched(Loader(), device="cpu") as batches:
        for _ in range(2):
            list(batches)
        stats = batches.stats()
        assert stats.batches == stats.read.batches == 12
        assert stats.read.bytes == 12 * 32
        assert stats.wait_s > 0
        assert stats.metrics()["data/device_wait_ms"] == stats.metrics()["data/wait_ms"]


def test_what_was_ready_is_counted():
    with prefetched(Loader(), 3, device="cpu") as batches:
        next(batches)
        read_ahead(batches, 3)
        next(batches)
        assert batches.stats().queue_fill == 3


@runtime_checkable
class HasState(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize("depth", [0, 3])
def test_a_state_is_that_after_the_last_batch_that_was_handed_out(depth):
    loader = Stateful()
    with prefetched(loader, depth, device="cpu") as batches:
        assert isinstance(batches, HasState)
        assert batches.state_dict() == {"given": 0}
        for given in range(1, 4):
            next(batches)
            if depth and given == 1:
                read_ahead(batches, 3)
            assert batches.state_dict() == {"given": given}
        state = dict(batches.state_dict())
        assert steps(batches) == list(range(6))
        assert batches.state_dict() == {"given": 0}
        next(iter(batches))
        batches.load_state_dict(state)
        assert batches.state_dict() == {"given": 3}
        assert steps(batches) == [3, 4, 5]
        assert steps(batches) == list(range(6))


@pytest.mark.parametrize("slow", ["side", "compute"])
def test_states_are_not_those_of_batches_on_their_way_to_the_device(streamed, slow):
    streamed(FakeStreams(slow))
    with prefetched(Stateful(), 2) as batches:
        for given in range(1, 7):
            next(batches)
            batches.machinery.prefetch()
            assert batches.state_dict() == {"given": given}
        with pytest.raises(StopIteration):
            next(batches)
        assert batches.state_dict() == {"given": 0}


class Detection(Loader):
    def __iter__(self):
        return (detection(batch["step"]) for batch in super().__iter__())


@pytest.mark.parametrize("slow", ["side", "compute"])
@pytest.mark.parametrize(("depth", "externally_driven"), [(0, True), (1, False), (2, True)])
def test_batches_of_any_form_arrive_on_a_device_with_streams(streamed, slow, externally_driven, depth):
    streams = streamed(FakeStreams(slow))
    step = Step(streams)
    with prefetched(Detection(), depth) as batches:
        batches.machinery.wiring.externally_driven = externally_driven
        for _ in range(3):
            for number, batch in enumerate(batches):
                if externally_driven:
                    batches.machinery.prefetch()
                step(batch, detection(number))
                del batch
                if externally_driven:
                    batches.machinery.prefetch()
        next(iter(batches))  # a pass that is left early
        for number, batch in zip(range(2), batches, strict=False):
            step(batch, detection(number))
        streams.synchronize()
    assert step.seen
    assert step.wrong == []


class OneThread(FakeStreams):
    """A device that may be called by one thread only."""

    def __getattribute__(self, name):
        assert threading.current_thread() is threading.main_thread(), name
        return super().__getattribute__(name)


def test_the_thread_makes_no_call_to_the_device(streamed):
    streamed(OneThread("compute"))
    loader = Detection()
    with prefetched(loader, 2) as batches:
        for _ in range(2):
            assert len(list(batches)) == 6
    assert threading.main_thread() not in loader.threads[1:]


def test_the_end_of_a_pass_leaves_nothing_on_the_device(streamed):
    streamed(FakeStreams("side"))
    with prefetched(Loader(), 2) as batches:
        list(batches)
        assert not batches.machinery.engine.queue.tickets
        assert not batches.machinery.engine.queue.copying


def test_room_is_kept_for_one_batch_where_nothing_is_read_ahead(streamed):
    streamed(FakeStreams("side"))
    with prefetched(DataLoader(range(20), batch_size=2), 3) as batches:
        for _ in range(4):
            next(batches)
        assert [ticket.allocated is not None for ticket in batches.machinery.engine.queue.tickets] == [True]


@pytest.mark.parametrize("depth", [0, 2])
def test_what_the_canary_finds_about_a_batch_costs_none_of_those_behind_it(streamed, depth):
    streamed(FakeStreams("side"))
    with prefetched(Loader(), depth) as batches:
        batches.verify_copies = 2
        first = next(batches)
        assert first["step"] == 0
        first["x"].numpy()[...] = 7
        if depth:
            read_ahead(batches, depth)
            batches.machinery.prefetch()
        assert next(batches)["step"] == 1
        with pytest.raises(TransferError, match=r"batch 0 of epoch 0: batch\['x'\]"):
            next(batches)
        assert steps(next(batches) for _ in range(4)) == [2, 3, 4, 5]


def test_nothing_is_reserved_for_batches_after_the_last(streamed):
    streamed(FakeStreams("side"))
    with prefetched(Loader(), 2) as batches:
        batches.machinery.wiring.externally_driven = True
        for _ in range(6):
            next(batches)
        read_ahead(batches, 1)
        batches.machinery.prefetch()  # the end is found
        batches.machinery.prefetch()
        assert {ticket.block for ticket in batches.machinery.engine.queue.tickets} == {None}


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_draw_for_their_own_batches(monkeypatch, rank):
    def drawing(batch, rng):
        return torch.rand((), generator=rng).item()

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    with prefetched([1, 2], device="cpu", device_transform=drawing) as batches:
        drawn = [*batches, *batches]
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with prefetched([1, 2], device="cpu", device_transform=drawing) as batches:
        again = [*batches, *batches]
    assert (drawn == again) is (rank == 0)
    assert len(set(drawn + again)) == (4 if rank == 0 else 8)


def test_a_device_transform_runs_on_the_side_stream(streamed):
    streams = streamed(FakeStreams("side"))

    def transform(batch):
        streams.launch("transform", lambda: None)
        return batch["step"]

    with prefetched(Loader(), 2, device_transform=transform) as batches:
        assert list(batches) == list(range(6))
    assert {stream for name, stream in streams.calls if name == "transform"} == {"side"}


def test_a_device_that_is_set_serves_from_the_next_pass_on(monkeypatch):
    monkeypatch.setattr("lit_async_data.engine.device.streams.checked_device", torch.device)
    loader = Loader()
    with prefetched(loader, device="cpu") as batches:
        next(batches)
        before = batches.machinery.engine
        batches.device = "mps"
        assert batches.device == torch.device("mps")
        assert steps(next(batches) for _ in range(2)) == [1, 2]
        assert steps(batches) == list(range(6))
        assert batches.machinery.engine is not before
        assert batches.machinery.engine.device == torch.device("mps")
        assert batches.stats().read.batches >= 9


def test_one_device_has_one_name(monkeypatch):
    monkeypatch.setattr("lit_async_data.engine.device.streams.checked_device", torch.device)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert prefetched([1], device="cuda").device == torch.device("cuda:3")
    assert prefetched([1], device="cuda:1").device == torch.device("cuda:1")
    batches = prefetched([1])  # built before its rank has chosen its device
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    assert batches.device == torch.device("cuda:3")


def test_a_transform_may_change_a_batch_in_place_or_its_form(streamed):
    streamed(FakeStreams("side")).side.eager = True  # torch's own functions do not wait for a simulated stream
    given = [{"x": t(3), "y": [t(2)]} for _ in range(4)]

    def changed(batch):
        batch["x"] = batch["x"] + 1
        return batch["x"], batch["y"][0], "more"

    with prefetched(given, device="cpu", device_transform=changed) as batches:
        assert [(x.tolist(), y.tolist(), z) for x, y, z in batches] == [([1, 2, 3], [0, 1], "more")] * 4


class KnowsItsRank(RandomSampler):
    rank = 1


class KnowsItsProcess(RandomSampler):
    process_index = 1  # as the batch samplers that Accelerate prepares


def distributed(**options):
    return DistributedSampler(range(4), num_replicas=2, rank=1, **options)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("loader", "judged"),
    [
        (lambda: DataLoader(range(4), shuffle=True), True),
        (lambda: DataLoader(range(4), batch_sampler=[[0, 1]]), True),
        (lambda: DataLoader(range(4), sampler=distributed()), False),
        (
            lambda: DataLoader(range(4), batch_sampler=torch.utils.data.BatchSampler(distributed(), 2, False)),
            False,
        ),
        (lambda: DataLoader(range(4), sampler=DistributedSampler(range(4), num_replicas=1, rank=0)), False),
        (lambda: DataLoader(range(4), sampler=KnowsItsRank(range(4))), False),
        (lambda: DataLoader(range(4), sampler=KnowsItsProcess(range(4))), False),
        (lambda: DataLoader(Stream()), False),
        (lambda: [1, 2], False),
    ],
)
def test_ranks_do_not_read_the_same(monkeypatch, ranks, loader, judged):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)  # asked by torch's own iterator
    with prefetched(loader(), device="cpu") as batches:
        if judged and ranks > 1:
            with pytest.raises(ConfigError, match=r"sampler=DistributedSampler\(dataset\)"):
                next(batches)
            monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
        assert len(list(batches)) > 0


def shut_down(iterator):
    """End the workers of an iterator that its DataLoader keeps."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 1])
def test_the_state_of_torchdata_counts_batches_that_were_handed_out(workers):
    pytest.importorskip("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    def built():
        return prefetched(StatefulDataLoader(range(12), batch_size=2, num_workers=workers), device="cpu")

    with built() as batches:
        for _ in range(2):
            next(batches)
        if workers:
            read_ahead(batches, 2)
        state = batches.state_dict()
        shut_down(batches.loader._iterator)
    with built() as batches:
        batches.load_state_dict(state)
        assert next(batches).tolist() == [4, 5]
        assert [batch.tolist() for batch in batches] == [[n, n + 1] for n in range(0, 12, 2)]
        shut_down(batches.loader._iterator)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_generator_that_was_left_goes_on(depth):
    with prefetched((number for number in range(5)), depth, device="cpu") as batches:
        for number in batches:
            if number == 1:
                break
        if depth:  # until those that a new pass would lose have been read
            pulling = batches.machinery.engine.feed.reader
            until(pulling, lambda: pulling.ready == depth)
        assert list(batches) == [2, 3, 4]
        assert list(batches) == []


class Prepared:
    """As Accelerate's loaders without ``use_stateful_dataloader``: the methods are there, and their state is not."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def state_dict(self):
        return self.dl_state_dict

    def load_state_dict(self, state):
        self.base_dataloader.load_state_dict(state)


@pytest.mark.parametrize("depth", [0, 3])
def test_a_state_that_cannot_be_asked_for_is_no_error_of_a_batch(depth):
    with prefetched(Prepared([1, 2, 3]), depth, device="cpu") as batches:
        for _ in range(2):
            assert list(batches) == [1, 2, 3]
        assert next(iter(batches)) == 1
        for _ in range(2):
            with pytest.raises(AttributeError, match="dl_state_dict"):
                batches.state_dict()
        assert list(batches) == [1, 2, 3]
        with pytest.raises(AttributeError, match="base_dataloader"):
            batches.load_state_dict({})
        assert list(batches) == [1, 2, 3]


def test_a_state_that_is_no_method_is_none():
    class Odd(list):
        state_dict = None
        load_state_dict = None

    with prefetched(Odd([1, 2]), device="cpu") as batches:
        assert list(batches) == [1, 2]
        assert batches.state_dict is None
