"""What drew from the global random generators is found, and they are put back."""

import random

import numpy as np
import pytest
import torch

from lit_async_data.sources.contract.user_code import READING, put_back, seed_generators, states


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (lambda: torch.rand(()), ["torch"]),
        (np.random.random, ["numpy"]),
        (random.random, ["random"]),
        (lambda: random.shuffle([torch.rand(()), 1]), ["torch", "random"]),
        (lambda: np.random.default_rng(0).random(), []),
    ],
)
def test_the_generators_that_were_drawn_from_are_named_and_put_back(draw, found):
    before = states()
    with put_back() as drawn:
        draw()
    assert drawn == found
    assert states() == before


def test_what_a_thread_reads_is_known_in_that_thread_and_forgotten_after_it_even_if_an_interrupt_had_left_some():
    READING.epoch, READING.key = 3, 4  # as an interrupt between two steps may leave it
    with READING.of(5, 1, alike=False):
        first, key = READING.keys(0, np.arange(3)), READING.key
        assert READING.epoch == 5
        assert len({*first, *READING.keys(1, np.arange(3))}) == 6
    assert (READING.epoch, READING.key) == (None, None)
    with READING.of(6, 1, alike=True):
        assert READING.epoch is None
        alike = READING.key
    with READING.of(7, 1, alike=True):
        assert READING.key == alike != key


def test_the_generators_have_other_numbers_for_other_keys_and_from_each_other():
    def numbers(key):
        with put_back():
            seed_generators(key)
            return round(random.random(), 6), round(np.random.random(), 6), round(float(torch.rand(())), 6)  # noqa: NPY002

    assert numbers(2**63 + 5) == numbers(2**63 + 5)
    assert (
        len({*numbers(5 * 2**32 + 5), *numbers(6 * 2**32 + 6), *numbers(5 * 2**32 + 6)})
        == 7  # numpy takes the upper half, torch the lower
    )  # numpy takes the upper half
