"""`assert_same_samples`: a failure names the first sample that differs, its file and its row."""


def assert_same_samples(actual, expected, *, key=None, samples=None, places=None):
    """Asserts that arrays have the same shape, dtype and bits.

    The message names the field by ``key``, and the first sample that differs: ``samples`` holds the number of each, and
    ``places`` file, group and row by sample number.
    """
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), key
    if actual.tobytes() != expected.tobytes():
        first = next(n for n, pair in enumerate(zip(actual, expected)) if pair[0].tobytes() != pair[1].tobytes())
        sample = first if samples is None else int(samples[first])
        where = f"{key}, sample {sample}, {places and places[sample]}"
        raise AssertionError(f"{where}: got {actual[first]}, expected {expected[first]}")
