"""Columns that files name, in another order in one of them: refused in a source, and between sources and stages."""

import pickle

import h5py
import numpy as np
import pytest
from support.sources.oracle import refused

from lit_async_data import AsyncDataModule, ConcatSource, ConfigError, Field, FormatError, HDF5Source, ManifestSource

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


def layers(file, _):
    matrix(file, "X")
    matrix(file, "layers/a")


def nullable(file, genes):
    var("var", matrix, "X")(file, ["", "", ""])
    del file["var/symbol"]
    file["var/symbol/values"], file["var/symbol/mask"] = genes, [False] * 3


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
    "a layer": ("layers/counts", var("var", sparse, "layers/counts")),
    "raw": ("raw/X", var("raw/var", matrix, "raw/X")),
    "nullable": ("X", nullable),
    "10x": ("X", tenx),
    "pandas": ("block0_values", pandas),
    "NetCDF": ("x", netcdf),
    "a window": (Field("X", window=(0, 2)), var("var", matrix, "X")),
    "a column": (Field("X", column=1, dtype="int16"), var("var", matrix, "X")),
    "channels": ([["X", "layers/a"]], var("var", layers, "")),
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
    paths, fields = files(write, A, B, A), name if isinstance(name, list) else {"x": name}
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


def test_other_texts_of_a_dataset_are_no_names_of_columns(files):
    def rated(file, raters):
        file["y"] = X
        file["y"].attrs["raters"] = raters

    assert len(HDF5Source(files(rated, ["ann", "bob", "cy"], ["bob", "ann", "cy"]), {"y": "y"})) == 8
