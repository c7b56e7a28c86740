"""``inspect``: what it says of files is what sources do, and the lines that it suggests read them."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import h5py
import hydra
import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from support.files import examples
from support.lightning.command_line import CONFIGS

import lit_async_data
from lit_async_data import AsyncLoader, HDF5Source, ToFloat, split
from lit_async_data.errors import FormatError
from lit_async_data.tools.command_line import COMMANDS, main
from lit_async_data.tools.inspect.command import report_on
from lit_async_data.tools.inspect.report.report import ColumnReport, DatasetReport, Report, SuggestionReport
from lit_async_data.tools.overrides import override

with contextlib.suppress(ImportError):
    from pyarrow import csv as arrow_csv

    # With the first file that it reads, pyarrow opens a pipe for signals, and keeps it.
    arrow_csv.read_csv(io.BytesIO(b"a\n1\n"))

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


def built_by_python(suggestion):
    """The sources that the suggested Python builds, by stage."""
    names = {}
    exec(suggestion.python, names)
    return {stage: names["source" if stage == "all" else stage] for stage in suggestion.samples}


def built_by_command(suggestion):
    """The sources that the suggested command line builds, by stage."""
    _, script, *overrides = shlex.split(suggestion.command)
    assert script == "train.py"
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        module = hydra.utils.instantiate(compose("train", overrides).data)
    if "data=manifest" in overrides:  # cut into stages
        return {"all": module.sources["train"][0].source}
    return {stage: module.sources["train" if stage == "all" else stage][0] for stage in suggestion.samples}


def first_batch(source):
    with AsyncLoader(source, {"batch_size": 4, "shuffle": False, "workers": 0}) as loader:
        return {key: np.asarray(values) for key, values in next(loader).items()}


def check(suggestion):
    """Both lines build the same sources, of the samples and batches that the report tells; returns batches by stage."""
    by_python, by_command = built_by_python(suggestion), built_by_command(suggestion)
    batches = {}
    for stage, source in by_python.items():
        assert len(source) == suggestion.samples[stage]
        batches[stage] = batch = first_batch(source)
        told = {key: (each["dtype"], tuple(each["shape"])) for key, each in suggestion.batch.items()}
        assert {key: (str(values.dtype), values.shape[1:]) for key, values in batch.items()} == told
        assert source.chunks.reading == suggestion.reading or len(by_python) > 1
        other = by_command[stage]
        same = first_batch(other)
        assert len(other) == len(source)
        assert {key: np.array_equal(batch[key], same[key]) for key in batch} == dict.fromkeys(batch, True)
        other.close()
        source.close()
    return batches


def only(report):
    (suggestion,) = report.suggestions
    return suggestion


# -- suggestions work -------------------------------------------------------------------------------------------------


def test_images_with_labels(folder):
    examples.images("scan.h5")
    suggestion = only(report_on(["scan.h5"]))
    assert suggestion.python == (
        "from lit_async_data import HDF5Source\n"
        'source = HDF5Source("scan.h5", {"x": "images", "y": "labels"}, layout={"x": "NHWC"})'
    )
    assert suggestion.command == (
        "python train.py data=hdf5 data.train.path=scan.h5 'data.train.fields={x: images, y: labels}' "
        "'data.train.layout={x: NHWC}'"
    )
    assert check(suggestion)["all"]["x"].shape == (4, 3, 16, 12)
    note, said, floats = suggestion.notes
    assert said == "y is from 0 to 4"
    assert 'device_transform=ToFloat("x")' in floats
    assert "float32 of x, from 0 to 1" in floats
    names = {"split": split}
    exec(suggestion.python, names)
    sides = eval(note.partition(" keeps each patient")[0], names)
    assert {key: len(side) % 10 for key, side in sides.items()} == {"train": 0, "val": 0}
    names["source"].close()


def test_labels_of_several_columns():
    with h5py.File("onehot.h5", "w") as file:
        file["x"], file["y"] = np.zeros((20, 8, 8, 3), "f4"), np.eye(10)[np.arange(20) % 10]
    assert check(only(report_on(["onehot.h5"])))["all"]["y"].shape == (4, 10)


def test_text_labels_come_with_the_line_that_numbers_them(capsys):
    with h5py.File("birds.h5", "w") as file:
        file["images"] = np.zeros((6, 8, 8, 3), "u1")
        file["species"] = ["owl", "auk", "owl", "jay", "jay", "auk"]
    assert main(["inspect", "birds.h5"]) == 0
    said = capsys.readouterr().out
    assert "Why not read" in said
    assert "Why not faster" not in said
    (note,) = report_on(["birds.h5"]).notes
    exec(note.partition("once, ")[2], {"h5py": h5py, "numpy": np})
    suggestion = only(report_on(["birds.h5"]))
    assert '"y": "species_code"' in suggestion.python
    assert check(suggestion)["all"]["y"].tolist() == [2, 0, 2, 1]


def test_float64_comes_with_what_makes_it_float32():
    with h5py.File("x.h5", "w") as file:
        file["inputs"], file["targets"] = np.ones((9, 5)), np.ones((9, 2))
    suggestion = only(report_on(["x.h5"]))
    (note,) = [each for each in suggestion.notes if "float32" in each]
    transform = eval(note.partition("device_transform=")[2].partition(", of ")[0], {"ToFloat": ToFloat})
    (source,) = built_by_python(suggestion).values()
    with AsyncLoader(source, {"batch_size": 4}, device_transform=transform) as loader:
        assert {str(values.dtype) for values in next(loader).values()} == {"torch.float32"}
    source.close()


def test_what_does_not_fit_is_not_called_unlikely():
    examples.images("a.h5", 8)
    examples.masks("b.h5")
    (note,) = report_on(["a.h5", "b.h5"]).notes
    assert "does not fit: " in note


def test_a_file_without_samples_says_so(capsys):
    with h5py.File("empty.h5", "w") as file:
        file["x"] = np.zeros((0, 8))
    assert report_on(["empty.h5"]).notes == ["no dataset can be read as it is"]
    with h5py.File("groups.h5", "w") as file:
        file.create_group("a/b")
    assert main(["inspect", "groups.h5"]) == 0
    said = capsys.readouterr().out
    assert "there are no datasets in it" in said
    assert "shape" not in said


def test_images_with_masks():
    examples.masks("patient.h5")
    suggestion = only(report_on(["patient.h5"]))
    assert 'HDF5Source("patient.h5", {"x": "volume", "y": "mask"})' in suggestion.python
    check(suggestion)


@pytest.mark.parametrize("labels", [False, True])
def test_windows_of_groups(labels):
    examples.recording("rec.h5", labels=labels)
    report = report_on(["rec.h5"])
    assert report.groups == [{"name": "run_*", "count": 3}]
    assert [each.name for each in report.datasets if each.rows == (400, 402)] == [each.name for each in report.datasets]
    windows = report.suggestions[-1]
    assert 'group="run_*", stride=8)' in windows.python
    assert 'Field("eeg/signal", window=(0, 64))' in windows.python
    batch = check(windows)["all"]
    assert batch["x"].shape == (4, 64, 6)
    assert batch["y"].tolist() == [3, 3, 3, 3] if labels else batch["y"].shape == (4, 8, 6)
    if labels:
        assert check(report.suggestions[0])["all"]["y"].tolist() == [0, 1, 2, 3]


def test_datasets_of_stages_in_one_file():
    examples.stages("mnist.h5")
    suggestion = only(report_on(["mnist.h5"]))
    assert suggestion.samples == {"train": 30, "test": 12}
    assert check(suggestion).keys() == {"train", "test"}


def test_files_of_stages():
    for stage, samples in (("train", 20), ("val", 8), ("test", 4)):
        examples.images(f"{stage}.h5", samples)
    suggestion = only(report_on(["test.h5", "train.h5", "val.h5"]))
    assert suggestion.samples == {"train": 20, "val": 8, "test": 4}
    check(suggestion)


def test_several_files_are_parts_of_one_source_by_a_pattern_that_matches_only_them(folder):
    for number in range(3):
        examples.images(f"scan_{number}.h5", 10 + number)
    examples.masks("other.h5")
    suggestion = only(report_on(["scan_*.h5"]))
    assert 'HDF5Source("scan_*.h5", ' in suggestion.python
    assert suggestion.samples == {"all": 33}
    check(suggestion)
    listed = only(report_on(["scan_2.h5", "scan_0.h5"]))
    assert 'HDF5Source(["scan_2.h5", "scan_0.h5"], ' in listed.python
    check(listed)


def test_matlab_stores_samples_last_and_class_numbers_as_doubles():
    examples.matlab("faces.mat")
    report = report_on(["faces.mat"])
    assert report.writer == "MATLAB v7.3"
    suggestion = only(report)
    assert 'Field("y", column=0, dtype="int64")}, layout={"x": "CWHN"})' in suggestion.python
    batch = check(suggestion)["all"]
    assert batch["x"].shape == (4, 3, 20, 16)
    assert batch["y"].tolist() == [1, 2, 3, 4]
    assert suggestion.reading == "copied"
    assert any("count classes from 0" in note for note in suggestion.notes)
    assert next(each for each in report.datasets if each.name == "X").why.startswith("samples are on axis 3")


def test_variables_of_a_netcdf_grid_are_unpacked():
    examples.netcdf("era.nc")
    report = report_on(["era.nc"])
    assert report.writer == "NetCDF"
    suggestion = only(report)
    assert suggestion.batch.keys() == {"t2m", "tp"}
    check(suggestion)


@pytest.mark.parametrize("missing", [False, True])
def test_cells_with_a_category_that_each_of_them_has(missing):
    examples.anndata("cells.h5ad", missing=missing)
    report = report_on(["cells.h5ad"])
    assert report.writer == "AnnData"
    suggestion = only(report)
    assert f'"y": "obs/{"phase" if missing else "cell_type"}"' in suggestion.python
    check(suggestion)


def test_a_path_with_everything_that_shells_hydra_and_patterns_treat_specially():
    for name in ('a b\'s (v2), {x: 1} [0-9] "q" é.h5', "back\\slash.h5", "=,#~$HOME.h5", "null"):
        examples.images(name, 8)
        suggestion = only(report_on([name]))
        check(suggestion)
    with h5py.File("names.h5", "w") as file:
        file["my images (raw)"], file["true"] = np.zeros((20, 8, 8, 3), "u1"), np.arange(20) % 2
    check(only(report_on(["names.h5"])))


@pytest.mark.parametrize("table", ["tables/birds.csv", "photos/birds.csv"])
def test_absolute_paths_start_from_the_folder_that_all_of_them_are_in(folder, table):
    pytest.importorskip("pyarrow")
    image = pytest.importorskip("PIL.Image")
    rows = ["file,species"]
    for name in ("auk", "owl"):
        (folder / "photos" / name).mkdir(parents=True)
        image.new("RGB", (8, 8)).save(f"photos/{name}/1.png")
        rows += [f"{folder}/photos/{name}/1.png,{name}"] * 4
    Path("tables").mkdir()
    Path(table).write_text("\n".join(rows))
    report = report_on([table])
    (source,) = built_by_python(only(report)).values()
    assert [source[number]["y"] for number in (0, 7)] == [0, 1]
    source.close()
    assert report.columns[0].examples[0].endswith("photos/auk/1.png")


@pytest.fixture(params=["csv", "semicolons", "parquet", "jsonl"])
def birds(request, folder):
    pytest.importorskip("pyarrow")
    pytest.importorskip("PIL.Image")

    def write(table, path):
        rows = table.to_pylist()
        if request.param == "parquet":
            __import__("pyarrow.parquet").parquet.write_table(table, f"{path}.parquet")
        elif request.param == "jsonl":
            Path(f"{path}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            with open(f"{path}.csv", "w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), delimiter=";" if request.param == "semicolons" else ",")
                writer.writeheader()
                writer.writerows(rows)

    def make(**options):
        examples.bird_table(folder, write, **options)
        (table,) = folder.glob("birds.*")
        return table.name

    return make


def test_a_table_of_images(birds):
    name = birds()
    report = report_on([name])
    assert {each.name: each.kind for each in report.columns} == {
        "id": "number", "path": "image", "species": "class", "site": "class",
    }  # fmt: skip
    suggestion = only(report)
    assert '{"x": "path", "y": "species"}' in suggestion.python
    assert 'id="id"' in suggestion.python
    assert "image_size" not in suggestion.python
    check(suggestion)
    assert any('groups="site"' in note for note in suggestion.notes)


def test_a_table_with_a_column_of_stages_and_images_of_several_sizes(birds):
    suggestion = only(report_on([birds(split=True, sizes=3)]))
    assert suggestion.samples == {"train": 20, "val": 10}
    assert 'image_size=224, filters=[["part", "==", "val"]]' in suggestion.python
    check(suggestion)


def test_a_table_of_numbers_becomes_vectors(folder):
    pytest.importorskip("pyarrow")
    Path("iris.csv").write_text("a,b,target,when\n" + "".join(f"{n},{n / 2},{n % 2},x\n" for n in range(12)))
    suggestion = only(report_on(["iris.csv"]))
    assert '{"x": ["a", "b"], "y": "target"}' in suggestion.python
    check(suggestion)


# -- the report on a dataset agrees with its source -------------------------------------------------------------------


def test_a_dataset_is_read_as_a_source_of_it_alone_would_read_it():
    examples.everything("all.h5")
    report = report_on(["all.h5"])
    readable = {each.name: each.reading for each in report.datasets if each.reading}
    assert readable.keys() == {
        "contiguous", "chunked", "split", "gzip", "gzip_split", "scale_offset", "big_endian", "compact", "ragged",
    }  # fmt: skip
    for name, reading in readable.items():
        with_source = HDF5Source("all.h5", {"x": name})
        assert with_source.chunks.reading == reading, name
        with_source.close()
    assert set(readable.values()) == {"copied", "decoded", "locked"}
    why = {each.name: each.why for each in report.datasets}
    assert why["contiguous"] is None
    assert (
        why["gzip"] == "2 samples share a chunk and are decoded together; the chunk shuffle decodes them once per epoch"
    )
    assert why["gzip_split"].startswith("each sample is spread over 4 chunks")
    assert why["scale_offset"].startswith("it has filters that only libhdf5 decodes; pack ")
    assert why["text"].startswith("holds text; ")
    assert why["single"].startswith("holds a single value; ")
    assert why["soft"].startswith("is a broken link")
    assert why["lengths"].startswith("holds values of variable length; ")
    assert "holds no samples" in why["empty"]
    gzip = next(each for each in report.datasets if each.name == "gzip")
    assert (gzip.chunks, gzip.filters) == ((2, 8, 6), ("shuffle", "gzip 4"))
    assert gzip.stored_bytes < gzip.bytes == 12 * 8 * 6 * 8


def test_a_dimension_without_a_variable_is_no_reason_to_leave_a_file_out():
    with h5py.File("grid.nc", "w") as file:
        file["t2m"] = np.zeros((6, 4, 5), "f4")
        name = b"This is a netCDF dimension but not a netCDF variable. %10d"
        for dimension, length in {"time": 0, "lat": 4, "lon": 5}.items():
            file.create_dataset(dimension, (length,), ">f4")
            file[dimension].attrs.update(CLASS=np.bytes_("DIMENSION_SCALE"), NAME=np.bytes_(name % length))
    why = {each.name: each.why for each in report_on(["grid.nc"]).datasets}
    for dimension in ("time", "lat", "lon"):
        assert why[dimension] == "holds no values: it is a NetCDF dimension without a variable; give a variable"
    with pytest.raises(FormatError, match=r"grid.nc:/lat: holds no values"):
        HDF5Source("grid.nc", ["lat"])


def test_what_is_not_supported_comes_with_what_to_do():
    examples.compound("events.h5")
    report = report_on(["events.h5"])
    assert report.writer == "PyTables"
    assert not report.suggestions
    (advice,) = [note for note in report.notes if "compound" in note]
    program = re.search(r"with h5py.*\]", advice)[0].replace("NEW", "'new.h5'")
    with h5py.File("events.h5") as file:
        body, _, tail = program.partition(": ")
        exec(f"{body}:\n  {tail}", {"h5py": h5py, "file": file})
    with h5py.File("new.h5") as copied:
        assert copied["energy"].shape == copied["class"].shape == (9,)
    examples.anndata("by_columns.h5ad", columns=True)
    assert any("tocsr()" in note for note in report_on(["by_columns.h5ad"]).notes)


def test_files_that_differ_are_named_with_their_differences():
    examples.images("a.h5")
    examples.images("b.h5", 9)
    examples.images("c.h5", compression="lzf")
    examples.masks("d.h5")
    report = report_on(["a.h5", "b.h5", "c.h5", "d.h5"])
    assert report.differences.keys() == {"c.h5", "d.h5"}
    assert report.differences["c.h5"] == ["images: lzf instead of gzip 4"]
    assert report.differences["d.h5"][:2] == ["has no age", "has no images"]
    assert any("does not fit" in note for note in report.notes)
    with h5py.File("e.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((9, 16, 10, 3), "u1"), np.arange(9.0)
    assert report_on(["a.h5", "e.h5"]).differences["e.h5"][2:] == [
        "images: shape (9, 16, 10, 3) instead of (60, 16, 12, 3)",
        "images: no filters instead of gzip 4",
        "labels: float64 instead of int64",
    ]


# -- the command ------------------------------------------------------------------------------------------------------


def failure(capsys, *arguments):
    assert main(["inspect", *arguments]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert re.fullmatch(r"error: [^\n]+\n", said.err)
    return said.err


def test_wrong_input_ends_with_one_line_and_status_2(capsys, folder):
    examples.images("x.h5", 8)
    Path("text.h5").write_text("no")
    Path("short.h5").write_bytes(Path("x.h5").read_bytes()[:2000])
    (folder / "photos/owl").mkdir(parents=True)
    Path("photos/owl/1.jpg").write_bytes(b"")
    Path("sheet.xlsx").write_bytes(b"")
    assert "missing.h5: no such file" in failure(capsys, "missing.h5")
    assert "*.nope: matches no file" in failure(capsys, "*.nope")
    assert "text.h5: is not an HDF5 file" in failure(capsys, "text.h5")
    assert "short.h5: is damaged: shorter than when it was written; copy it again" in failure(capsys, "short.h5")
    Path("nothing.h5").touch()
    assert "it is empty; copy it again" in failure(capsys, "nothing.h5")
    assert f"{folder}: is a folder; inspect its files: '{folder}/*.h5'" in failure(capsys, str(folder))
    assert "ManifestSource.from_folder('photos', image_size=224) reads it" in failure(capsys, "photos")
    if "pyarrow" in sys.modules:
        assert "pandas.read_excel('sheet.xlsx')" in failure(capsys, "sheet.xlsx")
        Path("t.csv").write_text("a\n1\n")
        assert "t.csv is a table and x.h5 is none" in failure(capsys, "t.csv", "x.h5")
        assert "no such file" in failure(capsys, "missing.csv").lower()


def test_a_damaged_file_among_others_is_named_and_the_status_is_1(capsys):
    examples.images("a.h5", 8)
    Path("b.h5").write_text("no")
    assert main(["inspect", "a.h5", "b.h5"]) == 1
    said = capsys.readouterr().out
    assert "Cannot be read" in said
    assert "b.h5: is not an HDF5 file" in said


def test_a_pipe_gets_every_name_whole_and_no_colour(capsys):
    name = "a_dataset_with_a_name_that_no_terminal_is_wide_enough_for/" * 4 + "images"
    with h5py.File("x.h5", "w") as file:
        file[name], file["labels"] = np.zeros((20, 8, 8, 3), "u1"), np.arange(20) % 2
    assert main(["inspect", "x.h5"]) == 0
    said = capsys.readouterr().out
    assert sum(name in line for line in said.splitlines()) >= 3  # table, Python, command line
    assert "\x1b" not in said


def test_a_terminal_gets_lines_that_fit_and_programs_that_can_be_copied(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    examples.recording("rec.h5")
    assert main(["inspect", "rec.h5"]) == 0
    said = capsys.readouterr().out
    whole = ("  source = ", "  python train.py ")
    assert max(len(line) for line in said.splitlines() if not line.startswith(whole)) <= 80
    suggestion = only(report_on(["rec.h5"]))
    command = said[said.index("python train.py") :].partition("\n\n")[0]
    assert shlex.split(command) == shlex.split(suggestion.command)
    program = said[said.index("from lit_async_data") :].partition("\n\n")[0].replace("\n  ", "\n")
    names = {}
    exec(program, names)
    assert len(names["source"]) == suggestion.samples["all"]
    names["source"].close()


def test_json_needs_no_rich_and_without_rich_one_line_says_so(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    examples.images("x.h5", 8)
    assert "pip install 'lit-async-data[tools]', or add --json" in failure(capsys, "x.h5")
    assert main(["inspect", "x.h5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(json.dumps(report_on(["x.h5"]).as_dict()))
    assert told["version"] == 1
    assert told["attributes"] == {"microscope": "confocal"}
    assert [each["name"] for each in told["datasets"]] == ["age", "images", "labels", "patient"]


def test_the_document_names_every_key_of_the_json():
    page = (ROOT / "docs/tools/inspect.md").read_text()
    for part in (Report, DatasetReport, ColumnReport, SuggestionReport):
        for field in dataclasses.fields(part):
            assert f"`{field.name}`" in page or field.name == "calls", field.name  # that is not part of the JSON


def test_the_document_shows_what_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "96")
    examples.images("scan.h5", 6000)
    assert main(["inspect", "scan.h5"]) == 0
    shown = re.search(r"```text\n(.*?)```", (ROOT / "docs/tools/inspect.md").read_text(), re.DOTALL)[1]

    def plain(text):  # without sizes, which depend on zlib, and what follows from their widths
        return re.sub(r"[\d.]+ [kM]?B|[\s─]+", " ", text).split()

    assert plain(shown) == plain(capsys.readouterr().out)


def test_each_command_has_a_module_and_help(capsys):
    for name, command in COMMANDS.items():
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert "usage: lit-async-data" in capsys.readouterr().out
        assert command.summary
    with pytest.raises(SystemExit, match="2"):
        main([])
    said = capsys.readouterr().err
    assert all(name in said for name in COMMANDS)
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert lit_async_data.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["inspct", "x.h5"], "inspct: no such command; did you mean inspect?"),
        (["x.h5"], "x.h5: no such command; choose from inspect, doctor, pack"),
        (["inspect", "x.h5", "--jsn"], "--jsn: no such option of inspect; did you mean --json?"),
        (["doctor", "--secnds=3", "x.h5"], "--secnds=3: no such option of doctor; did you mean --seconds?"),
        (["inspect", "x.h5", "--json", "y.h5"], "y.h5: not expected here; name files before options"),
    ],
)
def test_what_was_probably_meant_by_a_wrong_word_is_said(capsys, typed, said):
    assert main(typed) == 2
    assert capsys.readouterr() == ("", f"error: {said}\n")


def test_a_folder_that_may_not_be_listed_is_one_line(capsys, monkeypatch):
    def refused(path, listed=os.listdir):
        if path == "mine":
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    Path("mine").mkdir()
    monkeypatch.setattr("os.listdir", refused)
    for command in (["inspect", "mine"], ["pack", "mine", "-o", "x.h5"]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error == "error: mine: Permission denied; check the path, and whether this user may use it\n"


@pytest.mark.parametrize("given", [[], ["--json"]])
def test_a_reader_that_has_read_enough_is_no_error(given):
    examples.images("x.h5", 8)
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "lit_async_data", "inspect", "x.h5", *given]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@settings(max_examples=400)
@given(st.text("\\\\\\'\"${}[]a ,é", min_size=1, max_size=8))
def test_any_text_comes_through_the_shell_hydra_and_omegaconf_unchanged(text):
    (typed,) = shlex.split(override("key", {"name": [text]}))
    (parsed,) = OverridesParser.create().parse_overrides([typed])
    assert OmegaConf.create({"key": parsed.value()}).key.name[0] == text


def test_a_full_disk_is_one_line(monkeypatch, capsys):
    examples.images("scan.h5")

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    assert main(["inspect", "--json", "scan.h5"]) == 2
    assert capsys.readouterr().err == "error: output: No space left on device; free some, or write elsewhere\n"
