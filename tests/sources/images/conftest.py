"""A photograph, and both decoders of PNG."""

import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from lit_async_data.sources.images import formats


@pytest.fixture(params=["imagecodecs", "Pillow"])
def png_decoder(request, monkeypatch):
    if request.param == "Pillow":
        monkeypatch.setattr(formats, "_imagecodecs", lambda: None)
    return request.param


@pytest.fixture(scope="session")
def photo():
    return Image.fromarray(load_sample_images().images[0])
