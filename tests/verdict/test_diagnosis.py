"""Each cause of waiting is named, with the option that helps, and never more workers than cores."""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data import AsyncLoader
from lit_async_data.host.metrics.stages import Stage, StageTimes
from lit_async_data.sources.contract.storage_layout import Reading
from lit_async_data.testing import ArraySource
from lit_async_data.verdict.diagnosis import verdict
from lit_async_data.verdict.facts import Facts, Readers
from lit_async_data.verdict.finding import Bound, Option, Verdict

BATCHES = 100


def facts(step_s=0.01, *, read=0.0, decode=0.0, transform=0.0, copy=0.0, cpu=None, cores=4, busy=0.0, **options):
    """A loop beside readers, with the seconds that each stage takes per batch; the slowest of all decides."""
    readers = Readers(**options)
    worked = read + decode + transform
    beside = step_s + worked if readers.kind == "caller" else max(step_s, worked / max(readers.count, 1), copy)
    cpu = worked if cpu is None else cpu
    return Facts(
        batches=BATCHES,
        total_s=BATCHES * beside,
        waited_s=BATCHES * (beside - step_s),
        loop_cpu_s=BATCHES * busy,
        process_cpu_s=BATCHES * (busy + (cpu if readers.kind in ("thread", "caller") else 0)),
        cores=cores,
        starved=BATCHES if beside > step_s else 0,
        stages=StageTimes(
            Stage(BATCHES * read),
            Stage(BATCHES * decode),
            Stage(BATCHES * transform),
            Stage(BATCHES * copy),
            BATCHES * cpu,
        ),
        readers=readers,
    )


PYTHON = {"reading": "python"}
PROCESS = {"kind": "process", "gil": False}


@pytest.mark.parametrize(
    ("measured", "bound", "cure"),
    [
        (facts(), Bound.LOOP, ""),
        (facts(0.02, decode=0.01), Bound.LOOP, ""),
        (facts(read=0.02, cpu=0.001), Bound.READING, "loader.workers=3"),
        (facts(read=0.02, cpu=0.001, cores=2), Bound.READING, "loader.workers=2"),
        (facts(read=0.02, cpu=0.001, cores=1), Bound.READING, "loader.workers=2"),
        (facts(decode=0.018, reading="decoded", **PROCESS), Bound.DECODING, "loader.workers=2"),
        (facts(decode=0.06, reading="decoded", **PROCESS), Bound.DECODING, "loader.workers=4"),
        (facts(read=0.001, transform=0.018, apart=True, **PYTHON, **PROCESS), Bound.TRANSFORM, "loader.workers=2"),
        (
            facts(read=0.001, transform=0.018, **PYTHON),
            Bound.TRANSFORM,
            "loader.worker_kind=process loader.workers=2",
        ),
        (facts(read=0.02, apart=True, **PYTHON, **PROCESS), Bound.PYTHON, "loader.workers=3"),
        (facts(read=0.012, cpu=0.004, busy=0.009, **PYTHON), Bound.GIL, "loader.worker_kind=process"),
        (
            facts(decode=0.012, reading="locked", compressed=True, **PROCESS),
            Bound.LOCK,
            "python -m lit_async_data pack",
        ),
        (facts(read=0.012, reading="locked", compressed=True, **PROCESS), Bound.LOCK, "python -m lit_async_data pack"),
        (facts(read=0.012, reading="locked", **PROCESS), Bound.LOCK, ""),
        (facts(decode=0.018, reading="locked", apart=True, **PROCESS), Bound.LOCK, "loader.workers=2"),
        (facts(read=0.02, reading="opened", **PROCESS), Bound.READING, ""),
        (facts(0.01, copy=0.02), Bound.COPY, "uint8"),
        (facts(0.01, read=0.01, kind="caller", count=0), Bound.CALLER, "loader.workers=1"),
        (facts(0.01, read=0.01, kind="caller", count=0, stuck="a lambda"), Bound.CALLER, "say what keeps it"),
        (facts(0.01, read=0.02, kind="foreign", count=1), Bound.FOREIGN, "num_workers=3"),
        (facts(0.01, read=0.02, kind="foreign", count=-1), Bound.FOREIGN, ""),
    ],
)
def test_the_slow_stage_is_named_with_what_helps(measured, bound, cure):
    found = verdict(measured)
    assert found.bound is bound
    assert cure in found.cure() if cure else not found.cure()


def test_a_loader_that_is_read_by_the_loop_should_get_a_worker():
    # All of it is waited for: the loader's own `next` is called when a batch is wanted.
    measured = dataclasses.replace(
        facts(0.01, read=0.01, kind="foreign", count=0), total_s=2.0, waited_s=1.0, starved=BATCHES
    )
    assert verdict(measured).cure() == "num_workers=1 of your DataLoader"
    assert verdict(measured).gain == pytest.approx(0.5)


PACK = {"packing": "python -m lit_async_data pack x.h5 -o packed.h5", "reading": "decoded", "compressed": True}
IN_VAIN = {"shuffle": "global", "amplification": 4.0, **PACK}


