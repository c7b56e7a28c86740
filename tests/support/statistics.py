"""Images, and the statistics that numpy finds in the whole of an array."""

import numpy as np

IMAGES = (280 + 5 * np.random.default_rng(0).standard_normal((40, 3, 20, 20))).astype("f4")


def check(found, values, kept, rtol=1e-6):
    """All numbers, against those of numpy in float64; ``kept`` are axes of a sample."""
    values = np.asarray(values)
    over = tuple(axis for axis in range(values.ndim) if axis - 1 not in kept)
    wide = values.astype("f8")
    np.testing.assert_allclose(found.mean, np.nanmean(wide, over), rtol=rtol, atol=rtol * np.nanstd(wide))
    np.testing.assert_allclose(found.std, np.nanstd(wide, over), rtol=rtol)
    assert (found.min == np.nanmin(values, over)).all()
    assert (found.max == np.nanmax(values, over)).all()
    assert found.min.dtype == values.dtype
    assert (found.nans == np.isnan(wide).sum(over)).all()
    assert (found.count == (~np.isnan(wide)).sum(over)).all()
    assert found.axis == kept
