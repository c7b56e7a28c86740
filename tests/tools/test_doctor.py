"""`doctor`: it measures what loaders do and chooses a setting; every line that it prints can be used."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from support.files import examples

from lit_async_data import AsyncLoader, LoaderOptions
from lit_async_data.__main__ import main
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
    for number in range(12):
        path = Path("photos", "ab"[number % 2], f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10), (number, 0, 0)).save(path)


@pytest.mark.parametrize("arguments", [["scan.h5"], ["photos", "--image-size", "16", "12", "--resize", "crop"]])
def test_the_python_lines_run(arguments, as_json, photos):
    examples.images("scan.h5")
    report = as_json(*arguments, "--batch-size", "8")
    names = {}
    exec(report["python"], names)
    with names["loader"] as loader:
        assert next(loader)["x"].shape == (8, 3, 16, 12)
        assert loader.options.workers == report["options"]["workers"]
    names["source"].close()


def test_a_report_in_words(capsys, monkeypatch):
    examples.images("scan.h5")
    monkeypatch.setattr(doctor, "measured", lambda *_: trial("global", 1, 12_345.6, amplification=2.0))
    assert main(["doctor", "scan.h5"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "read by decoding, from memory · " in text
    assert " global 1 (process) 12,300 2.0 60% 9.5 MiB use this " in text  # each image is decoded twice
    assert "python train.py data=hdf5 data.train.path=scan.h5" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.h5"], "absent.h5"),
        (["scan.h5", "--seconds", "0"], "seconds: 0.0 is not from 0.05 to 600"),
        (["numbers.h5"], "nothing in numbers.h5 looks like samples; python -m lit_async_data inspect numbers.h5 says"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, capsys):
    examples.images("scan.h5")
    examples.datasets("numbers.h5", {"text": "only this"})
    assert main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_each_shuffle_is_measured_with_all_workers_and_with_fewer(as_json, monkeypatch):
    monkeypatch.setattr("lit_async_data.engine.resources.cores", lambda ranks=None: 4)
    examples.images("scan.h5", samples=600)
    report = as_json("scan.h5", "--batch-size", "16")
    assert report["batch"] == {"x": {"dtype": "uint8", "shape": [3, 16, 12]}, "y": {"dtype": "int64", "shape": []}}
    trials = [(each["shuffle"], each["workers"]) for each in report["trials"]]
    assert trials == [*(("chunk", n) for n in (4, 2, 1)), *(("global", n) for n in (4, 2, 1)), ("none", 4)]
    assert all(each["samples_per_s"] > 0 and each["memory"] > 0 for each in report["trials"])
    assert all(0 <= each["decoding"] <= 1 for each in report["trials"])
    chosen = report["trials"][report["chosen"]]
    assert report["options"] == {"shuffle": chosen["shuffle"], "workers": chosen["workers"]}
    page = (Path(__file__).parents[2] / "docs/tools/doctor.md").read_text()
    for name in [*report, *chosen]:
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


def trial(shuffle="global", workers=1, rate=100.0, *, amplification=1.0):
    return Trial(shuffle, 64, workers, "process", rate, amplification, 0.6, 10**7)


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
