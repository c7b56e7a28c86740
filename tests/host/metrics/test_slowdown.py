"""The slowdown that readers cause, found by pausing them: a simulated loop, whose true slowdown is known."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.host.metrics.slowdown import LEAST_GROUPS, PAUSES, STALE, SlowdownMeter
from lit_async_data.host.pipeline import slowdown_probe
from lit_async_data.host.pipeline.slowdown_probe import SlowdownProbe


class Loop:
    """A training loop beside readers, by a clock of its own. Keeps what `SlowdownProbe` uses of a `Pipeline`.

    Args:
        read_s: Seconds that one reader needs for a slot.
        speed: Of the loop while one reader reads; with two readers it is the square of that.
        readers: How many there are.
        depth: Slots that can be ready.
        batches: Batches in a slot.
        first: Batches that are ready at first; None for those of all slots.
    """

    def __init__(self, read_s=0.5, speed=0.6, readers=1, depth=4, batches=1, *, first=None):
        self.read_s, self.speed, self.readers, self.depth, self.batches = read_s, speed, readers, depth, batches
        self.now = 0.0
        self.ready = depth * batches if first is None else first
        self.reading = []  # when each read ends
        self.paused_until = None
        self.pauses, self.begun_with, self.waits = 0, [], []

    def pause(self, seconds):
        self.pauses += 1
        self.begun_with.append(self.ready)
        self.paused_until = self.now + seconds

    def resume(self):
        self.paused_until = None

    @property
    def quiet(self):
        return self.paused and not self.reading

    @property
    def paused(self):
        return self.paused_until is not None and self.now < self.paused_until

    def begin_reads(self):
        slots = -(-self.ready // self.batches)
        while not self.paused and len(self.reading) < self.readers and slots + len(self.reading) < self.depth:
            self.reading.append(self.now + self.read_s)

    def go(self, work=None):
        """Let the loop work for some seconds (alone), or else wait for a batch."""
        while work is None or work > 1e-9:
            self.begin_reads()
            speed = self.speed ** len(self.reading)
            events = [*self.reading] if work is None else [*self.reading, self.now + work / speed]
            if self.paused:
                events.append(self.paused_until)
            then = min(events)
            if work is not None:
                work -= (then - self.now) * speed
            self.now = then
            done = [end for end in self.reading if end <= then]
            for end in done:
                self.reading.remove(end)
                self.ready += self.batches
            if work is None and self.ready:
                return

    def run(self, probe, lengths, first=lambda number: False):
        """Make steps of these lengths; returns the seconds of all, without waiting."""
        busy = 0.0
        for number, length in enumerate(lengths):
            asked, missed = self.now, not self.ready
            if probe is not None:
                probe.asked(self.now, self.ready, first=first(number))
            if not self.ready:
                self.resume()
                self.go()
            self.waits.append((self.now - asked, missed))
            self.ready -= 1
            if probe is not None:
                probe.left = self.now
            began = self.now
            self.go(length)
            busy += self.now - began
        return busy

    @property
    def waited(self):
        return sum(waited for waited, _ in self.waits)


def true_slowdown(lengths, **loop):
    """What the readers take, from the same loop without a probe."""
    alone = Loop(**loop)
    busy = alone.run(None, lengths)
    return (busy - sum(lengths)) / (busy + alone.waited)


def measured(lengths, **loop):
    meter, simulated = SlowdownMeter(), Loop(**loop)
    simulated.run(SlowdownProbe(simulated, meter), lengths)
    return meter.estimate, simulated


def noisy(count, *, seed=0, noise=0.1, phases=(1.0,)):
    draw = random.Random(seed)
    return [length * draw.uniform(1 - noise, 1 + noise) for length in itertools.islice(itertools.cycle(phases), count)]


@pytest.mark.parametrize(
    "loop",
    [
        {"speed": 0.6},
        {"speed": 1.0},
        {"speed": 0.5, "read_s": 0.2},
        {"speed": 0.7, "read_s": 0.9, "readers": 2},
        {"speed": 0.9, "read_s": 3.0, "batches": 16},
        {"speed": 0.6, "depth": 8, "read_s": 0.7},
    ],
    ids=["a reader", "a reader that takes nothing", "short reads", "two readers", "large slots", "a deep queue"],
)
def test_the_slowdown_of_a_loop_is_found(loop):
    lengths = noisy(3000)
    estimate, simulated = measured(lengths, **loop)
    assert estimate.share == pytest.approx(true_slowdown(lengths, **loop), abs=0.015)
    assert estimate.error < 0.01
    assert sum(waited for waited, missed in simulated.waits if missed) < 0.005 * simulated.now


@pytest.mark.parametrize("phases", [(1.0, 1.0, 1.0, 2.5), (1.0,) * 49 + (6.0,)], ids=["accumulated", "logged"])
def test_the_slowdown_is_found_where_steps_differ(phases):
    lengths = noisy(6000, phases=phases)
    estimate, _ = measured(lengths, depth=6)
    assert abs(estimate.share - true_slowdown(lengths, depth=6)) < 0.02 + 2 * estimate.error


def test_validations_and_checkpoints_between_steps_do_not_count():
    lengths = noisy(3000)
    for number in range(100, 3000, 100):
        lengths[number] = 200.0
    estimate, _ = measured(lengths)
    assert estimate.share == pytest.approx(true_slowdown(noisy(3000)), abs=0.015)


def test_time_between_epochs_is_no_step():
    meter, loop = SlowdownMeter(), Loop(speed=1.0)
    lengths = noisy(3000, noise=0)
    lengths[9::10] = [15.0] * 300  # less than what is dropped as unusual
    loop.run(SlowdownProbe(loop, meter), lengths, first=lambda number: number % 10 == 0)
    assert meter.estimate is None or abs(meter.estimate.share) < 1e-9


def test_a_loop_that_waits_for_data_has_no_pauses_and_no_estimate():
    estimate, loop = measured(noisy(3000), read_s=1.2, speed=0.9)
    assert estimate is None
    assert loop.pauses <= 2  # of the batches that were ready at first


def test_a_loop_with_barely_enough_data_reports_no_slowdown_of_its_best_moments():
    """Steps are fast and slow by turns of hundreds, and the queue is full only where they are slow."""
    lengths = noisy(4000, phases=(0.85,) * 40 + (1.3,) * 12)
    estimate, loop = measured(lengths, read_s=0.9, speed=1.0)
    assert loop.pauses > 10
    assert estimate is None or abs(estimate.share) < 0.02


@pytest.mark.parametrize("depth", [1, 2])
def test_a_tiny_queue_has_no_pauses(depth):
    estimate, loop = measured(noisy(1000), depth=depth)
    assert (estimate, loop.pauses) == (None, 0)


def test_a_pause_begins_only_when_enough_is_ready():
    _, loop = measured(noisy(3000, noise=0.8), read_s=0.8, speed=0.8)
    assert loop.pauses > 10
    assert min(loop.begun_with) >= slowdown_probe.LEAST_READY


def test_pauses_go_on_where_fewer_batches_can_be_ready_than_at_first():
    """Slots that were filled during a slow first step hold more batches than later ones."""
    lengths = noisy(3000)
    estimate, loop = measured(lengths, depth=8, first=100)
    assert loop.pauses > 50
    assert estimate.share == pytest.approx(true_slowdown(lengths, depth=8), abs=0.015)


def test_steps_that_wait_do_so_because_of_a_pause_only_until_the_queue_is_full_again():
    """1. A pause begins while 84 batches are ready. 2. Later slots are smaller, so that 8 can be ready. 3. Now and then
    a few short steps wait, whether there are pauses or not."""
    _, loop = measured([*noisy(100), *noisy(9000, phases=(0.1,) * 20 + (1.0,) * 60)], depth=8, first=100)
    assert loop.pauses > 10


def test_where_pauses_make_steps_wait_they_become_rare(monkeypatch):
    """One reader that is almost as slow as the loop: it cannot catch up soon."""
    for name, value in {"LEAST_LEFT": 0, "LEAST_READY": 1, "FULL": 0}.items():
        monkeypatch.setattr(slowdown_probe, name, value)
    lengths = noisy(6000, noise=0.0)
    _, loop = measured(lengths, read_s=0.97, speed=1.0, depth=3)
    without = Loop(read_s=0.97, speed=1.0, depth=3)
    without.run(None, lengths)
    assert loop.pauses > 0
    assert loop.waited - without.waited < 0.006 * loop.now


def test_a_pause_that_is_over_by_itself_counts_no_steps():
    class Short(Loop):
        def pause(self, seconds):
            super().pause(1e-3)

    meter, loop = SlowdownMeter(), Short()
    loop.run(SlowdownProbe(loop, meter), noisy(1000))
    assert loop.pauses > 10
    assert meter.estimate is None


def test_readers_that_do_not_become_quiet_are_not_kept_paused():
    class Busy(Loop):
        quiet = False

    meter, loop = SlowdownMeter(), Busy()
    loop.run(SlowdownProbe(loop, meter), noisy(1000))
    assert loop.pauses > 10
    assert meter.estimate is None
    assert not any(missed for _, missed in loop.waits)


# -- the estimate ------------------------------------------------------------------------------------------------------


def filled(groups, alone=0.75, rest=1.0625, waited=0.0):
    """A meter after ``groups`` groups, and the pause that ends the last."""
    meter = SlowdownMeter()
    for cycle in range(groups * PAUSES + 1):
        meter.begin_cycle()
        for step in range(10) if cycle < groups * PAUSES else ():
            meter.add(alone if step < 2 else rest, waited, paused=step < 2)
    return meter


def test_an_estimate_takes_some_groups():
    assert filled(LEAST_GROUPS - 1).estimate is None
    assert filled(LEAST_GROUPS).estimate.share == pytest.approx(0.25)


def test_waiting_is_part_of_the_time_but_not_of_the_slowdown():
    assert filled(LEAST_GROUPS, waited=1.0).estimate.share == pytest.approx(0.125)


def test_an_estimate_that_nothing_confirms_any_more_is_dropped():
    meter = filled(LEAST_GROUPS)
    for _ in range(STALE):
        meter.add(1.0, 0.0, paused=False)
    assert meter.estimate is None


@given(alone=st.floats(0.1, 1.0), rest=st.floats(0.1, 1.0), waited=st.floats(0.0, 1.0))
def test_an_estimate_is_exact_where_steps_are_alike(alone, rest, waited):
    mean = (2 * alone + 8 * rest) / 10
    if max(alone, rest) < 3 * min(alone, rest):  # else some are left out as unusual
        estimate = filled(LEAST_GROUPS, alone, rest, waited).estimate
        assert estimate.share == pytest.approx((mean - alone) / (mean + waited))
        assert estimate.error == pytest.approx(0, abs=1e-9)


def test_steps_that_take_no_time_are_no_error():
    assert filled(LEAST_GROUPS, alone=0.0, rest=0.0).estimate is None
