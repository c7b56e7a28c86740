"""`HDF5Source` from outside: its files and handles, files that change, and columns in another order in one of them."""

import os
import pickle
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from support.files.damage import patch
from support.files.values import some
from support.processes import in_fork
from support.sources.comparison import assert_same_samples
from support.sources.oracle import Model, read, refused

from lit_async_data import (
    AsyncDataModule,
    AsyncLoader,
    ChangedError,
    ConcatSource,
    ConfigError,
    Field,
    FormatError,
    HDF5Source,
    LoaderOptions,
    ManifestSource,
    MissingError,
)

ROWS = 23
SHAPE = (ROWS, 5, 6, 3)

# Arguments of create_dataset for data of this shape. No chunk shape divides it: there are edge chunks.
STORAGE = {
    "contiguous": {},
    "chunked": {"chunks": (4, 2, 4, 2)},
    "gzip tiles": {"chunks": (3, 4, 4, 2), "compression": "gzip"},
    "scale-offset": {"chunks": (3, 4, 4, 2), "scaleoffset": 0},
}
SHUFFLED = np.random.default_rng(1).permutation(ROWS)


@pytest.mark.parametrize("side", [4, 80])  # below and above the size from which batches are views
@pytest.mark.parametrize(
    ("layout", "memory_format"), [("NHWC", torch.channels_last), ("NTHWC", torch.channels_last_3d)]
)
def test_channels_last_comes_out_of_the_loader_in_that_memory_format(h5, layout, memory_format, side):
    shape = {"N": 10, "T": 2, "H": side, "W": side, "C": 3}
    path = h5(data=some([shape[letter] for letter in layout]))
    with AsyncLoader(HDF5Source(path, ["data"], layout=layout), LoaderOptions(batch_size=5, shuffle=False)) as loader:
        batches = [x for (x,) in loader]
    for x in batches:
        assert x.is_contiguous(memory_format=memory_format)
        assert not x.is_contiguous()
    assert_same_samples(torch.cat(batches).numpy(), Model(path, {"x": "data"}, layout=layout).values["x"])


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it has threads, as torch does
def test_a_source_that_was_read_refuses_to_be_read_in_a_fork(h5, storage):
    path = h5(data={"data": some(SHAPE), **STORAGE[storage]})
    source = HDF5Source(path, ["data"])
    read(source, [1])
    assert in_fork(lambda: read(source, [1])) == 3
    assert in_fork(lambda: read(HDF5Source(path, ["data"]), [1])) == 0  # one that was never read
    assert_same_samples(read(source, SHUFFLED)["data"], some(SHAPE)[SHUFFLED])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_started_loader_refuses_to_continue_in_a_fork(images):
    with AsyncLoader(HDF5Source(images), LoaderOptions(batch_size=10, shuffle=False)) as loader:
        next(loader)
        assert in_fork(lambda: next(loader)) == 3
        assert next(loader)[0][0, 0, 0, 0] == 10


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize(("act", "status"), [("close", 0), ("give room back", 0), ("reserve", 3)])
def test_a_fork_waits_for_no_lock_that_was_held_when_it_was_made(h5, act, status):
    """1. A thread holds the lock of the decoded chunks. 2. Another forks. 3. In the child, nobody releases it."""
    chunked = {"data": some(SHAPE), "chunks": (2, *SHAPE[1:]), "compression": "gzip"}
    source = HDF5Source(h5(data=chunked), ["data"])
    read(source, [1])
    room, held, over = source.reserve(0, 0), threading.Event(), threading.Event()

    def hold():
        with source._reader.cache.room.lock:
            held.set()
            over.wait(30)

    acts = {"close": source.close, "give room back": room, "reserve": lambda: source.reserve(0, 0)}
    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        assert in_fork(acts[act]) == status
    finally:
        over.set()
        thread.join()
        source.close()


def written_anew(path):
    with h5py.File(path, "w") as file:
        file["data"] = some(SHAPE, seed=1)


def replaced(path):
    """By one of the same size and time."""
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


