"""Files of a manifest that are not in memory are read ahead: the batches are the same, and nothing is left behind."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
import threading

import numpy as np
import pyarrow as pa
import pytest

from lit_async_data import AsyncLoader, ConcatSource, LoaderOptions, ManifestSource, SubsetSource
from lit_async_data.errors import MissingError
from lit_async_data.host.resources.plan import AHEAD
from lit_async_data.sources.manifest.files import prefetcher as fetching

COUNT = 200


class Disk:
    """Says of every file that it was not in memory, and remembers who read which."""

    def __init__(self, fetched):
        self.cold, self._fetched = 1.0, fetched
        self.read, self.ahead = collections.Counter(), collections.Counter()

    def __call__(self, path, most_bytes, root):
        data, _ = self._fetched(path, most_bytes, root)
        name = path.rpartition("/")[2]
        self.read[name] += 1
        if "fetcher" in threading.current_thread().name:
            self.ahead[name] += 1
        return data, self.cold


@pytest.fixture
def disk(monkeypatch):
    disk = Disk(fetching.fetched)
    monkeypatch.setattr(fetching, "fetched", disk)
    monkeypatch.setattr(fetching, "filled", lambda *_: False)  # what is not in memory is not read straight to its place
    return disk


@pytest.fixture
def source(tmp_path):
    for number in range(COUNT):
        np.save(tmp_path / f"{number}.npy", np.full(300, number))
    table = pa.table({"id": [f"n{number}" for number in range(COUNT)], "x": [f"{n}.npy" for n in range(COUNT)]})
    return ManifestSource(table, {"x": "x"}, id="id", root=tmp_path, check_files="none")


def numbers(source, epochs=2, **options):
    options = {"batch_size": 4, "shuffle": False, "workers": 1, **options}
    with AsyncLoader(source, LoaderOptions(**options)) as loader:
        return [[value for batch in loader for value in batch["x"][:, 17].tolist()] for _ in range(epochs)]


@pytest.mark.parametrize(("shuffle", "workers"), [("none", 1), ("global", 3), ("chunk", 3)])
def test_batches_are_the_same_from_a_cold_disk(shuffle, workers, disk, source):
    cold = numbers(source, shuffle=shuffle, workers=workers)
    assert sum(disk.ahead.values())
    # What was told of the disk is not copied.
    disk.cold = 0.0
    assert cold == numbers(pickle.loads(pickle.dumps(source)), shuffle=shuffle, workers=workers)


def test_parts_and_sources_in_a_row_are_read_ahead_too(disk, source):
    both = ConcatSource([SubsetSource(source, np.arange(100, 200)), SubsetSource(source, np.arange(100))])
    assert numbers(both, 1) == [[*range(100, 200), *range(100)]]
    # All but the first files, which are read before anybody knows that the disk is cold.
    assert sum(disk.ahead.values()) > COUNT * 0.5


def test_what_cannot_be_read_ahead_is_named_when_it_is_read(disk, source, tmp_path):
    (tmp_path / "77.npy").unlink()
    seen = []
    with AsyncLoader(source, LoaderOptions(batch_size=4, shuffle=False, workers=1)) as loader:
        batches = iter(loader)
        for _ in range(19):
            seen += next(batches)["x"][:, 0].tolist()
        with pytest.raises(MissingError, match=r"row 77 .*'n77'.*77\.npy") as caught:
            next(batches)
        for _ in range(20, COUNT // 4):
            seen += next(batches)["x"][:, 0].tolist()
    assert caught.value.row == 77
    assert seen == [number for number in range(COUNT) if number // 4 != 19]


def test_a_loader_that_is_closed_early_leaves_nothing(disk, source):
    with AsyncLoader(source, LoaderOptions(batch_size=4, shuffle=False, workers=1)) as loader:
        batches = iter(loader)
        for _ in range(20):
            next(batches)
    assert not [thread.name for thread in threading.enumerate() if "fetch" in thread.name or "ahead" in thread.name]
    assert numbers(source, 1) == [list(range(COUNT))]


# -- how much --------------------------------------------------------------------------------------------------------

BATCH = 16


def large(tmp_path, nbytes, count):
    """A source of `count` files of `nbytes` bytes, which are hard links to one."""
    np.save(tmp_path / "0.npy", np.zeros(nbytes, np.uint8))
    for number in range(1, count):
        (tmp_path / f"{number}.npy").hardlink_to(tmp_path / "0.npy")
    return ManifestSource(
        pa.table({"x": [f"{n}.npy" for n in range(count)]}), {"x": "x"}, root=tmp_path, check_files="none"
    )


@pytest.mark.parametrize(
    ("nbytes", "budget", "room"),
    [
        (10_000, 2**31, 2**25),  # at least 32 MiB
        (500_128, 2**31, 2 * 500_128 * BATCH * (AHEAD + 1)),  # the next batches, twice: files differ in size
        (2_000_000, 2**26, None),  # half of what is left
    ],
)
def test_the_room_is_sized_by_the_files_and_the_budget(tmp_path, nbytes, budget, room):
    source = large(tmp_path, nbytes - 128, count=64)
    options = LoaderOptions(batch_size=BATCH, memory_budget=budget, workers=1)
    if room is None:
        options = dataclasses.replace(options, batch_size=1, queue_depth=2)
    with AsyncLoader(source, options) as loader:
        found = loader.footprint.budget
        footprint = loader.footprint
    if room is None:
        room = min((budget - found.slots * found.slot_bytes) // 2, 2 * nbytes * (AHEAD + footprint.layout.batches))
    assert found.fetched == room
    assert found.total <= budget
    assert f"{room / 2**20:.1f} MiB of files read ahead" in str(found)
    assert found.most_slots >= found.slots


def test_room_is_at_most_a_gibibyte_and_none_where_nothing_is_read_ahead(tmp_path):
    source = large(tmp_path, 2_000_000, count=1024)
    options = LoaderOptions(batch_size=512, memory_budget=2**40, workers=1)
    with AsyncLoader(source, options) as loader:
        assert loader.footprint.budget.fetched == 2**30
    with AsyncLoader(source, dataclasses.replace(options, workers=0)) as loader:
        assert loader.footprint.budget.fetched == 0
    both = ConcatSource([source, SubsetSource(source, np.arange(5))])
    with AsyncLoader(both, options) as loader:
        assert loader.footprint.budget.fetched == 2**30


def test_a_file_that_is_missing_does_not_count_for_the_size(tmp_path):
    source = large(tmp_path, 1000, count=3)
    (tmp_path / "2.npy").unlink()
    assert source.memory().files == 1128
    for number in range(2):
        (tmp_path / f"{number}.npy").unlink()
    assert copy.copy(source).memory().files == 1128  # looked up once
