"""What drew from the global random generators is found, and they are put back."""

import random

import numpy as np
import pytest
import torch

from lit_async_data.engine.hooks.randomness import put_back, states


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
