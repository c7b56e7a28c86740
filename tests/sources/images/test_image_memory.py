"""Large images are decoded one at a time in a process, however many workers it has."""

import threading

import numpy as np
import pytest
from PIL import Image
from support.files.pictures import stored

from lit_async_data.errors import FormatError
from lit_async_data.sources.images import image as images
from lit_async_data.sources.images.image_shape import ImageShape


def black(kind, width, height):
    return stored(Image.new("RGB", (width, height)), kind)


def decode(data):
    images.decode(data, ImageShape(image_size=8), np.zeros((8, 8, 3), "u1"), None, "x")


class Turnstile:
    """A lock that tells who has come to it."""

    def __init__(self):
        self.lock, self.came = threading.Lock(), threading.Semaphore(0)

    def __enter__(self):
        self.came.release()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


def test_large_images_wait_for_each_other_and_small_ones_do_not(monkeypatch):
    turn, entered, go_on = Turnstile(), threading.Semaphore(0), threading.Semaphore(0)
    monkeypatch.setattr(images, "_turn", turn)
    monkeypatch.setattr(images, "_LARGE", 100)
    values_of = images.values_of

    def held(*given):
        entered.release()
        assert go_on.acquire(timeout=30)
        return values_of(*given)

    monkeypatch.setattr(images, "values_of", held)
    large, small = black("BMP", 20, 20), black("BMP", 10, 10)
    reduced = black("JPEG", 80, 80)  # decoded at a quarter of both sides: 400 pixels, which are large as well
    threads = [threading.Thread(target=decode, args=(data,)) for data in (large, reduced, small)]
    for thread in threads[:2]:
        thread.start()
        assert turn.came.acquire(timeout=30)
    assert entered.acquire(timeout=30)
    assert not entered.acquire(blocking=False)  # the other large one waits
    threads[2].start()
    assert entered.acquire(timeout=30)  # the small one does not
    for _ in threads:
        go_on.release()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert not turn.came.acquire(blocking=False)


def test_a_large_jpeg_that_is_decoded_small_does_not_wait(monkeypatch):
    turn = Turnstile()
    monkeypatch.setattr(images, "_turn", turn)
    monkeypatch.setattr(images, "_LARGE", 400)
    decode(black("JPEG", 80, 80))
    assert not turn.came.acquire(blocking=False)


def test_an_error_ends_the_turn(monkeypatch):
    monkeypatch.setattr(images, "_LARGE", 1)
    data = black("BMP", 20, 20)

    def fails(*_):
        raise FormatError("in its turn")

    with monkeypatch.context() as patch:
        patch.setattr(images, "values_of", fails)
        with pytest.raises(FormatError, match="in its turn"):
            decode(data)
    another = threading.Thread(target=decode, args=(data,), daemon=True)
    another.start()
    another.join(30)
    assert not another.is_alive()
