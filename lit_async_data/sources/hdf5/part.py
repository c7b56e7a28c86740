"""One file of a source, looked at as a whole: it can be read, its fields fit each other and those of other files."""

from __future__ import annotations

import os

import h5py

from lit_async_data.errors import FormatError, MissingError
from lit_async_data.sources.hdf5.dataset import StoredDataset, look_at
from lit_async_data.sources.hdf5.identity import FileIdentity
from lit_async_data.sources.hdf5.index_cache import IndexCache


def look_at_file(
    path: str, names: dict[str, str], layouts: dict[str, str], *, cache: IndexCache, external: bool
) -> tuple[FileIdentity, dict[str, StoredDataset]]:
    """Look at the datasets of one file.

    Args:
        path: The file.
        names: Of the dataset for each batch key.
        layouts: Letters of their axes, by batch key.
        cache: Where indices of chunks are kept.
        external: Whether values may lie in other files.

    Raises:
        MissingError: A file or dataset is not there.
        FormatError: The file is not HDF5, or a dataset cannot be a field.
        ConfigError: ``layouts`` does not fit.
    """
    if not os.path.exists(path):
        raise MissingError(f"{path}: there is no such file", file=path)
    if not os.path.isfile(path):
        what = f"a folder; for all files in it write {path}/*.h5" if os.path.isdir(path) else "no regular file"
        raise FormatError(f"{path} is {what}", file=path)
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            identity = FileIdentity.of(os.stat(path))
            datasets = {
                key: look_at(file, path, name, layouts.get(key), cache=cache, external=external)
                for key, name in names.items()
            }
    except OSError as error:
        what = "is not an HDF5 file, or is damaged" if os.access(path, os.R_OK) else "may not be read"
        if "unable to lock" in str(error) or "already open for write" in str(error):
            what = "is open for writing in another process; wait until it is closed"
        raise FormatError(f"{path} {what}: {error}", file=path) from error
    lengths = {key: stored.rows for key, stored in datasets.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{datasets[key].name} has {n}" for key, n in lengths.items())
        raise FormatError(
            f"{path}: the fields are of different lengths: {said}; is layout right about their N?", file=path
        )
    return identity, datasets


def check_same(path: str, datasets: dict[str, StoredDataset], first: str, model: dict[str, StoredDataset]) -> None:
    """Make sure that the samples of a file are like those of the first.

    Raises:
        FormatError: They are not; names both.
    """
    for key, stored in datasets.items():
        if stored.spec != model[key].spec:
            mine, other = stored.spec, model[key].spec
            raise FormatError(
                f"{stored} has samples of {mine.dtype} {mine.shape}, but in {first} they are {other.dtype} "
                f"{other.shape}; files of one source must agree",
                file=path,
                dataset=stored.name,
            )
