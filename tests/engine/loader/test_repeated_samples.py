"""A sample that comes several times in an epoch gets other random numbers each time, the same in any run."""

import random

import numpy as np
import pytest
import torch

from lit_async_data import AsyncLoader, ConcatSource, DatasetSource, LoaderOptions, SubsetSource
from lit_async_data.errors import CorruptError
from lit_async_data.testing import ArraySource

SAMPLES = 12
WEIGHTS = np.r_[20.0, np.ones(SAMPLES - 1)]


class Drawing(ArraySource):
    """Its samples are their number and a random number, as a random crop would be."""

    def __init__(self):
        super().__init__({"i": np.arange(SAMPLES), "r": np.zeros(SAMPLES, np.uint64)})

    @property
    def chunks(self):
        return super().chunks.__class__(random=True)

    def read_random(self, samples, out, keys):
        self.read_into(samples, out)
        if "r" in out:
            out["r"][...] = keys


class DrawingDataset(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        return {"i": number, "r": torch.rand(()), "p": random.random(), "n": np.random.rand()}  # noqa: NPY002


def with_rng(sample, rng):
    sample["r"] = np.array([rng.random()])
    return sample


def batch_with_rng(batch, rng):
    batch["r"] = rng.random((len(batch["i"]), 1)) + rng.random()
    return batch


PLAIN = ArraySource({"i": np.arange(SAMPLES)})
KINDS = {
    "crops": (Drawing(), {}),
    "sample_transform": (PLAIN, {"sample_transform": with_rng}),
    "batch_transform": (PLAIN, {"batch_transform": batch_with_rng}),
}


def pairs(source, epoch=0, start=None, rank=0, ranks=1, **given):
    """The samples of an epoch, and their random numbers."""
    hooks = {name: given.pop(name) for name in list(given) if name.endswith("transform")}
    options = LoaderOptions(**{"batch_size": 4, "seed": 3, "epoch_size": 36, "weights": WEIGHTS, "workers": 1, **given})
    with AsyncLoader(source, options, rank=rank, world_size=ranks, **hooks) as loader:
        loader.set_epoch(epoch)
        if start is not None:
            loader.load_state_dict(start)
        batches, state = list(loader), loader.state_dict()
    values = [tuple(zip(*(each[key].ravel().tolist() for key in each), strict=True)) for each in batches]
    return [pair for batch in values for pair in batch], state


def distinct(found, of=0):
    drawn = [rest for number, *rest in found if number == of]
    return len(drawn), len({tuple(each) for each in drawn})


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_that_is_drawn_again_gets_other_random_numbers(kind):
    source, hooks = KINDS[kind]
    found, _ = pairs(source, **hooks)
    times, kinds = distinct(found)
    assert times == kinds > 10
    assert found == pairs(source, **hooks)[0]
    assert found != pairs(source, epoch=1, **hooks)[0]


@pytest.mark.parametrize("kind", ["crops", "sample_transform"])
@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"queue_depth": 9, "workers": 3}, {"on_error": "skip"}])
def test_they_go_by_the_place_in_the_order_alone(kind, options):
    source, hooks = KINDS[kind]
    whole, _ = pairs(source, **hooks)
    assert pairs(source, **hooks, **options)[0] == whole
    ranks = [pairs(source, rank=rank, ranks=2, **hooks, **options)[0] for rank in range(2)]
    assert sorted(ranks[0] + ranks[1]) == sorted(whole)


@pytest.mark.parametrize("kind", ["crops", "sample_transform"])
def test_a_subset_that_lists_a_sample_twice_counts_both(kind):
    source, hooks = KINDS[kind]
    for made in (
        SubsetSource(source, [5, 5, 5, 2]),
        ConcatSource([SubsetSource(source, [5, 5]), SubsetSource(source, [5, 2])]),
    ):
        found, _ = pairs(made, weights=None, epoch_size=None, **hooks)
        assert distinct(found, 5) == (3, 3)
    once, _ = pairs(source, weights=None, epoch_size=None, **hooks)
    subset, _ = pairs(SubsetSource(source, [5, 2]), weights=None, epoch_size=None, **hooks)
    assert set(subset) < set(once), "a sample that comes once has the random numbers of the whole source"


@pytest.mark.processes
def test_datasets_that_draw_from_global_generators_do_so_anew_for_each_place():
    source = DatasetSource(DrawingDataset())
    found, _ = pairs(source, worker_kind="process")
    times, kinds = distinct(found)
    assert times == kinds > 10
    assert pairs(source, worker_kind="process", workers=2)[0] == found
    both, _ = pairs(
        ConcatSource([source, DatasetSource(DrawingDataset())]), worker_kind="process", weights=None, epoch_size=None
    )
    assert len(both) == len({tuple(rest) for _, *rest in both}) == 2 * SAMPLES


class Reading(ArraySource):
    """A source of a user that reads others: partners beside its samples, several for each, or one after the other."""

    def __init__(self, inner, way):
        super().__init__({"i": np.arange(SAMPLES), "r": np.zeros(SAMPLES, "f4"), "p": np.zeros(SAMPLES, "f4")})
        self.inner, self.way = inner, way

    @property
    def runs_user_code(self):
        return True

    def read_into(self, samples, out):
        def drawn(numbers):
            values = self.inner.spec.empty(len(numbers))
            self.inner.read_into(numbers, values)
            return values["r"]

        out["i"][...] = samples
        if self.way == "pairs":
            out["r"][...], out["p"][...] = drawn(samples), drawn((samples + 1) % SAMPLES)
        elif self.way == "windows":
            values = drawn(np.concatenate([samples, (samples + 1) % SAMPLES]))
            out["r"][...], out["p"][...] = values[: len(samples)], values[len(samples) :]
        else:
            for place in range(len(samples)):
                out["r"][place], out["p"][place] = *drawn(samples[place : place + 1]), 0


@pytest.mark.processes
@pytest.mark.parametrize(("way", "concat"), [("pairs", False), ("windows", True), ("one by one", True)])
def test_a_source_that_reads_others_leaves_each_its_own_random_numbers(way, concat):
    inner = ConcatSource([DatasetSource(DrawingDataset())]) if concat else DatasetSource(DrawingDataset())
    options = {"worker_kind": "process", "weights": None, "epoch_size": None}
    found, _ = pairs(Reading(inner, way), **options)
    own = {number: drawn for number, drawn, _ in found}
    assert len(set(own.values())) == SAMPLES
    assert own == {number: drawn for number, drawn, _ in pairs(Reading(inner, way), **options, batch_size=3)[0]}
    partners = {number: own[(number + 1) % SAMPLES] for number in own}
    assert way == "one by one" or partners == {number: partner for number, _, partner in found}


class Bad(Drawing):
    def read_into(self, samples, out):
        if 5 in samples:
            raise CorruptError("damaged", sample_id=5)
        super().read_into(samples, out)


@pytest.mark.parametrize("kind", ["crops", "sample_transform"])
def test_a_sample_that_stands_in_for_another_draws_anew_and_the_others_draw_as_ever(kind):
    hooks, options = KINDS[kind][1], {"weights": None, "epoch_size": None, "shuffle": True}
    found, _ = pairs(Bad(), on_error="substitute", max_bad=1.0, **hooks, **options)
    whole, _ = pairs(Drawing(), **hooks, **options)
    (stand_in,) = set(found) - set(whole)
    assert len(found) == SAMPLES
    assert set(whole) - set(found) == {pair for pair in whole if pair[0] == 5}
    assert stand_in[0] in {number for number, *_ in found if number != 5}
