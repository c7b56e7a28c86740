"""Files of a manifest that are not in memory are read ahead: the batches are the same, and nothing is left behind."""

from __future__ import annotations

import collections
import io
import pickle
import threading

import numpy as np
import pytest

from lit_async_data import AsyncLoader, ConcatSource, LoaderOptions, ManifestSource, SubsetSource
from lit_async_data.errors import MissingError
from lit_async_data.sources.manifest import fetching

pa = pytest.importorskip("pyarrow", reason="pip install 'lit-async-data[manifest]'")
# With the first file that it reads, pyarrow opens a pipe for signals, and keeps it.
pytest.importorskip("pyarrow.csv").read_csv(io.BytesIO(b"a\n1\n"))

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
    return ManifestSource(table, {"x": "x"}, id="id", root=tmp_path, check="none")


def numbers(source, epochs=2, **options):
    options = {"batch_size": 4, "shuffle": False, "workers": 1, **options}
    with AsyncLoader(source, LoaderOptions(**options)) as loader:
        return [[value for batch in loader for value in batch["x"][:, 17].tolist()] for _ in range(epochs)]


def test_what_is_cold_is_read_ahead(disk, source):
    assert numbers(source, 1) == [list(range(COUNT))]
    # All but the first files, which are read before anybody knows that the disk is cold.
    assert len(disk.ahead) > COUNT * 0.5
    assert not disk.ahead["0.npy"] or disk.read["0.npy"] > 1


def test_what_is_warm_is_not_read_ahead(disk, source):
    disk.cold = 0.0
    assert numbers(source, 1) == [list(range(COUNT))]
    assert not disk.ahead


@pytest.mark.parametrize("shuffle", ["none", "global", "chunk"])
@pytest.mark.parametrize("workers", [1, 3])
def test_batches_are_the_same_from_a_cold_disk(shuffle, workers, disk, source):
    cold = numbers(source, shuffle=shuffle, workers=workers)
    assert sum(disk.ahead.values())
    # What was told of the disk is not copied.
    disk.cold = 0.0
    assert cold == numbers(pickle.loads(pickle.dumps(source)), shuffle=shuffle, workers=workers)


def test_parts_and_sources_in_a_row_are_read_ahead_too(disk, source):
    both = ConcatSource([SubsetSource(source, np.arange(100, 200)), SubsetSource(source, np.arange(100))])
    assert numbers(both, 1) == [[*range(100, 200), *range(100)]]
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


def test_two_loaders_share_what_reads_ahead(disk, source):
    options = LoaderOptions(batch_size=4, shuffle=False, workers=1)
    with AsyncLoader(source, options) as other:
        assert next(iter(other))["x"][:, 0].tolist() == [0, 1, 2, 3]
        # The end of one is not the end for the other.
        assert numbers(source, 1) == [list(range(COUNT))]
        rest = [next(other)["x"][:, 0].tolist() for _ in range(1, COUNT // 4)]
        assert [value for batch in rest for value in batch] == list(range(4, COUNT))


def test_a_loader_that_is_closed_early_leaves_nothing(disk, source):
    with AsyncLoader(source, LoaderOptions(batch_size=4, shuffle=False, workers=1)) as loader:
        batches = iter(loader)
        for _ in range(20):
            next(batches)
    assert not [thread.name for thread in threading.enumerate() if "fetch" in thread.name or "ahead" in thread.name]
    assert numbers(source, 1) == [list(range(COUNT))]
