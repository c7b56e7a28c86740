"""Transforms of one sample. Reader processes import this module, so it imports only numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Sample = dict[str, Any]
Array = npt.NDArray[Any]
SIDE, CROP = 256, 224
MEAN = np.array([123.7, 116.3, 103.5], np.float32)[:, None, None]
STD = np.array([58.4, 57.1, 57.4], np.float32)[:, None, None]
# Values that `summed` adds in pure Python.
VALUES = 256


def cheap(sample: Sample) -> Sample:
    """Looks at one pixel, and changes the label."""
    sample["labels"] = int(sample["labels"]) + int(sample["data"][0, 0, 0] > 0)
    return sample


def summed(sample: Sample) -> Sample:
    """A checksum in pure Python, which holds the GIL all the time."""
    total = 0
    for value in sample["data"].ravel()[:VALUES].tolist():
        total = (total * 31 + int(value)) % 65521
    sample["labels"] = total
    return sample


def augmented(sample: Sample, rng: np.random.Generator | None) -> Sample:
    """Random crop, flip, brightness, and normalised float32: what augmentation libraries do, in numpy.

    Without ``rng`` the middle, as it is.
    """
    top = left = (SIDE - CROP) // 2
    flip, gain = False, 1.0
    if rng is not None:
        top, left = rng.integers(0, SIDE - CROP + 1, 2).tolist()
        flip, gain = bool(rng.random() < 0.5), float(rng.uniform(0.8, 1.2))
    part = sample["path"][:, top : top + CROP, left : left + CROP]
    values = (part[:, :, ::-1] if flip else part).astype(np.float32, order="C")
    values *= gain
    np.minimum(values, 255, out=values)
    values -= MEAN
    values /= STD
    sample["path"] = values
    return sample
