"""`doctor`: it measures what loaders do and chooses a setting; every line that it prints can be used."""

import contextlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from PIL import Image
from support.files import examples

from lit_async_data import AsyncLoader, LoaderOptions
from lit_async_data.__main__ import main
from lit_async_data.sources.contract.stage_clock import Work
from lit_async_data.testing import ArraySource
from lit_async_data.tools import doctor
from lit_async_data.tools.doctor import Trial, best, measured


@pytest.fixture
def as_json(capsys):
    def report(*arguments):
        assert main(["doctor", "--json", "--seconds", "0.05", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    return report


@pytest.fixture
def photos(folder):
    rows = ["path,label"]
    for number in range(12):
        path = Path("photos", "ab"[number % 2], f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10), (number, 0, 0)).save(path)
        rows.append(f"{path},{number % 2}")
    Path("photos.csv").write_text("\n".join(rows) + "\n")


@pytest.mark.parametrize("arguments", [["scan.h5"], ["photos", "--image-size", "16", "12", "--resize", "crop"]])
def test_the_python_lines_run(arguments, as_json, photos):
    examples.images("scan.h5")
    report = as_json(*arguments, "--batch-size", "8", "--warm")
    names = {}
    exec(report["python"], names)
    with names["loader"] as loader:
        assert next(loader)["x"].shape == (8, 3, 16, 12)
        assert loader.options.workers == report["options"]["workers"]
    names["source"].close()


def test_a_report_in_words(capsys, monkeypatch):
    examples.images("scan.h5")
    rate = doctor.Rate(12_345.6, 210.0, 380.0, 0.6, 2 * 16 * 12 * 3.0)
    monkeypatch.setattr(doctor, "measured", lambda *_, **__: rate)
    with h5py.File("tokens.h5", "w") as file:
        file["x/values"], file["x/offsets"] = np.arange(40), [0, 5, 20, 40]
    assert main(["doctor", "tokens.h5", "--warm"]) == 0
    assert '))  # batch_by="x" puts samples of like length together' in capsys.readouterr().out
    assert main(["doctor", "scan.h5", "--warm"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "from memory: 12,300 samples/s; each reader 210 MB/s while reading, 380 MB/s while decoding" in text
    assert "from the disk: not measured: left out (--warm)" in text
    assert " 12,300 2.0 " in text  # each image is decoded twice
    assert "python train.py data=hdf5 data.train.path=scan.h5" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.h5"], "absent.h5"),
        (["scan.h5", "--seconds", "0"], "seconds: 0.0 is not from 0.05 to 600"),
        (["scan.h5", "--batch-size", "0"], "batch_size: 0 is not a whole number from 1 on"),
        (["numbers.h5"], "nothing in numbers.h5 looks like samples; python -m lit_async_data inspect numbers.h5 says"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, capsys):
    examples.images("scan.h5")
    with h5py.File("numbers.h5", "w") as file:
        file["text"] = "only this"
    assert main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_each_shuffle_is_measured_with_all_workers_and_with_fewer(as_json, monkeypatch):
    monkeypatch.setattr("lit_async_data.engine.resources.plan.cores", lambda ranks=None: 4)
    examples.images("scan.h5", samples=600)
    report = as_json("scan.h5", "--batch-size", "16", "--warm")
    assert report["batch"] == {"x": {"dtype": "uint8", "shape": [3, 16, 12]}, "y": {"dtype": "int64", "shape": []}}
    trials = [(each["shuffle"], each["workers"]) for each in report["trials"]]
    assert trials == [*(("chunk", n) for n in (4, 2, 1)), *(("global", n) for n in (4, 2, 1)), ("none", 4)]
    assert all(each["samples_per_s"] > 0 and each["memory"] > 0 for each in report["trials"])
    chosen = report["trials"][report["chosen"]]
    assert report["options"] == {"shuffle": chosen["shuffle"], "workers": chosen["workers"]}
    page = (Path(__file__).parents[2] / "docs/tools/doctor.md").read_text()
    for name in [*report, *chosen, *report["warm"]]:
        assert f"`{name}`" in page, name


@pytest.fixture
def ticking(monkeypatch):
    """A clock that only a measurement reads, and that goes on by one second each time."""
    ticks = iter(range(1000))
    monkeypatch.setattr(doctor, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))


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
    monkeypatch.setattr(doctor, "dropped", lambda paths: bool(dropped.extend(paths)))
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
    monkeypatch.setattr(doctor.system, "resident", lambda mapped, begin, nbytes: np.array([resident]))
    assert doctor.dropped(["file", "empty"]) is (hasattr(os, "posix_fadvise") and not resident)


def trial(shuffle="global", workers=1, rate=100.0, *, amplification=1.0):
    return Trial(shuffle, 64, workers, "process", rate, amplification, 10**7)


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([trial("none", 1, 900.0), trial("chunk", 2, 800.0), trial("chunk", 1, 780.0)], 2),
        ([trial("chunk", rate=100.0), trial("global", rate=900.0)], 1),
        ([trial("global", 2, 900.0), trial("global", 1, 500.0)], 0),
    ],
)
def test_the_best_is_close_to_the_fastest_that_shuffles_with_the_fewest_workers(trials, chosen):
    assert best(trials) == chosen
