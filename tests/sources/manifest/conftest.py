"""Twelve arrays."""

import numpy as np
import pytest
from support.sources.manifests import COUNT


@pytest.fixture
def folder(tmp_path):
    """Arrays that hold their own number, and no table yet."""
    (tmp_path / "a").mkdir()
    for number in range(COUNT):
        np.save(tmp_path / f"a/{number}.npy", np.full((2, 3), number, "f4"))
    return tmp_path
