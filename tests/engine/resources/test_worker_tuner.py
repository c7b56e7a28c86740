"""The number of workers grows while the loop waits and it helps; batches stay in order meanwhile."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_data.engine.resources.plan import WINDOW, WorkerTuner


class Loop:
    """A loop that waits as long as its workers make it wait.

    Args:
        load_s: Seconds that one worker needs for a batch.
        step_s: Seconds that the loop needs for a step.
        useful: Workers that run side by side; more share their time.
    """

    def __init__(self, load_s, step_s, useful, most=8):
        self.now, self.batches = 0.0, 0
        self.load_s, self.step_s, self.useful = load_s, step_s, useful
        self.tuner = WorkerTuner(1, most, window_s=0.25, clock=lambda: self.now)
        self.counts = [1]

    def run(self, steps):
        for _ in range(steps):
            each = self.load_s / min(self.tuner.count, self.useful)
            waits = max(each - self.step_s, 0.0)
            self.now += self.step_s + waits
            self.batches += 1
            if waits:
                self.counts.append(self.tuner.waited(waits, self.batches))
        return self.tuner.count


@pytest.mark.parametrize(
    ("load_s", "step_s", "useful", "found"),
    [
        (0.1, 0.0, 3, 3),  # no more than run side by side
        (0.1, 0.03, 8, 4),  # no more than the loop needs
        (0.1, 0.2, 8, 1),  # it never waits
        (0.1, 0.0, 1, 1),  # threads that wait for one lock
        (0.1, 0.0, 20, 8),  # no more than there may be
    ],
)
def test_as_many_workers_as_help(load_s, step_s, useful, found):
    assert Loop(load_s, step_s, useful).run(2000) == found


@given(load_s=st.floats(1e-4, 1), step_s=st.floats(0, 1), useful=st.integers(1, 10), most=st.integers(1, 10))
def test_it_changes_one_by_one_and_comes_to_rest(load_s, step_s, useful, most):
    loop = Loop(load_s, step_s, useful, most)
    loop.run(200 * WINDOW)
    counts = loop.counts
    assert all(1 <= count <= most for count in counts)
    assert all(abs(after - before) <= 1 for before, after in itertools.pairwise(counts))
    # Taken back at most once; after that the number is final.
    assert sum(after < before for before, after in itertools.pairwise(counts)) <= 1


def test_a_wait_that_is_rare_adds_nobody():
    now = iter(range(10**6))
    tuner = WorkerTuner(1, 4, window_s=0, clock=lambda: next(now))
    assert {tuner.waited(0.001, batches) for batches in range(0, 10**4, 10)} == {1}
