"""``inspect``: what it says of files is what sources do, and the lines that it suggests read them."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import re
import shlex
import sys
from pathlib import Path

import h5py
import hydra
import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from support.files import examples
from support.lightning.command_line import CONFIGS

from lit_async_data import AsyncLoader, HDF5Source, split
from lit_async_data.tools.command_line import main
from lit_async_data.tools.inspect.command import report_on
from lit_async_data.tools.inspect.contents import SHOWN
from lit_async_data.tools.inspect.report import ColumnReport, Report, SuggestionReport

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
    assert 'on a GPU, device_transform=ToFloat("x") makes float32' in floats
    assert "on a CPU" in floats
    names = {"split": split}
    exec(suggestion.python, names)
    sides = eval(note.partition(" keeps each patient")[0], names)
    assert {key: len(side) % 10 for key, side in sides.items()} == {"train": 0, "val": 0}
    names["source"].close()


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
    assert 'Field("y", column=0)}, layout={"x": "CHWN"})' in suggestion.python
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


# -- what is suggested, and what never is -----------------------------------------------------------------------------

IMAGES, ROWS = np.zeros((40, 28, 28), "u1"), np.zeros((40, 9), "f4")
# What writes a file; what the one suggestion says, None if there is none; what a note says; what is said nowhere.
MEANT = [
    ({"images": IMAGES, "index": np.arange(40), "valid": np.ones(40, bool)}, '{"x": "images"}', "", "index"),
    ({"x": ROWS, "counter": np.arange(40)}, '{"x": "x"}', "", "counter"),
    ({"x": ROWS, "kind": np.arange(40) % 3}, '{"x": "x", "y": "kind"}', "", ""),
    ({"x": IMAGES, "origin/part": np.arange(40) // 9}, '{"x": "x"}', "", "origin"),
    ({"x": ROWS, "y": np.eye(10)[np.arange(40) % 10]}, '{"x": "x", "y": "y"}', "float64", ""),
    (examples.masks, '{"x": "volume", "y": "mask"}', "", ""),
    (examples.stages, 'test = HDF5Source("x.h5", {"x": "X_test", "y": "y_test"}', "", ""),
    (examples.of_pandas, None, "pandas.read_hdf(", "axis1"),
    (examples.ragged, '{"x": ".", "y": "label"}', "", "window"),
    (lambda path: examples.ragged(path, "seq/"), '{"x": "seq", "y": "label"}', "", "window"),
    ({"data": np.zeros((64, 9000), "f4"), "onsets": np.arange(64)}, 'layout={"x": "CN", "y": "CN"}', "", "onsets"),
    ({"Series/data": np.zeros((300, 4), "f4"), "electrodes/imp": np.arange(4) // 2}, "(0, 64)", "", "electrodes"),
    (lambda path: examples.grid(path, "lat", "lon", "time"), 'layout={"x": "HWN"}', "", "level"),
    (lambda path: examples.grid(path, "lat", "lon"), None, "no dataset looks like samples", ""),
    (examples.one_each, None, "10 groups with image of one shape (8, 9, 3) are 10 samples", ""),
    (lambda path: examples.one_each(path, "img_{}", ""), None, "10 datasets such as img_0", ""),
    ({"image": np.zeros((32, 32, 3), "u1")}, None, "looks like one image", ""),
    (examples.compound, None, "no dataset can be read", ""),
]


@pytest.mark.parametrize(("write", "suggested", "noted", "never"), MEANT)
def test_what_is_suggested_can_be_meant(write, suggested, noted, never):
    write("x.h5") if callable(write) else examples.datasets("x.h5", write)
    check_said(report_on(["x.h5"]), suggested, noted, never)


def check_said(report, suggested, noted, never=""):
    assert len(report.suggestions) == (suggested is not None)
    said = " ".join([*report.notes, *(line for each in report.suggestions for line in (each.python, *each.notes))])
    assert (suggested or "") in said
    assert noted in said
    assert not never or never not in said
    for each in report.suggestions:
        check(each)


def test_one_file_per_sample_is_no_file_of_rows():
    for number in range(3):
        examples.datasets(f"{number}.h5", {"image": np.zeros((8, 9), "f4"), "label": number})
    report = report_on(["*.h5"])
    assert not report.suggestions
    assert "3 files with image of one shape (8, 9) are 3 samples" in report.notes[0]


def test_encoded_images_are_recognised_by_their_first_bytes():
    examples.jpegs("x.h5")
    report = report_on(["x.h5"])
    why = {each.name: each.why for each in report.datasets if not each.reading}
    assert why.keys() == {"text", "opaque", "lengths"}
    assert all(
        each.startswith("holds encoded JPEG images: ") and "docs/data/sources.md" in each for each in why.values()
    )
    assert "decode the images in a sample_transform" in only(report).notes
    assert only(report).title.startswith("encoded JPEG images of ")


TABLES = [
    ("0.png,1\n1.png,0\n", None, "the first line looks like data (0.png)"),
    ("path,label,slice\nx.h5,0,0\nx.h5,1,1\nx.h5,0,2\n", '{"name": "path", "row": "slice", "dataset": "images"', ""),
    ("a,tags\n" + "1,b|c\n2,c\n3,b\n4,b|c\n5,c|b\n", '{"name": "tags", "separator": "|"}', ""),
    ("a,species,kinds\n" + "1,b,p\n2,c,p\n3,b,q\n4,c,q\n", '"y": "species"', "may be labels too: kinds"),
]


@pytest.mark.parametrize(("rows", "suggested", "noted"), TABLES)
def test_what_is_suggested_for_a_table_can_be_meant(rows, suggested, noted):
    pytest.importorskip("pyarrow")
    examples.images("x.h5")
    header, _, rest = rows.partition("\n")
    Path("t.csv").write_text(f"{header}\n{rest * 6}")
    check_said(report_on(["t.csv"]), suggested, noted)


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
    assert why["contiguous"] == ""
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
    assert not re.search(r"[ \t]\n", said)


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
    assert [each["name"] for each in told["datasets"]] == ["age", "images", "labels", "patient"]


def test_the_document_names_every_key_of_the_json():
    page = (ROOT / "docs/tools/inspect.md").read_text()
    names = [field.name for part in (Report, ColumnReport, SuggestionReport) for field in dataclasses.fields(part)]
    assert [name for name in (*names, *SHOWN) if f"`{name}`" not in page] == ["calls"]  # that is not part of the JSON


def test_the_document_shows_what_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "96")
    examples.images("scan.h5", 6000)
    assert main(["inspect", "scan.h5"]) == 0
    shown = re.search(r"```text\n(.*?)```", (ROOT / "docs/tools/inspect.md").read_text(), re.DOTALL)[1]

    def plain(text):  # without sizes, which depend on zlib, and what follows from their widths
        return re.sub(r"[\d.]+ [kM]?B|[\s─]+", " ", text).split()

    assert plain(shown) == plain(capsys.readouterr().out)
