"""A photograph, and both decoders of PNG."""

from __future__ import annotations

import numpy as np
import pytest

from lit_async_data.sources.manifest.images import formats

pytest.importorskip("PIL", reason="pip install 'lit-async-data[manifest]'")


@pytest.fixture(params=["imagecodecs", "Pillow"])
def png_decoder(request, monkeypatch):
    if request.param == "Pillow":
        monkeypatch.setattr(formats, "_imagecodecs", lambda: None)
    return request.param


@pytest.fixture(scope="session")
def photo():
    """427×640 pixels; without scikit-learn, waves of every length."""
    from PIL import Image

    try:
        from sklearn.datasets import load_sample_images
    except ImportError:
        rows, columns = np.mgrid[:427, :640]
        waves = [np.sin((rows * a + columns * b) ** 1.3 / 300) for a, b in ((1, 0), (0, 1), (0.5, 0.7))]
        return Image.fromarray((np.dstack(waves) * 120 + 128).astype("u1"))
    return Image.fromarray(load_sample_images().images[0])
