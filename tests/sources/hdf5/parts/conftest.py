"""Fixtures of the tests of parts."""

import numpy as np
import pytest


@pytest.fixture
def patients(h5):
    """Writes groups patient_1, patient_10, patient_2, in which every value encodes its place."""

    def written(name="x.h5", counts={1: 4, 2: 5, 10: 3}, prefix=""):  # noqa: B006  # it is not changed
        datasets = {}
        for number, count in counts.items():
            values, options = 100 * number + np.arange(count), {"chunks": (min(2, count), 3), "compression": "gzip"}
            signal = np.repeat(values[:, None], 3, axis=1).astype("f4")
            datasets[f"{prefix}patient_{number}/label"] = values
            datasets[f"{prefix}patient_{number}/signal"] = {"data": signal, **options}
        return h5(name, **datasets)

    return written