def test_decoding_in_vain_is_saved_by_a_chunk_shuffle_that_mixes_well_and_else_by_packing():
    measured = facts(decode=0.02, cores=1, mixing=0.6, **IN_VAIN)
    found = verdict(measured)
    assert (found.bound, found.cure()) == (Bound.DECODING, "loader.shuffle=chunk")
    assert found.gain == pytest.approx(0.5)
    packed = verdict(facts(decode=0.02, cores=1, mixing=0.1, **IN_VAIN))
    line = "decoding-bound; python -m lit_async_data pack x.h5 -o packed.h5 should save about 50 %"
    assert str(packed) == line


def test_where_nothing_is_decoded_in_vain_only_a_file_without_compression_takes_less_work():
    found = verdict(facts(decode=0.02, cores=1, **PACK))
    assert found.cure() == f"{PACK['packing']} --codec none writes a larger file that needs no decoding"
    assert "should save" not in str(found)
    images = verdict(facts(decode=0.02, cores=1, **PACK | {"compressed": False}))
    assert images.cure() == f"{PACK['packing']} writes a file that is read with less work"


@pytest.mark.parametrize(
    "measured",
    [
        facts(decode=0.004, read=0.016, cores=1, **PACK),
        facts(decode=0.001, transform=0.02, cores=1, **PACK),
        facts(decode=0.02, cores=1, **PACK | {"packing": ""}),
        facts(0.01, decode=0.05, kind="foreign", count=4),
    ],
    ids=["reading", "a transform", "random crops", "a foreign loader"],
)
def test_packing_is_not_proposed_where_something_else_takes_the_time_or_it_would_pack_something_else(measured):
    assert verdict(measured).option is Option.NOTHING


def test_what_workers_auto_has_tried_is_not_proposed():
    assert verdict(facts(decode=0.02, reading="decoded", tried=True)).option is Option.PACK


def test_cores_that_the_loop_takes_are_not_promised_to_workers():
    free = facts(decode=0.019, cores=2, busy=0.0, reading="decoded", **PROCESS)
    taken = facts(decode=0.019, cores=2, busy=0.0095, reading="decoded", **PROCESS)
    assert verdict(free).option is Option.WORKERS
    assert verdict(taken).gain < verdict(free).gain


def test_readers_that_wait_for_cores_are_no_slow_storage():
    measured = facts(decode=0.04, cpu=0.019, cores=1, busy=0.02, reading="decoded", **PROCESS)
    assert verdict(measured).bound is Bound.CORES


def test_cores_that_other_programs_take_are_no_slow_storage_and_not_promised():
    alone = facts(decode=0.03, cpu=0.014, cores=2, reading="decoded", **PROCESS)
    assert verdict(alone).bound is Bound.READING
    crowded = verdict(dataclasses.replace(alone, elsewhere=1.5))
    assert (crowded.bound, crowded.option) == (Bound.CORES, Option.PACK)
    told = dataclasses.replace(alone, elsewhere=1.5, readers=Readers(reading="decoded"), readers_queued_s=0.02)
    assert verdict(told).bound is Bound.READING  # nearly all of the time they wanted no core
    queued = dataclasses.replace(told, readers_queued_s=1.5)
    assert verdict(queued).bound is Bound.CORES


