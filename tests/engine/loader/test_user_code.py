"""Transforms and sources of the user that change between passes, and draw in threads."""

import random

import numpy as np
import pytest
import torch
from support.sources.hooked_loaders import hooked, source
from support.threads.waits import until

from lit_async_data import AsyncLoader, BatchSpec, FieldSpec, Source, StorageLayout
from lit_async_data.engine.loader.user_code import UserCode
from lit_async_data.engine.resources.workers import Workers
from lit_async_data.testing import ArraySource


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
                pipeline = loader._machinery.engine.feed.pipeline
                until(pipeline, lambda pipeline=pipeline: pipeline.ready >= 2)


def test_what_was_read_ahead_is_used_where_nothing_has_changed():
    with hooked(sample=Shift(), workers=1, worker_kind="thread") as loader:
        list(loader)
        engine = loader._machinery.engine
        list(loader)
        assert loader._machinery.engine is engine


class Own(Source):
    """Sample n is n and what is added; says how it is read."""

    def __init__(self, reading="python"):
        self.add, self.reading, self.draw = 0, reading, lambda: 0

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
            pipeline = loader._machinery.engine.feed.pipeline
            until(pipeline, lambda pipeline=pipeline: pipeline.ready >= 2)


def careless(sample):
    return {"y": sample["y"] + 0 * int(random.random())}


@pytest.mark.parametrize(
    ("options", "lines"), [({}, 0), ({"workers": 1, "worker_kind": "thread"}, 1)], ids=["loop", "thread"]
)
def test_a_hook_that_draws_in_a_thread_is_warned_of_once(options, lines, caplog):
    with hooked(sample=careless, **options) as loader:
        list(loader), list(loader)
    found = [line for line in caplog.messages if "drew random numbers from" in line]
    assert len(found) == lines
    assert all(
        line.startswith("sample_transform drew random numbers from the global generator of random") for line in found
    )


PROCESS = Workers("process", 2, "", 2, apart=True)


@pytest.mark.parametrize(
    ("workers", "reading", "drawn", "names"),
    [
        (PROCESS, "python", [("sample_transform", ["torch"])], []),
        (PROCESS, "copied", [("sample_transform", ["torch"])], []),
        (Workers("process", 4, "", 4), "decoded", [], []),
        (Workers("thread", 1, "", 1), "python", [], ["Own"]),
        (Workers("thread", 1, "", 1), "copied", [("batch_transform", ["torch"])], ["batch_transform"]),
        (Workers("caller", 0, ""), "python", [("sample_transform", ["torch"])], []),
    ],
)
def test_what_no_run_repeats_is_said_of_threads_alone(workers, reading, drawn, names):
    own = Own(reading)
    own.draw = random.random
    assert [line.partition(" ")[0] for line in UserCode(own).unrepeatable(workers, drawn)] == names


def test_sources_of_this_package_are_asked_nothing():
    of = ArraySource({"y": np.arange(3)})
    assert (of.runs_user_code, of.count_changes(), of.global_draws()) == (False, 0, [])
