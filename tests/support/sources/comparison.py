"""`assert_same_samples`: a failure names the first sample that differs, its file and its row."""

import numpy as np


def assert_same_samples(actual, expected, *, key=None, samples=None, places=None):
    """Asserts that arrays have the same shape, dtype and bits.

    The message names the field by ``key``, and the first sample that differs: ``samples`` holds the number of each, and
    ``places`` file, group and row by sample number.
    """
    field = "" if key is None else f"field {key!r}: "
    actual_type, expected_type = f"{actual.dtype} {actual.shape}", f"{expected.dtype} {expected.shape}"
    assert actual_type == expected_type, f"{field}got {actual_type}, expected {expected_type}"
    actual, expected = np.atleast_1d(actual), np.atleast_1d(expected)
    different = ~_equal(actual, expected)
    if not different.any():
        return
    count = np.count_nonzero(different.any(axis=tuple(range(1, different.ndim))))
    index = tuple(np.argwhere(different)[0].tolist())
    sample = index[0] if samples is None else int(samples[index[0]])
    place = ""
    if places is not None:
        file, group, row = places[sample]
        place = f", row {row} of {file}:{group}"
    raise AssertionError(
        f"{field}{count} of {len(different)} samples differ; the first is sample {sample}{place}: "
        f"got {actual[index]}, expected {expected[index]} at {list(index)}"
    )


def _equal(actual, expected):
    if actual.dtype.kind not in "fc":
        return np.asarray(actual == expected)
    shape = (*actual.shape, actual.itemsize)
    return (
        (np.ascontiguousarray(actual)[..., None].view("u1") == np.ascontiguousarray(expected)[..., None].view("u1"))
        .reshape(shape)
        .all(-1)
    )
