"""Transforms and sources of the user that change between passes, and draw in threads."""

import contextlib
import errno
import random

import numpy as np
import pytest
import torch
from support.device.training_loop import pretend
from support.failures import raising
from support.sources.hooked_loaders import hooked, source
from support.threads.interrupts import interrupted
from support.threads.waits import until
from waiting.on_device.fake_streams import FakeStreams

from lit_async_data import AsyncLoader, BatchSpec, FieldSpec, LoaderOptions, Source, StorageLayout
from lit_async_data.engine.loader.recipe import schedule_of
from lit_async_data.engine.pipeline.thread_pipeline import ThreadPipeline
from lit_async_data.errors import FormatError, SourceError
from lit_async_data.sources.contract.source import ChunkRun
from lit_async_data.sources.contract.user_code import states
from lit_async_data.testing import ArraySource


@pytest.mark.parametrize("dtype", [">f4", np.dtype(">f4"), np.dtype("U5"), np.dtype("M8[s]"), np.dtype("f4,i4")])
def test_a_field_that_no_tensor_can_hold_is_named_before_anything_is_read(dtype):
    class Own(ArraySource):
        spec = BatchSpec({"x": FieldSpec((2,), dtype)}, as_mapping=True)

    with pytest.raises(FormatError, match=r"^Own: x: .*[fUM,].* is no dtype of tensors; change its spec$"):
        AsyncLoader(Own({"x": np.zeros((4, 2))}), {"batch_size": 2})


def test_what_a_loader_takes_is_shown_in_words():
    with AsyncLoader(ArraySource({"x": np.zeros(8)}), {"batch_size": 2, "workers": 0}) as loader:
        assert repr(loader.footprint).startswith("<ResourcePlan of no workers (")


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


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ((ThreadPipeline, "_take_setup"), OSError(errno.ENOBUFS, "No buffer space available")),
        ((ArraySource, "count_changes"), SourceError("the samples are others")),
    ],
)
def test_a_change_holds_though_its_pass_could_not_begin_by_it(where, error, monkeypatch):
    shift, found = Shift(), []
    with hooked(sample=shift, workers=1, worker_kind="thread") as loader:
        list(loader)
        pipeline = loader._run.engine.feed.pipeline
        until(pipeline, lambda: pipeline.ready >= 2)
        shift.by = 100
        with monkeypatch.context() as patched, contextlib.suppress(SourceError):
            patched.setattr(*where, raising(error))
            found.append(loader.next())
        found += [loader.next() for _ in range(len(loader) - len(found))]
    assert [int(batch["y"][0]) - 100 for batch in found] == [*range(0, len(source()), 4)]


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
        ("neither", THREAD, 0),
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
    found = [line for line in caplog.messages if "drew random numbers from the global generator of random" in line]
    assert len(found) == lines


def test_sources_of_this_package_are_asked_nothing():
    of = ArraySource({"y": np.arange(3)})
    assert (of.runs_user_code, of.count_changes()) == (False, 0)


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
        ({}, {}, False),
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
