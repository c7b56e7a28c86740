"""`Normalize`: what mean and std of integers refer to."""

from __future__ import annotations

import pytest
import torch

from lit_async_data import ConfigError, Normalize

SCANS = torch.tensor([[145, 300]], dtype=torch.int16)
CHANNELS = torch.tensor([[[[0, 255]]] * 3], dtype=torch.uint8)  # an image of 1 × 2 pixels


@pytest.mark.parametrize(
    ("given", "scale", "values", "wanted"),
    [
        ((258, 113), None, SCANS, [-1, 42 / 113]),
        ((258, 113), "stored", SCANS, [-1, 42 / 113]),
        ((0, 100), "stored", SCANS, [1.45, 3]),
        ((258, 113), "type", SCANS, [(145 / 32767 - 258) / 113, (300 / 32767 - 258) / 113]),
        ((0.5, 0.5), "type", torch.tensor([[0, 255]], dtype=torch.uint8), [-1, 1]),
        (([258, 0.5], [113, 1]), None, SCANS, [-1, 299.5]),  # one of the means is none of values from 0 to 1
        ((0.5, 0.5), None, SCANS.float(), [289, 599]),
        ((0.5, 0.5), "type", SCANS.float(), [289, 599]),
        ((0.5, 0.5), None, torch.tensor([[False, True]]), [-1, 1]),
        (([0.1, 0.2, 0.3], [1, 2, 3]), "type", CHANNELS, [[[-0.1, 0.9]], [[-0.1, 0.4]], [[-0.1, 0.7 / 3]]]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mean_and_std_are_those_of_the_stored_values_unless_scale_says_otherwise(given, scale, values, wanted, dtype):
    (found,) = Normalize(*given, scale=scale, dtype=dtype)((values,))
    assert torch.allclose(found, torch.tensor([wanted], dtype=found.dtype), rtol=1e-6)


def test_means_from_0_to_1_of_integers_are_an_error_that_names_both_spellings():
    with pytest.raises(ConfigError, match=r'^scale: .*int16.*scale="type".*32767.*scale="stored"'):
        Normalize([0.2, 1], 0.5)((SCANS,))
    with pytest.raises(ConfigError, match=r"^scale: 'byte' is not one of stored, type"):
        Normalize(scale="byte")
