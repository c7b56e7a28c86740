"""Transforms and sources of the user that change between passes, and draw: a sample that comes several times in an
epoch gets other random numbers each time, the same in any run."""

import random

import numpy as np
import pytest
import torch
from support.device.training_loop import pretend
from support.sources.hooked_loaders import hooked, source
from support.threads.interrupts import interrupted
from support.threads.waits import until
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import (
    AsyncLoader,
    BatchSpec,
    ConcatSource,
    DatasetSource,
    FieldSpec,
    LoaderOptions,
    Source,
    StorageLayout,
    SubsetSource,
)
from lit_async_data.engine.loader.recipe import schedule_of
from lit_async_data.engine.pipeline.thread_pipeline import ThreadPipeline
from lit_async_data.errors import CorruptError, FormatError
from lit_async_data.sources.contract.source import ChunkRun
from lit_async_data.sources.contract.user_code import states
from lit_async_data.testing import ArraySource


@pytest.mark.parametrize("dtype", [">f4", np.dtype("U5"), np.dtype("f4,i4")])
def test_a_field_that_no_tensor_can_hold_is_named_before_anything_is_read(dtype):
    class Own(ArraySource):
        spec = BatchSpec({"x": FieldSpec((2,), dtype)}, as_mapping=True)

    with pytest.raises(FormatError, match=r"^Own: x: .*[fUM,].* is no dtype of tensors; change its spec$"):
        AsyncLoader(Own({"x": np.zeros((4, 2))}), {"batch_size": 2})


class Shift:
    def __init__(self):
        self.by = 0

    def __call__(self, sample):
        return {"y": sample["y"] + self.by}


def of_batch(shift):
    return lambda batch: {"y": batch["y"] + shift.by}


FORMS = {
    "sample_transform": lambda shift: {"sample": shift},
    "a method": lambda shift: {"sample": shift.__call__},
    "batch_transform": lambda shift: {"batch": of_batch(shift)},
    "device_transform": lambda shift: {"device": of_batch(shift)},
}


@pytest.mark.parametrize("options", [{}, {"workers": 2, "worker_kind": "thread"}], ids=["loop", "threads"])
@pytest.mark.parametrize("form", FORMS)
def test_an_attribute_of_a_transform_holds_from_the_next_pass_on(form, options):
    shift = Shift()
    with hooked(**FORMS[form](shift), **options) as loader:
        for shift.by in (0, 100, 100, 200):
            assert [int(batch["y"][0]) - shift.by for batch in loader] == [*range(0, len(source()), 4)]
            if options:
                pipeline = loader._run.engine.feed.pipeline
                until(pipeline, lambda pipeline=pipeline: pipeline.ready >= 2)


def test_what_was_read_ahead_is_used_where_nothing_has_changed(monkeypatch):
    monkeypatch.setattr(ThreadPipeline, "renew", None)
    with hooked(sample=Shift(), workers=1, worker_kind="thread") as loader:
        assert len(list(loader)) == len(list(loader)) == len(loader)


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("late", ["side", "compute"])
def test_what_was_copied_ahead_is_dropped_where_something_has_changed(monkeypatch, late, capturing):
    """Also where a graph is recorded at the begin of a pass, in which nothing may wait for copies."""
    streams, shift = FakeStreams(late), Shift()
    pretend(monkeypatch, lambda device: streams)
    with hooked(sample=shift, workers=1, worker_kind="thread") as loader:
        for shift.by in (0, 100, 200):
            found, streams.capturing = [], capturing
            for batch in loader:
                streams.capturing = False
                streams.synchronize()
                found.append(int(batch["y"][0]) - shift.by)
            assert found == [*range(0, len(source()), 4)]


def test_a_change_holds_wherever_the_begin_of_its_pass_is_interrupted():
    shift, place, whole = Shift(), 0, False
    with hooked(sample=shift, workers=1, worker_kind="thread") as loader:
        list(loader)
        while not whole:
            shift.by += 100
            batches = iter(loader)
            try:
                with interrupted(place):
                    batch = next(batches)
                whole = True
            except KeyboardInterrupt:
                batch = next(batches)
            assert [int(each["y"][0]) - shift.by for each in (batch, *batches)] == [*range(0, len(source()), 4)]
            place += 5
    assert place > 100