def test_readers_that_could_keep_up_want_a_deeper_queue():
    late = dataclasses.replace(facts(read=0.005), total_s=1.2, waited_s=0.2, starved=BATCHES // 2)
    assert verdict(late).cure() == "loader.queue_depth=8"


def test_the_price_of_a_hand_over_is_no_lack_of_data():
    ready = dataclasses.replace(facts(read=0.005), total_s=1.1, waited_s=0.1)
    assert verdict(ready).bound is Bound.HANDOVER
    # A transform that the loop runs by itself is waited for as well.
    transforms = dataclasses.replace(ready, readers=dataclasses.replace(ready.readers, in_loop=True))
    assert str(verdict(transforms)).startswith("data keep up; each batch was ready, and the loop itself runs device_tr")


@pytest.mark.parametrize(("transform", "in_loop"), [(lambda batch: batch, True), (None, False)])
def test_a_device_transform_runs_in_the_loop_on_a_cpu(transform, in_loop):
    source = ArraySource({"x": np.zeros(8)})
    with AsyncLoader(source, {"batch_size": 4}, device_transform=transform) as loader:
        next(loader)
        assert Readers.of(loader, loader.stats()).in_loop is in_loop


def test_the_first_batch_of_an_epoch_is_told_apart():
    assert verdict(dataclasses.replace(facts(), total_s=2.0, gap_s=1.0)).bound is Bound.FIRST
    ready = dataclasses.replace(facts(read=0.005), total_s=2.1, waited_s=0.1, gap_s=1.0)
    assert verdict(ready).bound is Bound.FIRST


# -- a full GIL --------------------------------------------------------------------------------------------------------


def shared(*, busy, busy_queued, python, python_queued, batch_s, waited=0.0, elsewhere=0.0, **readers):
    """A loop beside a thread that runs Python, with seconds per batch of each."""
    return Facts(
        batches=BATCHES,
        total_s=BATCHES * batch_s,
        waited_s=BATCHES * waited,
        loop_cpu_s=BATCHES * busy,
        loop_queued_s=BATCHES * busy_queued,
        process_cpu_s=BATCHES * (busy + python),
        readers_queued_s=BATCHES * python_queued,
        cores=2,
        elsewhere=elsewhere,
        starved=BATCHES if waited else 0,
        stages=StageTimes(transform=Stage(BATCHES * batch_s), cpu_s=BATCHES * python),
        readers=Readers(**readers),
    )


# A step of 4 ms and a transform of 4 ms, in threads of one process. Together they take 8 ms, since they share the GIL;
# and 16 ms if each has a core for half of the time only, since a thread without a core keeps the GIL.
ALONE = {"busy": 0.004, "busy_queued": 0.0, "python": 0.004, "python_queued": 0.0, "batch_s": 0.008}
CROWDED = {"busy": 0.004, "busy_queued": 0.004, "python": 0.004, "python_queued": 0.004, "batch_s": 0.016}


@pytest.mark.parametrize("reading", get_args(Reading))
@pytest.mark.parametrize("waited", [0.0, 0.005])
def test_a_full_gil_is_named_whatever_the_source(reading, waited):
    found = verdict(shared(**ALONE, waited=waited, reading=reading))
    assert (found.bound, found.cure()) == (Bound.GIL, "loader.worker_kind=process")
    assert found.gain == pytest.approx(0.37, abs=0.01)  # of 0.5, since both cores are full then


@pytest.mark.parametrize("waited", [0.0, 0.005])
def test_a_full_gil_is_named_also_where_the_cores_are_busy(waited):
    crowded = shared(**CROWDED, waited=waited, elsewhere=1.5)
    found = verdict(crowded)
    assert (found.bound, found.gain) == (Bound.GIL, 0.0)
    assert found.cure() == "loader.worker_kind=process, once a core is free for it"
    # A little time was left idle, which does not mean that more could have been had.
    assert verdict(dataclasses.replace(crowded, elsewhere=1.2)).gain == 0
    # Without the time in which they wanted a core, nobody could tell.
    untold = dataclasses.replace(crowded, loop_queued_s=0.0, readers_queued_s=0.0)
    assert verdict(untold).bound is not Bound.GIL


def test_readers_that_wait_for_the_gil_of_the_loop_are_no_slow_storage():
    measured = facts(0.01, read=0.001, transform=0.018, cpu=0.003, busy=0.007, reading="copied")
    assert verdict(measured).bound is Bound.GIL


@pytest.mark.parametrize(
    "measured",
    [
        facts(busy=0.01),
        dataclasses.replace(facts(read=0.005), total_s=1.1, waited_s=0.1),
        facts(read=0.02, cpu=0.001, reading="copied"),
    ],
    ids=["the loop", "handing over", "readers"],
)
def test_threads_of_the_program_that_hold_the_gil_are_named(measured):
    assert verdict(measured).bound is not Bound.OWN
    found = verdict(dataclasses.replace(measured, own_s=0.5))
    assert found.bound is Bound.OWN
    assert str(found) == "GIL-bound, threads of your own program hold it; do what they do in a process of its own"


def test_a_reader_process_waits_for_no_gil():
    measured = dataclasses.replace(facts(read=0.02, cpu=0.001, **PROCESS), own_s=0.5)
    assert verdict(measured).bound is Bound.READING


seconds = st.floats(0, 0.1)


measurements = st.fixed_dictionaries(
    {
        "step_s": seconds,
        "read": seconds,
        "decode": seconds,
        "transform": seconds,
        "busy": seconds,
        "cores": st.integers(1, 64),
        "count": st.integers(0, 8),
        "kind": st.sampled_from(["caller", "thread", "process", "foreign"]),
        "reading": st.sampled_from(get_args(Reading)),
        "apart": st.booleans(),
        "gil": st.booleans(),
        "compressed": st.booleans(),
        "packing": st.sampled_from(["", "pack"]),
        "mixing": st.floats(0, 1),
    }
)


@given(measurements, st.floats(0, 2), st.floats(0, 2), st.floats(0, 2))
def test_no_cure_takes_more_workers_than_cores_or_promises_more_than_was_lost(drawn, queued_s, wanted_s, own_s):
    measured = dataclasses.replace(facts(**drawn), loop_queued_s=queued_s, readers_queued_s=wanted_s, own_s=own_s)
    found = verdict(measured)
    # Steps become shorter, too, if the loop has the GIL for itself.
    assert 0 <= found.gain <= (1 if found.bound is Bound.GIL else measured.share + 1e-9)
    if found.option in (Option.WORKERS, Option.PROCESS_WORKERS, Option.NUM_WORKERS):
        waits = found.bound is Bound.READING  # needs no core each
        assert found.value <= max(measured.cores, 2 * max(measured.readers.count, 1) if waits else 0)
    again = Verdict.of_numbers(found.numbers(), found.packing)
    assert (again.bound, again.option, again.value, str(again)) == (found.bound, found.option, found.value, str(found))
