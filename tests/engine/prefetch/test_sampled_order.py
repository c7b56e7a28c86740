"""Which DataLoaders deal an order that can be dealt again, and from the middle on."""

import itertools

import pytest
import torch
from support.threads.noted_loaders import Stream
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torch.utils.data import WeightedRandomSampler as Weighted

from lit_async_data import prefetched
from lit_async_data.engine.prefetch.loader import SampledOrder
from lit_async_data.errors import ConfigError


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
        (lambda: DataLoader(range(4), batch_sampler=torch.utils.data.BatchSampler(distributed(), 2, False)), False),
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