class Own(Source):
    """Sample n is n and what is added; says how it is read."""

    def __init__(self, reading="python"):
        self.add, self.reading, self.draw = 0, reading, float

    def __len__(self):
        return 12

    @property
    def spec(self):
        return BatchSpec({"y": FieldSpec((), np.dtype("i8"))}, as_mapping=True)

    @property
    def chunks(self):
        return StorageLayout(reading=self.reading)

    def read_into(self, samples, out):
        self.draw()
        out["y"][...] = samples + self.add


@pytest.mark.parametrize("reading", ["python", "copied"])
def test_an_attribute_of_a_source_holds_from_the_next_pass_on(reading):
    own = Own(reading)
    with AsyncLoader(own, {"batch_size": 3, "shuffle": False, "worker_kind": "thread"}) as loader:
        for own.add in (0, 7, 7, 20):
            assert torch.cat([batch["y"] for batch in loader]).tolist() == [*range(own.add, own.add + 12)]
            pipeline = loader._run.engine.feed.pipeline
            until(pipeline, lambda pipeline=pipeline: pipeline.ready >= 2)


def careless(sample):
    return {"y": sample["y"] + 0 * int(random.random())}


THREAD = {"workers": 1, "worker_kind": "thread"}


@pytest.mark.parametrize(
    ("draws", "options", "lines"),
    [
        ("hook", {"workers": 0}, 0),
        ("hook", THREAD, 1),
        ("source", THREAD, 1),
        ("a source that reads without Python", THREAD, 0),
        pytest.param("hook", {"workers": 1, "worker_kind": "process"}, 0, marks=pytest.mark.processes),
    ],
)
def test_draws_in_a_thread_are_said_once(draws, options, lines, caplog):
    own, hooks = Own("copied" if "without" in draws else "python"), {}
    own.draw = random.random if "source" in draws else own.draw
    if draws == "hook":
        hooks = {"sample_transform": careless}
    before = states()
    with AsyncLoader(own, {"batch_size": 3, "shuffle": False, **options}, **hooks) as loader:
        len(loader.spec.fields)
        assert states() == before  # those of the program are put back
        list(loader), list(loader)
    assert caplog.text.count("drew random numbers from the global generator of random") == lines


def chunked(rows, order=None):
    layout = StorageLayout((ChunkRun(8, rows),), compressed=True, reading="decoded", order=order)
    return ArraySource({"y": np.arange(8)}, parts={"a": 8}, chunks=layout)


@pytest.mark.parametrize(("rows", "shuffle"), [(1, "global"), (4, "chunk")])
def test_auto_deals_by_chunks_where_samples_share_them(rows, shuffle):
    assert schedule_of(chunked(rows), LoaderOptions(batch_size=2, shuffle=True)).plan(0).decks.shuffle == shuffle


@pytest.mark.parametrize(
    ("options", "more", "shuffled"),
    [
        ({"shuffle": True}, {}, True),
        ({"shuffle": True}, {"alike": True}, False),
        ({"weights": np.ones(8)}, {}, True),
        ({"shuffle": False}, {}, False),
        ({"shuffle": False}, {"transform_draws": True}, True),
        ({"shuffle": False, "augment": False}, {"transform_draws": True}, False),
    ],
)
def test_epochs_differ_where_the_order_or_a_transform_draws(options, more, shuffled):
    assert schedule_of(chunked(1), LoaderOptions(batch_size=2, **options), **more).shuffled == shuffled


@pytest.mark.parametrize("shuffle", ["global", "chunk"])
def test_weights_are_those_of_the_samples_wherever_they_are_stored(shuffle):
    source, weights = chunked(4, order=np.arange(8)[::-1].copy()), np.arange(8) == 7
    options = LoaderOptions(batch_size=4, shuffle=shuffle, weights=weights)
    assert schedule_of(source, options).plan(0).batch(0).tolist() == [7, 7, 7, 7]


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


def pairs(source, epoch=0, rank=0, ranks=1, **given):
    """The samples of an epoch, and their random numbers."""
    hooks = {name: given.pop(name) for name in list(given) if name.endswith("transform")}
    options = LoaderOptions(**{"batch_size": 4, "seed": 3, "epoch_size": 36, "weights": WEIGHTS, "workers": 1, **given})
    with AsyncLoader(source, options, rank=rank, world_size=ranks, **hooks) as loader:
        loader.set_epoch(epoch)
        batches = list(loader)
    return [pair for each in batches for pair in zip(*(each[key].ravel().tolist() for key in each), strict=True)]


def distinct(found, of=0):
    drawn = [rest for number, *rest in found if number == of]
    return len(drawn), len({tuple(each) for each in drawn})


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_that_is_drawn_again_gets_other_random_numbers(kind):
    source, hooks = KINDS[kind]
    found = pairs(source, **hooks)
    times, kinds = distinct(found)
    assert times == kinds > 10
    assert found == pairs(source, **hooks)
    assert found != pairs(source, epoch=1, **hooks)


