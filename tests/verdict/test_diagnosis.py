"""Each cause of waiting is named, with the option that helps, and never more workers than cores."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.host.stages import Stage, StageTimes
from lit_async_data.host.stats import Slowdown
from lit_async_data.verdict.diagnosis import Bound, Option, Verdict, verdict
from lit_async_data.verdict.facts import Facts, Readers

BATCHES = 100


def facts(step_s=0.01, *, read=0.0, decode=0.0, transform=0.0, copy=0.0, cpu=None, cores=4, busy=0.0, **options):
    """A loop beside readers of which each takes so many seconds per batch; the slowest of all decides."""
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
        (facts(decode=0.012, reading="locked", **PROCESS), Bound.LOCK, "more workers do not help"),
        (facts(0.01, copy=0.02), Bound.COPY, "uint8"),
        (facts(0.01, read=0.01, kind="caller", count=0), Bound.CALLER, "loader.workers=1"),
        (facts(0.01, read=0.01, kind="caller", count=0, stuck="a lambda"), Bound.CALLER, "says what keeps it"),
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


def test_decoding_that_a_chunk_shuffle_saves_is_told_where_no_core_is_free():
    measured = facts(decode=0.02, cores=1, reading="decoded", shuffle="global", amplification=4.0)
    found = verdict(measured)
    assert (found.bound, found.cure()) == (Bound.DECODING, "loader.shuffle=chunk")
    assert found.gain == pytest.approx(0.5)
    stuck = verdict(facts(decode=0.02, cores=1, reading="decoded"))
    assert stuck.option is Option.PACK
    assert "should save" not in str(stuck)


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


def test_readers_that_could_keep_up_want_a_deeper_queue():
    late = dataclasses.replace(facts(read=0.005), total_s=1.2, waited_s=0.2, starved=BATCHES // 2)
    assert verdict(late).cure() == "loader.queue_depth=8"


def test_the_price_of_a_hand_over_is_no_lack_of_data():
    ready = dataclasses.replace(facts(read=0.005), total_s=1.1, waited_s=0.1)
    assert verdict(ready).bound is Bound.HANDOVER


def test_the_first_batch_of_an_epoch_is_told_apart():
    assert verdict(dataclasses.replace(facts(), total_s=2.0, gap_s=1.0)).bound is Bound.FIRST
    ready = dataclasses.replace(facts(read=0.005), total_s=2.1, waited_s=0.1, gap_s=1.0)
    assert verdict(ready).bound is Bound.FIRST


def test_a_loop_that_readers_slow_down_without_any_waiting():
    slowed = dataclasses.replace(facts(busy=0.01), slowdown=Slowdown(0.3, 0.01))
    assert str(verdict(slowed)).startswith("GIL-bound")
    assert str(verdict(slowed)).endswith("loader.worker_kind=process should save about 30 %")
    apart = dataclasses.replace(slowed, readers=Readers(**PROCESS))
    assert verdict(apart).bound is Bound.CORES
    uncertain = dataclasses.replace(slowed, slowdown=Slowdown(0.3, 0.2))
    assert verdict(uncertain).bound is Bound.LOOP


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
        "reading": st.sampled_from(["copied", "decoded", "locked", "python"]),
        "apart": st.booleans(),
        "gil": st.booleans(),
    }
)


@given(measurements)
def test_no_cure_takes_more_workers_than_cores_or_promises_more_than_was_lost(drawn):
    measured = facts(**drawn)
    found = verdict(measured)
    # Steps become shorter, too, if the loop has the GIL for itself.
    assert 0 <= found.gain <= (1 if found.bound is Bound.GIL else measured.share + 1e-9)
    if found.option in (Option.WORKERS, Option.PROCESS_WORKERS, Option.NUM_WORKERS):
        assert found.value <= measured.cores
    again = Verdict.of_numbers(found.numbers())
    assert (again.bound, again.option, again.value, str(again)) == (found.bound, found.option, found.value, str(found))
