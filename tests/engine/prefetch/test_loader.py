"""Anybody's loader, read ahead: nothing lost, nothing early, nothing left behind."""

import copy
import itertools
import pickle
import threading

import numpy as np
import pytest
import torch
import tqdm
from pytorch_lightning.utilities import CombinedLoader
from support.failures import raising
from support.threads.noted_loaders import Loader, Stream, listed, numbers, read_ahead, reader, steps
from support.threads.waits import LONG, until
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)
from torch.utils.data import WeightedRandomSampler as Weighted
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import prefetched
from lit_async_data.engine.loader.async_loader import AsyncLoader
from lit_async_data.engine.prefetch.loader import SampledOrder
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


ITERABLES = {
    "a list": numbers,
    "no batches": list,
    "an object with __getitem__ alone": OnlyGetitem,
    "its own iterator": OwnIterator,
    "persistent workers": lambda: DataLoader(numbers(), batch_size=None, num_workers=1, persistent_workers=True),
}


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", ITERABLES)
def test_any_iterable_is_read_in_order_pass_after_pass(kind, depth, anywhere):
    loader, expected = ITERABLES[kind](), [] if kind == "no batches" else [0, 1, 2, 3, 4, 5]
    with prefetched(loader, depth, device="cpu") as batches:
        for _ in range(2):
            assert listed(batches) == expected
        next(iter(batches), None)  # a pass that is left
        assert listed(batches) == expected
    if kind == "persistent workers":
        loader._iterator._shutdown_workers()


def test_the_length_is_that_of_the_loader():
    assert len(prefetched(DataLoader(range(14), batch_size=4))) == 4
    assert len(prefetched([1, 2])) == 2
    assert not prefetched([])
    with pytest.raises(TypeError):
        len(prefetched(DataLoader(Stream(), batch_size=2)))


class NoLengthYet(Stream):
    def __len__(self):
        raise RuntimeError("no length")


def test_what_asks_for_a_length_does_without():
    combined = CombinedLoader({"a": DataLoader(range(4)), "b": DataLoader(range(3))}, "max_size_cycle")
    with prefetched(combined, device="cpu") as batches:
        assert len(list(batches)) == len(batches) == 4  # it has one after `iter`
    assert len(list(tqdm.tqdm(prefetched(DataLoader(NoLengthYet(), 2), device="cpu")))) == 2


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


