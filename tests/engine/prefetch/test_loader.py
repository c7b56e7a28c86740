"""Anybody's loader, read ahead: nothing lost, nothing early, nothing left behind."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
import tqdm
from pytorch_lightning.utilities import CombinedLoader
from support.failures import raising
from support.threads.noted_loaders import Loader, Stream, listed, numbers, read_ahead, reader, shut_down, steps
from support.threads.waits import LONG, until
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import prefetched
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.errors import ClosedError, ConfigError
from lit_async_data.testing import ArraySource


class OnlyGetitem:
    def __getitem__(self, number):
        return numbers()[number]


class OwnIterator:
    def __iter__(self):
        self.number = -1
        return self

    def __next__(self):
        self.number += 1
        if self.number == 6:
            raise StopIteration
        return numbers()[self.number]


class Yielding:
    def __iter__(self):
        yield from numbers()


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


def test_the_length_is_that_of_the_loader():
    assert len(prefetched(DataLoader(range(14), batch_size=4))) == 4
    assert len(prefetched([1, 2])) == 2
    assert not prefetched([])
    for unsized in iter(numbers()), DataLoader(Stream(), batch_size=2), Yielding():
        with pytest.raises(TypeError):
            len(prefetched(unsized))


class NoLengthYet(IterableDataset):
    def __init__(self, error):
        self.error = error

    def __iter__(self):
        return iter(range(5))

    def __len__(self):
        raise self.error("no length")


@pytest.mark.parametrize("taken", [list, tuple, tqdm.tqdm, enumerate, zip])
def test_what_asks_for_a_length_does_without(taken):
    combined = CombinedLoader({"a": DataLoader(range(4)), "b": DataLoader(range(3))}, "max_size_cycle")
    with prefetched(combined, device="cpu") as batches:
        assert len(list(taken(batches))) == 4
        assert len(batches) == 4  # it has one after `iter`
    for error in (NotImplementedError, RuntimeError, OverflowError):
        assert len(list(taken(prefetched(DataLoader(NoLengthYet(error), 2), device="cpu")))) == 3
    assert len(list(taken(prefetched(iter(range(3)), device="cpu")))) == 3


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
        batches._prefetch()
        assert (loader.log, reader()) == ([], [])
        for epoch in range(2):
            batches.set_epoch(epoch)
            assert {batch["epoch"] for batch in batches} == {epoch}
            batches._prefetch()  # the next pass is not begun before it is asked for
            assert (reader(), next(batches, None)) == ([], None)
        assert loader.log == ["set_epoch 0", "iter", "set_epoch 1", "iter"]


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


def test_a_keyboard_interrupt_while_waiting_ends_the_pass(monkeypatch):
    loader = Loader(gate=threading.Semaphore(0))
    with prefetched(loader, device="cpu") as batches:
        next(batches)
        arrived = batches._run.engine.feed.reader.arrived
        with monkeypatch.context() as patch:
            patch.setattr(arrived, "wait", lambda timeout: (_ for _ in ()).throw(KeyboardInterrupt))
            assert loader.waiting.wait(LONG)
            with pytest.raises(KeyboardInterrupt):
                next(batches)
        loader.gate.release(99)
        with pytest.raises(ClosedError, match="KeyboardInterrupt has ended this pass after 1 batches"):
            next(batches)
        assert steps(batches) == list(range(6))


def test_garbage_collection_does_the_same_as_close():
    batches = prefetched(Loader(100), device="cpu")
    next(batches)
    read_ahead(batches, 2)
    assert len(reader()) == 1
    del batches
    assert reader() == []


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
    with pytest.raises(AttributeError, match="no_such_thing"):
        batches.no_such_thing
    assert repr(batches).startswith("<PrefetchedLoader of ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loader": 7}, "7 cannot be iterated over"),
        ({"loader": None}, "None cannot be iterated over"),
        ({"loader": TensorDataset(torch.zeros(2))}, "TensorDataset.* gives samples, not batches; give it a DataLoader"),
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


def test_the_end_of_a_pass_leaves_nothing_on_the_device(streamed):
    streamed(FakeStreams("side"))
    with prefetched(Loader(), 2) as batches:
        list(batches)
        assert not batches._run.engine.queue.tickets
        assert not batches._run.engine.queue.copying


def test_room_is_kept_for_one_batch_where_nothing_is_read_ahead(streamed):
    streamed(FakeStreams("side"))
    with prefetched(DataLoader(range(20), batch_size=2), 3) as batches:
        for _ in range(4):
            next(batches)
        assert [ticket.allocated is not None for ticket in batches._run.engine.queue.tickets] == [True]


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
        before = batches._run.engine
        batches.device = "mps"
        assert batches.device == torch.device("mps")
        assert steps(next(batches) for _ in range(2)) == [1, 2]
        assert steps(batches) == list(range(6))
        assert batches._run.engine is not before
        assert batches._run.engine.device == torch.device("mps")
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
    given = [{"x": torch.arange(3.0), "y": [torch.arange(2.0)]} for _ in range(4)]

    def changed(batch):
        batch["x"] = batch["x"] + 1
        return batch["x"], batch["y"][0], "more"

    with prefetched(given, device="cpu", device_transform=changed) as batches:
        assert [(x.tolist(), y.tolist(), z) for x, y, z in batches] == [([1, 2, 3], [0, 1], "more")] * 4


class GoesOn:
    def __init__(self):
        self.numbers = iter(range(5))

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.numbers)


class Kept:
    """Hands out the same iterator each time, and is none itself."""

    def __init__(self):
        self.numbers = (number for number in range(5))

    def __iter__(self):
        return self.numbers


STREAMS = {
    "a generator": lambda: (number for number in range(5)),
    "an object": GoesOn,
    "a kept iterator": Kept,
    "the iterator of a DataLoader": lambda: iter(DataLoader(range(5), batch_size=None)),
}


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_that_was_left_goes_on_with_what_was_read_ahead(kind, depth, caplog):
    with prefetched(STREAMS[kind](), depth, device="cpu") as batches:
        for number in batches:
            if number == 1:
                break
        if depth:  # until those that a new pass would lose have been read
            pulling = batches._run.engine.feed.reader
            until(pulling, lambda: len(pulling.pulled) == depth)
        assert list(batches) == [2, 3, 4]
        assert list(batches) == []
    assert not [line for line in caplog.messages if "dropped" in line]


class Renewed(Kept):
    def __iter__(self):
        left, self.numbers = self.numbers, iter("ab")
        return left


def test_another_iterator_is_begun_once_and_what_was_read_of_the_first_is_left():
    with prefetched(Renewed(), 2, device="cpu") as batches:
        assert next(iter(batches)) == 0
        assert list(batches) == ["a", "b"]


@pytest.mark.parametrize("end", [lambda batches: next(iter(batches)), lambda batches: batches.close()])
def test_what_is_dropped_of_an_iterator_is_said(end, caplog):
    with prefetched(OwnIterator(), 2, device="cpu") as batches:
        next(iter(batches))
        pulling = batches._run.engine.feed.reader
        until(pulling, lambda: len(pulling.pulled) == 2)
        end(batches)
        (first, *_) = caplog.messages
    assert first == (
        "2 batches that were read ahead of OwnIterator are dropped: an iterator goes on behind them; device_depth=0 "
        "reads none ahead"
    )


class Restarts(GoesOn):
    def __next__(self):
        number = next(self.numbers, None)
        if number is None:
            self.numbers = iter(range(5))
            raise StopIteration
        return number


def test_of_an_iterator_that_restarts_at_its_end_nothing_is_lost_or_used_up(caplog):
    with prefetched(Restarts(), 9, device="cpu") as batches:
        for _ in range(2):
            assert list(batches) == list(range(5))
        pass_ = iter(batches)
        assert [next(pass_) for _ in range(5)] == list(range(5))
        pulling = batches._run.engine.feed.reader
        until(pulling, lambda: pulling.pulled)  # the end, which is no batch
    assert caplog.messages == []


def test_a_batch_that_was_not_read_when_the_device_failed_keeps_its_number(monkeypatch):
    def drawn(batch, rng):
        return torch.rand((), generator=rng).item()

    with prefetched(numbers(), device="cpu", device_transform=drawn) as batches:
        expected = list(batches)
    with prefetched(numbers(), device="cpu", device_transform=drawn) as batches:
        first = next(batches)
        with monkeypatch.context() as patch:
            patch.setattr(batches._run.engine.queue, "take", raising(RuntimeError("the device")))
            with pytest.raises(RuntimeError, match="the device"):
                next(batches)
        assert [first, *(next(batches) for _ in range(5))] == expected


def test_random_numbers_on_the_device_go_by_lightnings_seed(monkeypatch):
    found = []
    for seed in ("1", "2", "1"):
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        with prefetched([1], device="cpu", device_transform=lambda batch, rng: torch.rand(4, generator=rng)) as one:
            found.append(next(iter(one)).tolist())
    assert found[0] == found[2] != found[1]


def test_a_pass_that_another_thread_stops_as_it_begins_begins_again_in_the_middle():
    def stop():
        thread = threading.Thread(target=batches.stop)
        thread.start()
        thread.join(LONG)

    loader = DataLoader(range(40), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    with prefetched(loader, device="cpu") as batches:
        whole = [batch.tolist() for batch in batches]
        dealt = batches.dealt_order
        batches.resumed_order, stops = dealt, [stop, stop]
        batches.counted = lambda: (stops and stops.pop()()) or 3
        rest = iter(batches)
        for _ in range(2):
            with pytest.raises(ClosedError, match="another thread has closed or stopped"):
                next(rest)
        assert [batch.tolist() for batch in rest] == whole[3:]
        batches.resumed_order = dealt
        assert next(iter(batches)).tolist() == whole[3]
        batches.resumed_order, batches.counted = dealt, lambda: 10
        assert not list(iter(batches))
        assert sorted(number for batch in batches for number in batch.tolist()) == list(range(40))