CHANGES = {
    "cut to nothing": lambda path: os.truncate(path, 0),
    "cut a little": lambda path: os.truncate(path, path.stat().st_size * 999 // 1000),
    "lengthened": lambda path: os.truncate(path, path.stat().st_size + 1),
    "written to": lambda path: patch(path, path.stat().st_size - 1, "B", path.read_bytes()[-1] ^ 0xFF),
    "written anew": written_anew,
    "replaced": replaced,
}


@pytest.fixture
def old(h5):
    """Writes a file with an old mtime, so that any later write changes it."""

    def written(storage):
        path = Path(h5(data={"data": some(SHAPE), **STORAGE[storage]}))
        os.utime(path, ns=(10**18, 10**18))
        return path

    return written


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("storage", STORAGE)
def test_a_file_that_changes_after_the_source_was_built_is_refused(old, storage, change):
    path = old(storage)
    unread, used = (HDF5Source(path, ["data"]) for _ in range(2))
    if change not in {"written anew", "replaced"}:  # which h5py refuses while the file is open; the next test
        read(used, [1])
    CHANGES[change](path)
    for source in (unread, used):
        for samples in ([0], [1, 2], [ROWS - 1]):
            with pytest.raises(ChangedError, match=f"{path}: .*build the source again") as caught:
                read(source, samples)
            assert caught.value.file == str(path)
        source.close()


@pytest.mark.parametrize("storage", STORAGE)
def test_a_file_replaced_while_open_is_never_read_instead(old, storage):
    path = old(storage)
    source = HDF5Source(path, ["data"])
    read(source, [0])
    replaced(path)
    try:
        got = read(source, SHUFFLED)["data"]
    except ChangedError:
        pass
    else:
        assert_same_samples(got, some(SHAPE)[SHUFFLED])
    source.close()
    with pytest.raises(ChangedError, match="replaced"):
        read(source, [0])


def test_a_missing_file_is_named(images):
    source = HDF5Source(images)
    os.unlink(images)
    with pytest.raises(MissingError, match=images) as raised:
        read(source, [0])
    assert str(raised.value).count(images) == 1


def test_a_change_in_one_file_of_several_leaves_the_others_readable(h5):
    paths = [h5(f"{n}.h5", labels=np.arange(3) + 3 * n) for n in range(3)]
    source = HDF5Source(paths, ["labels"])
    os.truncate(paths[1], 700)
    assert read(source, [0, 8])["labels"].tolist() == [0, 8]
    with pytest.raises(ChangedError) as caught:
        read(source, [0, 3])
    assert caught.value.file == paths[1]


def test_a_file_replaced_between_two_fields_is_refused(h5):
    """1. The labels are read, and the file is open. 2. Another is put in its place. 3. The images are asked for, which
    h5py opens by path."""
    wanted = {"x": {"data": np.arange(5.0), "chunks": (2,), "scaleoffset": 1}, "y": np.arange(5.0)}
    path = h5("x.h5", **wanted)
    other = h5("other.h5", **wanted)
    source = HDF5Source(path, ["x", "y"])
    read(source, [0], ["y"])
    os.replace(other, path)
    with pytest.raises(ChangedError, match="replaced"):
        read(source, [0], ["x"])


@pytest.mark.parametrize("option", ["memory_map", "allow_external"])
@pytest.mark.parametrize("wrong", [None, 1, "yes"])
def test_what_is_neither_true_nor_false_is_refused(h5, option, wrong):
    with pytest.raises(ConfigError, match=rf"^{option}: .* is not true or false"):
        HDF5Source(h5(data=some(SHAPE)), ["data"], **{option: wrong})


# Columns that files name, in another order in one of them: refused in a source, and between sources and stages.
A, B = ["CD4", "FOXP3", "GNLY"], ["CD4", "GNLY", "FOXP3"]
X = np.arange(12, dtype="f4").reshape(4, 3)


def matrix(file, name):
    file[name] = X


def sparse(file, name):
    group = file.create_group(name)
    group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", (4, 3)
    group["data"], group["indices"], group["indptr"] = X.ravel(), np.tile(np.arange(3), 4), np.arange(0, 13, 3)


def var(place, write, name):
    def written(file, genes):
        write(file, name)
        file[f"{place}/symbol"] = genes
        file[place].attrs["_index"] = "symbol"

    return written


def tenx(file, genes):
    group = file.create_group("X")
    group["data"], group["indices"], group["indptr"] = X.ravel(), np.tile(np.arange(3), 4), np.arange(0, 13, 3)
    group["shape"], group["barcodes"], group["features/id"] = [3, 4], list("abcd"), genes


def pandas(file, genes):
    file["block0_values"], file["block0_items"] = X, np.array(genes, "S")


def netcdf(file, genes):
    file["x"], file["channel"] = X, genes
    file["channel"].make_scale("channel")
    file["x"].dims[1].attach_scale(file["channel"])


WRITERS = {
    "dense": ("X", var("var", matrix, "X")),
    "csr": ("X", var("var", sparse, "X")),
    "raw": ("raw/X", var("raw/var", matrix, "raw/X")),
    "10x": ("X", tenx),
    "pandas": ("block0_values", pandas),
    "NetCDF": ("x", netcdf),
    "a window": (Field("X", window=(0, 2)), var("var", matrix, "X")),
}


@pytest.fixture
def files(tmp_path):
    def written(write, *several):
        paths = [str(tmp_path / f"{number}.h5ad") for number in range(len(several))]
        for path, genes in zip(paths, several, strict=True):
            with h5py.File(path, "w") as file:
                write(file, genes)
                file["other"] = np.ones((4, 2))
        return paths

    return written


@pytest.mark.parametrize("kind", WRITERS)
def test_columns_in_another_order_are_refused(files, kind):
    name, write = WRITERS[kind]
    paths, fields = files(write, A, B, A), {"x": name}
    with pytest.raises(FormatError) as caught:
        HDF5Source(paths, fields)
    said = str(caught.value)
    assert f"{paths[1]}:/" in said
    assert f" 'GNLY', but 'FOXP3' in {paths[0]}; write both" in said
    assert len(HDF5Source([paths[0], paths[2]], fields)) > 4
    assert len(HDF5Source(paths, {"x": "other"})) == 12


def test_columns_without_names_are_as_they_were(files):
    def moments(file, values):
        file["obsm/X_pca"], file["X"], file["var"] = X, X, values  # the variance of each column

    assert len(HDF5Source(files(moments, [1.0, 2, 3], [3.0, 2, 1]), {"x": "X", "y": "obsm/X_pca"})) == 8


def test_a_file_without_names_hides_no_difference(files):
    paths = files(lambda file, genes: var("var", matrix, "X")(file, genes) if genes else matrix(file, "X"), [], A, B)
    refused(FormatError, [paths[2], "column 1 is 'GNLY'", "'FOXP3'"], paths, {"x": "X"})


@pytest.mark.parametrize("pattern", ["*", None])
def test_columns_of_groups_that_are_samples(tmp_path, pattern):
    paths = [str(tmp_path / f"{number}.h5") for number in range(2)]
    for path, genes in zip(paths, (A, B), strict=True):
        with h5py.File(path, "w") as file:
            for number in range(3 if pattern else 1):
                group = file.create_group(f"p{number}") if pattern else file
                pandas(group, B if number == 2 else genes if pattern is None else A)
    fields, options = {"x": "block0_values"}, {"sample": "group", "group": pattern}
    paths = paths[:1] if pattern else paths
    refused(FormatError, ["column 1 is 'GNLY', but 'FOXP3' in"], paths, fields, **options)


def test_columns_of_sources_and_stages(files):
    paths = files(var("var", sparse, "X"), A, B)
    a, b = (HDF5Source(path, {"x": "X"}) for path in paths)
    words = f"column 1 is 'GNLY', but 'FOXP3' in .*{paths[0]}"
    with pytest.raises(FormatError, match=f"{paths[1]}.*{words}"):
        ConcatSource([a, b])
    with pytest.raises(ConfigError, match=f"val: .*{paths[1]}: its {words}"):
        AsyncDataModule(train=a, val=b).setup("fit")
    named = pickle.dumps(b)
    assert b"GNLY" not in named
    with pytest.raises(FormatError, match="column"):
        ConcatSource([a, pickle.loads(named)])


def test_rows_of_a_table(files, tmp_path):
    paths = files(var("var", matrix, "X"), A, B)
    (tmp_path / "t.csv").write_text("x,row\n" + "\n".join(f"{path},0" for path in paths))
    columns = {"x": {"name": "x", "row": "row", "dataset": "X"}}
    with pytest.raises(FormatError, match=r"column 1 is 'GNLY', but 'FOXP3' in"):
        ManifestSource(tmp_path / "t.csv", columns)


def test_a_column_is_found_by_its_name_wherever_a_file_has_it(files):
    def labels(file, names):
        file["y"], file["which"] = X, [3, 0, 0, 1]
        file["y"].attrs["label_names"] = np.array(names, "S")

    paths = files(labels, A, B)
    assert HDF5Source(paths, {"y": Field("y", column="GNLY")}).column("y").tolist() == [2, 5, 8, 11, 1, 4, 7, 10]
    assert HDF5Source(paths[1], {"y": Field("y", column="GNLY", lookup="which")}).column("y").tolist() == [10, 1, 1, 4]
    genes = HDF5Source(files(var("var", matrix, "X"), A, B), {"y": Field("X", column="FOXP3")})
    assert genes.column("y").tolist() == [1, 4, 7, 10, 2, 5, 8, 11]
    paths = files(labels, A, B)
    refused(FormatError, ["'GNLY', but 'FOXP3' in", "column=NAME"], paths, {"y": Field("y", column=1)})
    refused(
        ConfigError, ["'CD8' is no column of", "its columns are CD4, FOXP3"], paths, {"y": Field("y", column="CD8")}
    )
    said = ["no attribute names its columns; give a number"]
    refused(ConfigError, said, paths, {"y": Field("other", column="CD4")})


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("raters", ["ann", "bob", "cy"], ["bob", "ann", "cy"]),
        ("channel_names", ["ann", "bob", "cy"], ["ann", "bob", "eve"]),
        ("names", ["a", "a", "b"], ["a", "b", "a"]),
        ("label", np.bytes_("left"), np.bytes_("right")),
    ],
)
def test_other_texts_of_a_dataset_are_no_other_order_of_columns(files, key, one, other):
    def rated(file, texts):
        file["y"], file["row"] = X, np.arange(4)
        file["y"].attrs[key] = file["row"].attrs[key] = texts

    paths = files(rated, one, other)
    assert len(HDF5Source(paths, {"y": "y", "row": "row"})) == 8
    if key == "names":
        refused(ConfigError, ["'a' is 2 columns of"], paths, {"y": Field("y", column="a")})
    if key == "raters":
        assert HDF5Source(paths, {"y": Field("y", column="bob")}).column("y").tolist() == [1, 4, 7, 10, 0, 3, 6, 9]
    if key == "channel_names":
        with pytest.raises(ConfigError, match="has no columns"):
            HDF5Source(paths, {"y": Field("row", column="ann")})


def test_columns_that_are_stacked_are_compared_one_by_one(files):
    def labels(file, names):
        file["y"] = X
        file["y"].attrs["columns"] = names

    for write, name in ((labels, "y"), (var("var", matrix, "X"), "X")):
        fields = {"x": [Field(name, column=0), Field(name, column=2)]}
        refused(FormatError, ["other names than in"], files(write, A, B), fields)
        assert len(HDF5Source(files(write, A, A), fields)) == 8
    refused(FormatError, ["column 2 is 'FOXP3', but 'GNLY'"], files(labels, A, B), {"x": Field("y", column=2)})