def test_attributes_are_those_of_the_loader():
    loader = DataLoader(range(14), 4, num_workers=1, worker_init_fn=repr)
    batches = prefetched(loader)
    assert (batches.loader, batches.dataset, batches.batch_size) == (loader, range(14), 4)
    batches.worker_init_fn = print  # as Lightning does
    assert loader.worker_init_fn is print
    assert "worker_init_fn" not in vars(batches)
    batches.mine = 7
    assert batches.mine == 7
    assert not hasattr(loader, "mine")
    for name in ("state_dict", "_iterator"):  # Lightning would end the workers of an _iterator
        assert not hasattr(batches, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loader": 7}, "7 cannot be iterated over"),
        ({"loader": TensorDataset(torch.zeros(2))}, "TensorDataset.* gives samples, not batches; give it a DataLoader"),
        ({"loader": AsyncLoader(ArraySource({"x": np.arange(3)}), {"batch_size": 1})}, "AsyncLoader prefetches by"),
        ({"loader": prefetched([1])}, "PrefetchedLoader prefetches by itself"),
        ({"loader": [1], "device_depth": -1}, "device_depth: -1"),
        ({"loader": [1], "device": "nowhere"}, "^device: "),
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


def drawing(batch, rng):
    return torch.rand((), generator=rng).item()


def test_random_numbers_on_the_device_go_by_rank_lightnings_seed_pass_and_batch(monkeypatch):
    def drawn(rank, seed):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        with prefetched([1, 2], device="cpu", device_transform=drawing) as batches:
            return [*batches, *batches]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    one = drawn(0, "1")
    assert one == drawn(0, "1")
    assert len({*one, *drawn(1, "1"), *drawn(0, "2")}) == 12


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


def test_a_transform_runs_on_the_side_stream_and_may_change_a_batch_in_place_or_its_form(streamed):
    streams = streamed(FakeStreams("side"))
    streams.side.eager = True  # torch's own functions do not wait for a simulated stream
    given = [{"x": torch.arange(3.0), "y": [torch.arange(2.0)]} for _ in range(4)]

    def changed(batch):
        streams.launch("transform", lambda: None)
        batch["x"] = batch["x"] + 1
        return batch["x"], batch["y"][0], "more"

    with prefetched(given, device="cpu", device_transform=changed) as batches:
        assert [(x.tolist(), y.tolist(), z) for x, y, z in batches] == [([1, 2, 3], [0, 1], "more")] * 4
    assert {stream for name, stream in streams.calls if name == "transform"} == {"side"}


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


def test_a_batch_that_was_not_read_when_the_device_failed_keeps_its_number(monkeypatch):
    with prefetched(numbers(), device="cpu", device_transform=drawing) as batches:
        expected = list(batches)
    with prefetched(numbers(), device="cpu", device_transform=drawing) as batches:
        first = next(batches)
        with monkeypatch.context() as patch:
            patch.setattr(batches._run.engine.queue, "take", raising(RuntimeError("the device")))
            with pytest.raises(RuntimeError, match="the device"):
                next(batches)
        assert [first, *(next(batches) for _ in range(5))] == expected


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


# -- orders that can be dealt again, and from the middle on ------------------------------------------------------------


class Numbers(Dataset):
    def __init__(self):
        self.read = []

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self.read.append(index)
        return index


class Own(RandomSampler):
    """Somebody's own."""


def seeded():
    return torch.Generator().manual_seed(3)


SAMPLERS = {
    "in order": lambda: SequentialSampler(Numbers()),
    "shuffled": lambda: RandomSampler(Numbers()),
    "shuffled by a generator": lambda: RandomSampler(Numbers(), generator=seeded()),
    "with replacement": lambda: RandomSampler(Numbers(), replacement=True, generator=seeded()),
    "weighted": lambda: Weighted([0.5] * 20, 20),
    "a subset": lambda: SubsetRandomSampler(range(5, 20)),
    "of ranks": lambda: DistributedSampler(Numbers(), num_replicas=2, rank=1),
}


@pytest.mark.parametrize(("workers", "persistent", "alone"), [(0, False, False), (0, False, True), (1, True, False)])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_pass_goes_on_in_the_middle_without_reading_what_came_before(sampler, workers, persistent, alone):
    dataset, sampler = Numbers(), sampler()
    batches = {"batch_size": None} if alone else {"batch_size": 3}
    loader = DataLoader(dataset, sampler=sampler, num_workers=workers, persistent_workers=persistent, **batches)
    order = SampledOrder(loader)
    assert not order.unknown
    for _ in range(2 if persistent else 1):
        before = order.now()
        whole = [torch.as_tensor(batch).tolist() for batch in loader]
    torch.manual_seed(77)
    next(iter(DataLoader(Numbers(), num_workers=0)))
    drawn = torch.random.get_rng_state()
    torch.manual_seed(77)
    dataset.read.clear()
    rest = [torch.as_tensor(batch).tolist() for batch in order.continued(before, 2)()]
    assert rest == whole[2:]
    if not workers:
        flat = rest if alone else itertools.chain(*rest)
        assert dataset.read == list(flat)
        if order.generator is torch.default_generator:  # the loop's own draws go on, as beside a loader in order
            assert torch.equal(torch.random.get_rng_state(), drawn)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(), sampler=Own(Numbers())),
        DataLoader(Numbers(), batch_sampler=BatchSampler(Own(Numbers()), 2, drop_last=False)),
        DataLoader(Stream()),
        [1, 2, 3],
    ],
)
def test_orders_of_others_are_unknown(loader):
    assert SampledOrder(loader).unknown


def test_a_sampler_that_draws_from_the_generator_of_all_is_found():
    shared = RandomSampler(Numbers(), replacement=True, generator=torch.default_generator)
    assert SampledOrder(DataLoader(Numbers(), sampler=shared)).is_global
    assert not SampledOrder(DataLoader(Numbers(), shuffle=True)).is_global


class KnowsItsRank(RandomSampler):
    process_index = 1  # as the batch samplers that Accelerate prepares


def distributed(**options):
    return DistributedSampler(range(4), num_replicas=2, rank=1, **options)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("loader", "judged"),
    [
        (lambda: DataLoader(range(4), shuffle=True), True),
        (lambda: DataLoader(range(4), sampler=distributed()), False),
        (lambda: DataLoader(range(4), batch_sampler=BatchSampler(distributed(), 2, False)), False),
        (lambda: DataLoader(range(4), sampler=DistributedSampler(range(4), num_replicas=1, rank=0)), False),
        (lambda: DataLoader(range(4), sampler=KnowsItsRank(range(4))), False),
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
