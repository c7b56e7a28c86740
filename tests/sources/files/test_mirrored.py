"""A file whose blocks are fetched: each once, by threads that answer to all who wait."""

import threading

import numpy as np
import pytest
from support.files.mirrors import DATA, WHICH, at, get, opened

from lit_async_data.errors import ClosedError, SourceError, StalledError
from lit_async_data.sources.files import transport as transport_module
from lit_async_data.sources.files.mirror import BLOCK, MirroredFile
from lit_async_data.sources.files.transport import Transport


@pytest.fixture
def transport():
    made = Transport(4)
    yield made
    made.close()


def test_each_block_is_fetched_once_and_a_reader_waits_for_what_is_on_its_way(tmp_path, transport):
    mirror = opened(tmp_path)
    open_, asked = threading.Event(), []

    def slow(begin, end):
        asked.append((begin // BLOCK, -(-end // BLOCK)))
        assert open_.wait(10)
        return get(begin, end)

    filler = MirroredFile("x", WHICH, mirror, slow, transport)
    first = filler.fetch(*at(0, 1))
    assert filler.fetch(*at(1)) == first
    reader = threading.Thread(target=filler.need, args=at(0, 7))
    reader.start()
    open_.set()
    reader.join(10)
    assert sorted(asked) == [(0, 2), (7, 8)]
    filler.need(*at(0, 1, 7))
    assert len(asked) == 2


def test_what_somebody_waits_for_overtakes_what_is_read_ahead(tmp_path):
    mirror, transport, open_, asked = opened(tmp_path), Transport(1), threading.Event(), []

    def slow(begin, end):
        asked.append(begin // BLOCK)
        assert open_.wait(10)
        return get(begin, end)

    filler = MirroredFile("x", WHICH, mirror, slow, transport)
    filler.fetch(*at(0))
    while not asked:
        pass
    for block in (3, 4, 5, 6):
        filler.fetch(*at(block))
    filler.fetch(*at(7), urgent=True)
    reader = threading.Thread(target=filler.need, args=at(4, 6))  # which are on their way
    reader.start()
    while not all(filler._coming[filler._asked[block]].urgent for block in (4, 6)):
        pass
    filler.fetch(*at(4), urgent=True)
    open_.set()
    for block in (3, 5):
        filler.need(*at(block))
    reader.join(10)
    assert asked == [0, 7, 4, 6, 3, 5]
    transport.close()


def test_an_error_reaches_who_waits_and_the_range_can_be_fetched_again(tmp_path, transport):
    mirror = opened(tmp_path)
    left = [2]

    def failing(begin, end):
        left[0] -= 1
        if left[0] >= 0:
            raise SourceError("x: gone")
        return get(begin, end)

    filler = MirroredFile("x", WHICH, mirror, failing, transport)
    for _ in range(2):
        with pytest.raises(SourceError, match="gone"):
            filler.need(*at(2))
    filler.need(*at(2))
    assert np.array_equal(mirror.map[2 * BLOCK : 3 * BLOCK], DATA[2 * BLOCK : 3 * BLOCK])


def test_no_answer_is_an_error_and_closing_frees_who_waits(tmp_path, monkeypatch):
    mirror = opened(tmp_path)
    monkeypatch.setattr(transport_module, "POLL_S", 0.001)
    transport, open_, begun = Transport(1, timeout_s=0), threading.Event(), threading.Event()

    def stuck(begin, end):
        begun.set()
        assert open_.wait(10)
        return get(begin, end)

    with pytest.raises(StalledError, match="x: no answer for 0 s"):
        MirroredFile("x", WHICH, mirror, stuck, transport).need(*at(0))
    assert begun.wait(10)
    (waiting,) = MirroredFile("y", WHICH, mirror, stuck, transport)._started(*at(1), urgent=False)
    transport.close()
    with pytest.raises(ClosedError, match="y: the source was closed"):
        transport.result_of(waiting, "y")
    open_.set()
    transport.close()
