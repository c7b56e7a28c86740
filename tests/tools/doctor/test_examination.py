"""``doctor``: what it measures is what loaders do, and it chooses the setting to use."""

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.files import examples

from lit_async_data import AsyncLoader, LoaderOptions
from lit_async_data.sources.contract.stage_clock import Work
from lit_async_data.testing import ArraySource
from lit_async_data.tools.doctor import examination
from lit_async_data.tools.doctor.examination import Trial, best, measured, why_pack


def test_each_shuffle_is_measured_with_all_workers_and_with_fewer(as_json, monkeypatch):
    monkeypatch.setattr("lit_async_data.engine.resources.workers.cores", lambda ranks=None: 4)
    examples.images("scan.h5", samples=600)
    report = as_json("scan.h5", "--batch-size", "16", "--warm")
    assert report["batch"] == {"x": {"dtype": "uint8", "shape": [3, 16, 12]}, "y": {"dtype": "int64", "shape": []}}
    trials = [(each["shuffle"], each["workers"]) for each in report["trials"]]
    assert trials == [*(("chunk", n) for n in (4, 2, 1)), *(("global", n) for n in (4, 2, 1)), ("none", 4)]
    assert all(each["samples_per_s"] > 0 and each["memory"] > 0 for each in report["trials"])
    chosen = report["trials"][report["chosen"]]
    assert report["options"] == {"shuffle": chosen["shuffle"], "workers": chosen["workers"]}
    page = (Path(__file__).parents[3] / "docs/tools/doctor.md").read_text()
    for name in [*report, *chosen, *report["warm"]]:
        assert f"`{name}`" in page, name


@pytest.fixture
def ticking(monkeypatch):
    """A clock that only a measurement reads, and that goes on by one second each time."""
    ticks = iter(range(1000))
    monkeypatch.setattr(examination, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_batch_of_every_reader_is_left_out(workers):
    options = LoaderOptions(batch_size=4, workers=workers, worker_kind="thread")
    loader = AsyncLoader(ArraySource({"x": np.zeros(40)}), options)
    assert measured(loader, 12.0).samples_per_s == 4.0
    assert loader.stats().batches == workers + 12  # epoch after epoch
    with pytest.raises(Exception, match="closed"):
        next(loader)


class Ahead(contextlib.ExitStack):
    """A loader of eight batches of four bytes, of which some are read and decoded when the first is handed out."""

    order = SimpleNamespace(chunk_order=None, length=32)
    footprint = SimpleNamespace(workers=SimpleNamespace(threads=1))
    source = SimpleNamespace(spec=SimpleNamespace(nbytes=1))

    def __init__(self, batches, decoded):
        super().__init__()
        first = Work(4.0, decode_s=4.0, decoded=decoded, bytes=4 * batches)
        self._read = iter([first, Work(5.0, decode_s=5.0, decoded=80, bytes=32)])

    def __iter__(self):
        return iter([np.zeros(4)] * 8)

    def stats(self):
        return SimpleNamespace(read=next(self._read))


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize(
    ("batches", "decoded", "rate"),
    [
        (4, 10, 16 / 7),  # only what was read meanwhile
        (2, 40, 16 / 7),  # only what was decoded meanwhile
        (5, 10, 0.0),  # most was read with the first batch
        (4, 45, 0.0),  # most was decoded with it
    ],
)
def test_from_the_disk_only_what_was_read_and_decoded_meanwhile_counts(batches, decoded, rate):
    assert measured(Ahead(batches, decoded), 60.0, once=True).samples_per_s == rate


def test_files_are_dropped_from_the_page_cache_unless_told_otherwise(as_json, photos, monkeypatch):
    dropped = []
    monkeypatch.setattr(examination, "dropped", lambda paths: bool(dropped.extend(paths)))
    report = as_json("photos.csv", "--warm")
    assert (dropped, report["cold"], report["why_not_cold"]) == ([], None, "left out (--warm)")
    report = as_json("photos.csv")
    assert {os.path.relpath(each) for each in dropped} == {str(each) for each in Path("photos").rglob("*.png")}
    assert report["cold"] is None
    assert report["why_not_cold"] == "the system keeps the files in the page cache, or does not tell"


@pytest.mark.parametrize("resident", [False, True])
def test_files_count_as_dropped_only_if_they_left_memory(folder, monkeypatch, resident):
    (folder / "file").write_bytes(bytes(5000))
    (folder / "empty").touch()
    monkeypatch.setattr(examination.system, "resident", lambda mapped, begin, nbytes: np.array([resident]))
    assert examination.dropped(["file", "empty"]) is (hasattr(os, "posix_fadvise") and not resident)


def trial(shuffle="global", workers=1, rate=100.0, *, amplification=1.0):
    return Trial(shuffle, 64, workers, "process", rate, amplification, 10**7)


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([trial("none", 2, 900.0), trial("chunk", 2, 800.0), trial("chunk", 1, 780.0)], 2),
        ([trial("chunk", rate=100.0), trial("global", rate=900.0)], 1),
        ([trial("global", 2, 900.0), trial("global", 1, 500.0)], 0),
    ],
)
def test_the_best_is_close_to_the_fastest_that_shuffles_with_the_fewest_workers(trials, chosen):
    assert best(trials) == chosen


@pytest.mark.parametrize(
    ("amplification", "reading", "decoding", "files", "why"),
    [
        (1.0, "decoded", 0.9, False, ""),  # compressed one by one: the file is as it should be
        (1.0, "decoded", 0.9, True, "readers spend 90 % of their time decoding images, each epoch again"),
        (1.0, "locked", 0.0, False, "h5py reads it under a lock, one thread at a time"),
        (3.0, "decoded", 0.9, False, "each sample that is used costs 3.0 that are decoded"),
    ],
)
def test_why_to_pack(amplification, reading, decoding, files, why):
    assert why_pack(trial(amplification=amplification), reading, decoding, files=files) == why