@pytest.mark.parametrize("kind", ["crops", "sample_transform"])
@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"queue_depth": 9, "workers": 3}, {"on_error": "skip"}])
def test_they_go_by_the_place_in_the_order_alone(kind, options):
    source, hooks = KINDS[kind]
    whole = pairs(source, **hooks)
    assert pairs(source, **hooks, **options) == whole
    ranks = [pairs(source, rank=rank, ranks=2, **hooks, **options) for rank in range(2)]
    assert sorted(ranks[0] + ranks[1]) == sorted(whole)


@pytest.mark.parametrize("kind", ["crops", "sample_transform"])
def test_a_subset_that_lists_a_sample_twice_counts_both(kind):
    source, hooks = KINDS[kind]
    for made in (
        SubsetSource(source, [5, 5, 5, 2]),
        ConcatSource([SubsetSource(source, [5, 5]), SubsetSource(source, [5, 2])]),
    ):
        found = pairs(made, weights=None, epoch_size=None, **hooks)
        assert distinct(found, 5) == (3, 3)
    once = pairs(source, weights=None, epoch_size=None, **hooks)
    subset = pairs(SubsetSource(source, [5, 2]), weights=None, epoch_size=None, **hooks)
    assert set(subset) < set(once), "a sample that comes once has the random numbers of the whole source"


@pytest.mark.processes
def test_datasets_that_draw_from_global_generators_do_so_anew_for_each_place():
    source = DatasetSource(DrawingDataset())
    found = pairs(source, worker_kind="process")
    times, kinds = distinct(found)
    assert times == kinds > 10
    assert pairs(source, worker_kind="process", workers=2) == found
    several = ConcatSource([source, DatasetSource(DrawingDataset())])
    both = pairs(several, worker_kind="process", weights=None, epoch_size=None)
    assert len(both) == len({tuple(rest) for _, *rest in both}) == 2 * SAMPLES


class Reading(ArraySource):
    """A source of a user that reads another: partners beside its samples, each by a read of its own or all by one."""

    runs_user_code = True

    def __init__(self, inner, together):
        super().__init__({"i": np.arange(SAMPLES), "r": np.zeros(SAMPLES, "f4"), "p": np.zeros(SAMPLES, "f4")})
        self.inner, self.together = inner, together

    def read_into(self, samples, out):
        def drawn(numbers):
            values = self.inner.spec.empty(len(numbers))
            self.inner.read_into(numbers, values)
            return values["r"]

        out["i"][...], partners = samples, (samples + 1) % SAMPLES
        if self.together:
            out["r"][...], out["p"][...] = np.split(drawn(np.concatenate([samples, partners])), 2)
        else:
            out["r"][...], out["p"][...] = drawn(samples), drawn(partners)


@pytest.mark.processes
@pytest.mark.parametrize("together", [False, True])
def test_a_source_that_reads_others_leaves_each_its_own_random_numbers(together):
    dataset = DatasetSource(DrawingDataset())
    source = Reading(ConcatSource([dataset]) if together else dataset, together)
    options = {"worker_kind": "process", "weights": None, "epoch_size": None}
    found = pairs(source, **options)
    own = {number: drawn for number, drawn, _ in found}
    assert len(set(own.values())) == SAMPLES
    assert own == {number: drawn for number, drawn, _ in pairs(source, **options, batch_size=3)}
    assert {number: partner for number, _, partner in found} == {n: own[(n + 1) % SAMPLES] for n in own}


class Damaged(Drawing):
    def read_into(self, samples, out):
        if 5 in samples:
            raise CorruptError("damaged", sample_id=5)
        super().read_into(samples, out)


@pytest.mark.parametrize("kind", ["crops", "sample_transform"])
def test_a_sample_that_stands_in_for_another_draws_anew_and_the_others_draw_as_ever(kind):
    hooks, options = KINDS[kind][1], {"weights": None, "epoch_size": None, "shuffle": True}
    found = pairs(Damaged(), on_error="substitute", max_bad=1.0, **hooks, **options)
    whole = pairs(Drawing(), **hooks, **options)
    (stand_in,) = set(found) - set(whole)
    assert len(found) == SAMPLES
    assert set(whole) - set(found) == {pair for pair in whole if pair[0] == 5}
    assert stand_in[0] in {number for number, *_ in found if number != 5}
