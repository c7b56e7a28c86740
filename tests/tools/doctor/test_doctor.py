"""``doctor``: what it measures is what loaders do, and every line that it prints can be used."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from PIL import Image
from support.files import examples
from support.lightning.command_line import CONFIGS

from lit_async_data import AsyncLoader, HDF5Source, LoaderOptions, system
from lit_async_data.host.metrics.stages import Stage, StageTimes
from lit_async_data.host.metrics.stats import ReadStats
from lit_async_data.testing import ArraySource
from lit_async_data.tools.command_line import main
from lit_async_data.tools.doctor import examination as measuring
from lit_async_data.tools.doctor import page_cache, rates
from lit_async_data.tools.doctor.configuration import of_configuration
from lit_async_data.tools.doctor.examination import examination
from lit_async_data.tools.doctor.examined import of_source
from lit_async_data.tools.doctor.rates import measured
from lit_async_data.tools.doctor.report import Trial

ROOT = Path(__file__).parents[3]
SHORT = ["--seconds", "0.05"]

with contextlib.suppress(ImportError):
    from pyarrow import csv as arrow_csv

    # With the first file that it reads, pyarrow opens a pipe for signals, and keeps it.
    arrow_csv.read_csv(io.BytesIO(b"a\n1\n"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("PROJECT_ROOT", raising=False)
    return tmp_path


def as_json(capsys, *arguments):
    assert main(["doctor", "--json", *SHORT, *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def photos():
    for number in range(12):
        Path("photos", "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10), (number, 0, 0)).save(f"photos/{'ab'[number % 2]}/{number}.png")
    rows = [f"photos/{'ab'[number % 2]}/{number}.png,{number % 2}" for number in range(12)]
    Path("photos.csv").write_text("\n".join(["path,label", *rows]) + "\n")


# -- what is measured -------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_each_shuffle_is_measured_with_all_workers_and_with_fewer(capsys, monkeypatch):
    monkeypatch.setattr("lit_async_data.host.resources.workers.cores", lambda ranks=None: 4)
    examples.images("scan.h5", samples=600)
    report = as_json(capsys, "scan.h5", "--batch-size", "16")
    assert (report["samples"], report["batch_size"], report["reading"]) == (600, 16, "decoded")
    assert report["batch"] == {
        "x": {"dtype": "uint8", "shape": [3, 16, 12]},
        "y": {"dtype": "int64", "shape": []},
    }
    trials = [(each["shuffle"], each["workers"]) for each in report["trials"]]
    assert trials == [*(("chunk", n) for n in (4, 2, 1)), *(("global", n) for n in (4, 2, 1)), ("none", 4)]
    assert all(each["samples_per_s"] > 0 and each["memory"] > 0 for each in report["trials"])
    chosen = report["trials"][report["chosen"]]
    assert chosen["shuffle"] != "none"
    assert report["options"]["shuffle"] == chosen["shuffle"]
    assert report["options"]["workers"] == chosen["workers"]
    assert report["steps_per_s"] == pytest.approx(report["samples_per_s"] / 16)
    assert (report["files"], report["bytes"]) == (1, Path("scan.h5").stat().st_size)


def test_copied_samples_are_measured_with_one_worker(capsys):
    with h5py.File("plain.h5", "w") as file:
        file["data"], file["labels"] = np.zeros((64, 4), "f4"), np.arange(64)
    report = as_json(capsys, "plain.h5", "--fields", "x=data", "y=labels")
    assert [(each["shuffle"], each["workers"]) for each in report["trials"]] == [("global", 1), ("none", 1)]
    assert report["why_pack"] == report["pack"] == ""


def test_mixing_of_labels_is_told_and_more_chunks_are_taken_until_they_mix():
    with h5py.File("sorted.h5", "w") as file:
        rows = 64 * 400
        file.create_dataset("data", data=np.zeros((rows, 2), "u1"), chunks=(64, 2), compression=1)
        file["labels"] = np.arange(rows) // 64 % 100
    source = HDF5Source("sorted.h5", {"x": "data", "y": "labels"})
    options = LoaderOptions(batch_size=256, shuffle_chunks=4)
    report = examination(of_source(source, options), 0.05, cold=False)
    chunk = next(each for each in report.trials if each.shuffle == "chunk")
    assert chunk.shuffle_chunks > 4
    assert chunk.mixing >= 0.8
    assert set(chunk.labels) == {"y"}
    limited = LoaderOptions(batch_size=256, shuffle_chunks=4, memory_budget=40_000)
    built = of_source(source, limited)
    assert measuring._mixed_better(built, limited).shuffle_chunks < chunk.shuffle_chunks
    source.close()


@pytest.fixture
def ticking(monkeypatch):
    """A clock that only a measurement reads, and that goes on by one second each time."""
    ticks = iter(range(1000))

    class Clock:
        perf_counter = staticmethod(lambda: float(next(ticks)))

    monkeypatch.setattr(rates, "time", Clock)


@pytest.mark.usefixtures("ticking")
def test_the_rate_leaves_out_the_first_batch():
    loader = AsyncLoader(ArraySource({"x": np.zeros(40)}), LoaderOptions(batch_size=4, workers=0))
    rate = measured(loader, 5.0)
    assert (rate.samples_per_s, rate.seconds, loader.stats().batches) == (4.0, 5.0, 1 + 5)
    with pytest.raises(Exception, match="closed"):
        next(loader)


@pytest.mark.usefixtures("ticking")
def test_the_first_batch_of_every_reader_is_left_out():
    options = LoaderOptions(batch_size=4, workers=3, worker_kind="thread")
    loader = AsyncLoader(ArraySource({"x": np.zeros(400)}), options)
    assert measured(loader, 5.0).seconds == 5.0
    assert loader.stats().batches == 3 + 5


class Ahead:
    """A loader of eight batches of four bytes, of which some are read and decoded when the first is handed out."""

    order = SimpleNamespace(chunk_order=None, length=32)
    footprint = SimpleNamespace(workers=SimpleNamespace(threads=1))
    spec = SimpleNamespace(fields={"x": SimpleNamespace(nbytes=1)})

    def __init__(self, batches, decoded=10):
        first, last = (StageTimes(decode=Stage(*each)) for each in ((4.0, decoded), (5.0, 80)))
        self._read = iter([ReadStats(bytes=4 * batches, stages=first), ReadStats(bytes=32, stages=last)])

    def __iter__(self):
        return iter([np.zeros(4)] * 8)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def stats(self):
        return SimpleNamespace(read=next(self._read))


@pytest.mark.usefixtures("ticking")
def test_from_the_disk_only_what_was_read_meanwhile_counts():
    rate = measured(Ahead(4), 60.0, once=True)
    assert (rate.samples_per_s, rate.seconds, rate.samples) == (16 / 7, 7.0, 32)
    assert rate.stages.decode.seconds == 1.0  # and not the imports of the first batch
    assert measured(Ahead(4, decoded=40), 60.0, once=True).samples_per_s == 16 / 7
    assert measured(Ahead(2, decoded=40), 60.0, once=True).samples_per_s == 16 / 7


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize(("batches", "decoded"), [(5, 10), (8, 10), (4, 45), (4, 80)])
def test_nothing_counts_if_most_was_read_or_decoded_with_the_first_batch(batches, decoded):
    assert measured(Ahead(batches, decoded), 60.0, once=True).samples_per_s == 0.0


def _fake_rate(samples_per_s, seconds):
    return rates.Rate(samples_per_s, seconds, StageTimes(), 8, 0)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([(10.0, 2.0), (30.0, 2.0)], 10.0),  # one was long enough
        ([(10.0, 0.1), (30.0, 0.1), (20.0, 0.1), (99.0, 0.1)], 20.0),
        ([(0.0, 0.0)], "the samples are too few: most are read or decoded with the first batches"),
    ],
)
def test_a_short_epoch_is_read_from_the_disk_three_times(found, expected, monkeypatch):
    measurements = (_fake_rate(*each) for each in found)
    monkeypatch.setattr(measuring, "measured", lambda *_, once: next(measurements))
    monkeypatch.setattr(page_cache, "dropped", lambda paths: True)
    options = LoaderOptions(batch_size=4, workers=0)
    examined = of_source(ArraySource({"x": np.zeros(8)}), options)
    cold, why_not = measuring._cold(examined, options, _fake_rate(100.0, 1.0), 1.0)
    assert (cold.samples_per_s if cold else why_not) == expected


def test_each_order_is_looked_at_before_it_is_measured(monkeypatch):
    calls = []

    def recorded(loader, seconds, *, once=False):
        calls.append((loader.order.shuffle, loader.options.workers, once))
        return _fake_rate(1.0, seconds)

    monkeypatch.setattr(measuring, "measured", recorded)
    monkeypatch.setattr("lit_async_data.host.resources.workers.cores", lambda ranks=None: 4)
    examples.images("scan.h5")
    source = HDF5Source("scan.h5", {"x": "images"})
    examination(of_source(source, LoaderOptions(batch_size=4)), 0.05, cold=False)
    source.close()
    for shuffle, workers in (("chunk", (4, 2, 1)), ("global", (4, 2, 1)), ("none", (4,))):
        found = [call[1:] for call in calls if call[0] == shuffle]
        assert found == [(4, True), *((number, False) for number in workers)]


def test_what_differs_from_the_configuration_is_advised():
    given = LoaderOptions(batch_size=4, shuffle="chunk", shuffle_chunks=2, workers=1)
    better = dataclasses.replace(given, shuffle_chunks=LoaderOptions(batch_size=4).shuffle_chunks)
    assert measuring._changed(given, better) == {"shuffle_chunks": better.shuffle_chunks}
    assert measuring._changed(given, given) == {}


@pytest.mark.parametrize(("amplification", "notes"), [(0.1, 0), (1.0, 1), (20.0, 1)])
def test_a_cache_is_advised_unless_chunks_are_kept_anyway(amplification, notes):
    examples.images("scan.h5")
    source = HDF5Source("scan.h5", {"x": "images"})
    trial = Trial("chunk", 64, 1, "thread", 1.0, amplification, 1.0, {}, 0)
    assert len(list(measuring._notes(source, LoaderOptions(batch_size=4), trial))) == notes
    source.close()


def test_a_short_epoch_is_measured_again_and_again_but_from_the_disk_once(monkeypatch):
    source = ArraySource({"x": np.zeros(8)})
    options = LoaderOptions(batch_size=4, workers=0)
    assert measured(AsyncLoader(source, options), 0.05).samples > 8
    assert measured(AsyncLoader(source, options), 60.0, once=True).samples == 8


# -- the disk ---------------------------------------------------------------------------------------------------------


def test_files_are_dropped_from_the_page_cache_unless_told_otherwise(capsys, monkeypatch):
    photos()
    dropped = []

    def drop(paths):
        dropped.extend(paths)
        return True

    monkeypatch.setattr(page_cache, "dropped", drop)
    report = as_json(capsys, "photos.csv", "--warm")
    assert (dropped, report["cold"], report["why_not_cold"]) == ([], None, "left out (--warm)")
    assert (report["files"], report["bytes"]) == (
        12,
        sum(each.stat().st_size for each in Path("photos").rglob("*.png")),
    )
    report = as_json(capsys, "photos.csv")
    assert {Path(each).suffix for each in dropped} == {".png"}
    assert len(set(dropped)) == 12
    assert report["cold"] is None
    assert report["why_not_cold"].startswith("the samples are too few")  # one batch
    monkeypatch.setattr(page_cache, "dropped", lambda paths: False)
    report = as_json(capsys, "photos.csv")
    assert (report["cold"], report["why_not_cold"]) == (
        None,
        "the system keeps the files in the page cache, or does not tell",
    )


def test_a_dropped_file_is_cold_or_the_system_says_no(folder):
    path = folder / "file"
    path.write_bytes(bytes(2**20))
    assert page_cache.dropped([str(path)]) in (True, False)
    assert page_cache.dropped([]) is False
    with pytest.raises(FileNotFoundError):
        page_cache.dropped(["absent"])


def test_whether_a_file_is_dropped_does_not_depend_on_its_size(folder):
    large, small = folder / "large", [folder / str(number) for number in range(20)]
    large.write_bytes(bytes(2**22))
    for path in small:
        path.write_bytes(bytes(5000))
    assert page_cache.dropped([str(path) for path in small]) == page_cache.dropped([str(large)])


@pytest.mark.parametrize("unmapped", [False, True])
def test_a_file_that_seems_to_be_in_memory_is_read_without_waiting_and_dropped_again(folder, monkeypatch, unmapped):
    """Where the system does not say what is in memory, or cannot map the file."""
    (folder / "file").write_bytes(bytes(5000))
    done = []

    def resident(mapped, begin, nbytes):
        if unmapped:
            raise OSError(errno.ENODEV, "cannot be mapped")
        return np.ones(1, bool)

    monkeypatch.setattr(system, "resident", resident)
    monkeypatch.setattr(page_cache, "is_cold", lambda *_: done.append("read") or True)
    monkeypatch.setattr(system, "pread", lambda *_: done.append("wait"))
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: done.append("drop"), raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    assert page_cache.dropped(["file"])
    assert done == ["drop", "read", "wait", "drop"]


def test_a_file_that_is_not_in_memory_is_not_read(folder, monkeypatch):
    (folder / "file").write_bytes(bytes(5000))
    monkeypatch.setattr(system, "resident", lambda mapped, begin, nbytes: np.zeros(1, bool))
    monkeypatch.setattr(page_cache, "is_cold", lambda *_: pytest.fail("read"))
    assert page_cache.dropped(["file"]) is hasattr(os, "posix_fadvise")


# -- what is printed can be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["scan.h5"], ["photos", "--image-size", "16", "12", "--resize", "crop"]])
def test_the_python_lines_run(arguments, capsys):
    examples.images("scan.h5")
    photos()
    report = as_json(capsys, *arguments, "--batch-size", "8", "--warm")
    names = {}
    exec(report["python"], names)
    with names["loader"] as loader:
        assert next(loader)["x"].shape == (8, 3, 16, 12)
        assert loader.options.workers == report["options"]["workers"]
    names["source"].close()


def test_the_pack_command_packs(capsys):
    examples.images("scan.h5")
    photos()
    for arguments in (
        ["scan.h5"],
        ["scan.h5", "--fields", "x=images", "--layout", "x=NHWC"],
        ["photos.csv"],
        ["photos"],
    ):
        size = ["--image-size", "8"] if "photos" in arguments[0] else []
        examined = _examined([*arguments, *size])
        _, _, _, command, *typed = shlex.split(examined.pack)
        assert main([command, *typed, "--force"]) == 0
        source = HDF5Source("packed.h5", list(examined.source.spec.fields))
        assert len(source) == len(examined.source)
        source.close()
        examined.source.close()


def _examined(arguments):
    import argparse

    from lit_async_data.tools.doctor.command import add_arguments
    from lit_async_data.tools.doctor.examined import of_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parsed = parser.parse_args(arguments)
    return of_arguments(parsed.files, parsed)


# -- configurations ---------------------------------------------------------------------------------------------------


class Doubled:
    """A sample transform, as a configuration names it."""

    def __call__(self, sample):
        return {**sample, "twice": sample["x"] * 2}


def test_a_configuration_is_examined_with_its_transforms(capsys, monkeypatch):
    examples.images("scan.h5")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    report = as_json(
        capsys,
        str(CONFIGS / "train.yaml"),
        "data=hdf5",
        "data.train.path=scan.h5",
        "data.train.fields={x: images, y: labels}",
        "+data.sample_transform._target_=test_doctor.Doubled",
        "loader.batch_size=20",
        "loader.workers=1",
    )
    assert report["batch_size"] == 20
    assert {each["workers"] for each in report["trials"]} == {1}
    assert report["python"] == report["command"] == ""
    assert report["override"].startswith("loader.shuffle=")


def test_the_loader_of_another_project_has_its_own_place(capsys, folder):
    for stage in ("train", "val"):
        with h5py.File(f"waves_{stage}.h5", "w") as file:
            file["signal"], file["target"] = np.zeros((40, 8), "f4"), np.zeros(40, "f4")
    examined = of_configuration(str(ROOT / "examples" / "hydra_project" / "conf" / "config.yaml"), [])
    assert examined.prefix == "data.loader."
    assert len(examined.source) == 40
    with examined.build(LoaderOptions(batch_size=10, workers=0)) as loader:
        assert len(loader) == 4
    examined.source.close()


# -- wrong input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.h5"], "absent.h5"),
        (["scan.h5", "--seconds", "0"], "seconds: 0.0 is not from 0.05 to 600"),
        (["scan.h5", "--image-size", "8"], "image_size: only for tables and folders; leave it out"),
        (["scan.h5", "--fields", "x=imags"], "imags"),
        (["scan.h5", "--batch-size", "0"], "batch_size: 0 is not a whole number from 1 on"),
        (["numbers.h5"], "nothing in numbers.h5 looks like samples; python -m lit_async_data inspect numbers.h5 says"),
        (["train.py", "data=hdf5"], "train.py: is a program; give the configuration that it reads"),
        (["absent.yaml"], "absent.yaml: there is no such configuration"),
        (["empty.yaml"], "empty.yaml: has no AsyncDataModule, so there is nothing to examine"),
        ([str(CONFIGS / "train.yaml"), "data.absent=1"], "absent"),
        ([str(CONFIGS / "train.yaml"), "--batch-size", "8"], "batch_size: a configuration sets it"),
        ([str(CONFIGS / "train.yaml"), "data=absent"], "'data': digits folder hdf5 hdf5_split manifest "),
        (
            [str(CONFIGS / "train.yaml"), "data=hdf5"],
            "data.train.path is missing; give it, as in data.train.path=VALUE",
        ),
    ],
)
def test_wrong_input_is_one_line(arguments, message, capsys):
    examples.images("scan.h5")
    with h5py.File("numbers.h5", "w") as file:
        file["text"] = "only this"
    Path("empty.yaml").write_text("a: 1\n")
    assert main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert "full_key" not in error
    assert "search path" not in error


def test_hydra_is_left_as_it_was(monkeypatch):
    from hydra.core.global_hydra import GlobalHydra

    Path("empty.yaml").write_text("a: 1\n")
    assert main(["doctor", "empty.yaml"]) == 2
    assert not GlobalHydra.instance().is_initialized()
    assert "pytest" in sys.modules
