"""Each cause of waiting is named, with a change that can help and is not made yet."""

import dataclasses

import pytest

from lit_async_data.engine.stats import Wait
from lit_async_data.engine.verdict.diagnosis import Bound, Cure, Verdict, verdict
from lit_async_data.engine.verdict.watch import Facts, Readers
from lit_async_data.sources.contract.stage_clock import Work

BATCHES = 100
PROCESS = {"kind": "process"}


def facts(step_s=0.01, *, cpu=0.0, read=0.0, decode=0.0, transform=0.0, copy=0.0, cores=4, free=4.0, **readers):
    """A loop beside readers, with the seconds that each stage takes per batch; the slowest of all decides."""
    known = Readers(**readers)
    beside = max(step_s, (read + decode + transform) / max(known.count, 1), copy)
    waited_s = BATCHES * (beside - step_s)
    one = Work(read + decode + transform, decode, transform, cpu, copy_s=copy)
    times = Work._make(BATCHES * each for each in one)
    return Facts(
        Wait(BATCHES, waited_s, 0.0, BATCHES * step_s), 0.0, cores, free, BATCHES * (waited_s > 0), times, known
    )


def behind(starved=BATCHES // 2, *, queue_depth=4, busy_s=1.0, **seconds):
    """Readers that could keep up, and how long the loop waited all the same."""
    known = facts(read=0.005, queue_depth=queue_depth)
    return dataclasses.replace(known, waited=Wait(BATCHES, busy_s=busy_s, **seconds), starved=starved)


@pytest.mark.parametrize(
    ("measured", "bound", "cure", "value"),
    [
        (facts(), Bound.LOOP, Cure.NONE, 0),
        (facts(0.02, decode=0.01), Bound.LOOP, Cure.NONE, 0),
        (facts(read=0.03), Bound.READING, Cure.WORKERS, 3),
        (facts(read=0.03, cores=1, free=0.0), Bound.READING, Cure.WORKERS, 2),
        (facts(read=0.03, cpu=0.03), Bound.READING, Cure.WORKERS, 3),
        (facts(read=0.03, cpu=0.03, free=0.2), Bound.READING, Cure.CORES, 0),
        (facts(read=0.09, count=2), Bound.READING, Cure.NONE, 0),
        (facts(read=0.02, reading="opened"), Bound.READING, Cure.PACK, 0),
        (facts(decode=0.018, reading="decoded", by_auto=4), Bound.DECODING, Cure.AUTO, 0),
        (facts(decode=0.09, reading="decoded", auto="tries", by_auto=4), Bound.DECODING, Cure.NONE, 0),
        (facts(decode=0.09, reading="decoded", count=4, by_auto=4, cores=8), Bound.DECODING, Cure.WORKERS, 8),
        (facts(decode=0.09, reading="decoded", count=5, by_auto=4, cores=8), Bound.DECODING, Cure.PACK, 0),
        (facts(decode=0.02, reading="decoded", in_vain=True), Bound.DECODING, Cure.SHUFFLE, 0),
        (facts(decode=0.02, reading="decoded", auto="tried"), Bound.DECODING, Cure.PACK, 0),
        (facts(decode=0.02, reading="decoded", free=0.2), Bound.DECODING, Cure.PACK, 0),
        (facts(decode=0.02, free=0.2, replaceable=False), Bound.DECODING, Cure.CORES, 0),
        (facts(decode=0.08, count=4, by_auto=4, replaceable=False), Bound.DECODING, Cure.NONE, 0),
        (facts(transform=0.02, reading="python", chosen=True), Bound.TRANSFORM, Cure.PROCESS, 0),
        (facts(transform=0.02, reading="python"), Bound.TRANSFORM, Cure.NONE, 0),
        (facts(transform=0.02, reading="python", by_auto=4, **PROCESS), Bound.TRANSFORM, Cure.AUTO, 0),
        (facts(read=0.02, reading="python", by_auto=4, **PROCESS), Bound.PYTHON, Cure.AUTO, 0),
        (facts(decode=0.02, reading="locked", **PROCESS), Bound.LOCK, Cure.PACK, 0),
        (facts(copy=0.02), Bound.COPY, Cure.BYTES, 0),
        (facts(read=0.02, kind="caller", count=0, chosen=True), Bound.CALLER, Cure.WORKERS, 1),
        (facts(read=0.02, kind="caller", count=0), Bound.CALLER, Cure.NONE, 0),
        (facts(read=0.02, kind="foreign", count=0), Bound.FOREIGN, Cure.NUM_WORKERS, 2),
        (facts(read=0.02, kind="foreign", count=0, free=0.1), Bound.FOREIGN, Cure.NUM_WORKERS, 2),
        (facts(read=0.05, kind="foreign", count=2), Bound.FOREIGN, Cure.SOURCE, 0),
        (facts(read=0.05, kind="foreign", count=1, free=0.1), Bound.FOREIGN, Cure.SOURCE, 0),
        (facts(read=0.05, kind="foreign", count=2, replaceable=False), Bound.FOREIGN, Cure.NONE, 0),
        (facts(read=0.02, kind="foreign", count=-1, replaceable=False), Bound.FOREIGN, Cure.NONE, 0),
        (behind(wait_s=0.2), Bound.LATE, Cure.QUEUE_DEPTH, 8),
        (behind(wait_s=0.2, queue_depth=8), Bound.LATE, Cure.NONE, 0),
        (behind(wait_s=0.2, queue_depth=16), Bound.LATE, Cure.NONE, 0),
        (behind(0, wait_s=0.1), Bound.HANDOVER, Cure.BATCH_SIZE, 0),
        (behind(0, wait_s=0.1, gap_s=1.0), Bound.FIRST, Cure.NONE, 0),
    ],
)
def test_the_slow_stage_is_named_with_the_first_change_that_can_help(measured, bound, cure, value):
    assert verdict(measured)[1:] == (bound, cure, value)


def test_a_transform_that_the_loop_runs_itself_is_named_whatever_else_is_waited_for():
    late = behind(wait_s=0.2, gap_s=0.1, busy_s=1.4)
    assert verdict(late).bound is Bound.LATE
    assert verdict(dataclasses.replace(late, transform_s=0.34)).sentence("training", "1.7 s") == (
        "training spent 20.0 % of 1.7 s in device_transform, which runs in the loop on a CPU; as batch_transform, in "
        "numpy, the readers run it"
    )


@pytest.mark.parametrize("cure", Cure)
def test_every_sentence_is_whole(cure):
    said = Verdict(0.5, Bound.LATE, cure, 8).sentence("test", "2.0 s", "data.test_loader.")
    assert said.startswith("test waited 50.0 % of 2.0 s for data: a batch is late now and then")
    assert not set(said) & {"{", "}"}
