"""`Paths`: the files that a column of a table names."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from lit_async_data.errors import MissingError, SourceError
from lit_async_data.order.permutation import Indices
from lit_async_data.sources.manifest.column import Kind
from lit_async_data.sources.manifest.files.stored_file import RootDirectory
from lit_async_data.sources.manifest.rows import Rows
from lit_async_data.sources.manifest.table.arrow import folders_of

# Rows whose paths are text at the same time where all are looked at.
_BLOCK = 2**18

IMAGES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".tif", ".tiff", ".webp", ".bmp", ".gif")
HDF5 = (".h5", ".hdf5", ".hdf", ".he5", ".h5ad", ".nc", ".nc4")
NPY = (".npy",)
SUFFIXES: dict[str, Kind] = {
    **dict.fromkeys(IMAGES, "image"),
    **dict.fromkeys(HDF5, "hdf5"),
    **dict.fromkeys(NPY, "npy"),
}


def kind_of_path(path: str) -> Kind | None:
    """What a path names, by how it ends; None for what is not known."""
    return SUFFIXES.get(os.path.splitext(path.rstrip())[1].lower())


class Paths:
    """The files that a column names, a path for each sample. Nothing in it changes; safe to use from any thread.

    Args:
        entries: The samples.
        column: Of the paths.
        root: The folder that they lie in.
    """

    def __init__(self, entries: Rows, column: str, root: RootDirectory) -> None:
        self.entries, self.column, self.root = entries, column, root

    def of(self, samples: Indices) -> list[str]:
        """The absolute paths of samples' files, by the table alone.

        Raises:
            ManifestError: A row names no file, or one that leaves the root; names it.
        """
        texts = self.entries.table.text(self.column, samples)
        return [self._path_of(text, sample) for sample, text in zip(samples.tolist(), texts, strict=True)]

    def _path_of(self, text: str, sample: int) -> str:
        try:
            return self.root.path_of(text)
        except SourceError as error:
            raise self.entries.blamed(error, sample, text) from None

    def distinct(self) -> tuple[Indices, list[str]]:
        """A number for each sample's path, and the paths; for columns in which few paths stand often.

        Raises:
            ManifestError: As `of`.
            MissingError: A link leads out of the root.
        """
        codes, texts = self.entries.table.coded(self.column)
        present, codes = np.unique(codes, return_inverse=True)
        firsts = np.unique(codes, return_index=True)[1].tolist()
        paths = []
        for code, first in zip(present.tolist(), firsts, strict=True):
            path = self._path_of(texts[code], first)
            try:
                paths.append(self.root.checked(path))
            except SourceError as error:
                raise self.entries.blamed(error, first, path) from None
            if not os.path.exists(path):
                missing = MissingError(f"{path}: no such file; is the folder mounted, and the table right?", file=path)
                raise self.entries.blamed(missing, first, path)
        return codes, paths

    def grouped(self, naming: Callable[[str], str]) -> tuple[Indices, list[str]]:
        """A number for each sample, by what a function makes of its path, and what that is.

        Args:
            naming: Gets a path from the root on, so that the folder may be moved; called once for each sample, block
                by block, so that no more paths are held.
        """
        numbers: dict[str, int] = {}
        codes = np.empty(len(self.entries), np.int64)
        for first in range(0, len(codes), _BLOCK):
            samples = np.arange(first, min(first + _BLOCK, len(codes)))
            found = (naming(self.root.within(path)) for path in self.of(samples))
            codes[samples] = [numbers.setdefault(name, len(numbers)) for name in found]
        return codes, list(numbers)

    def folders(self) -> Indices:
        """A number for each sample, by the folder that its file is in."""
        codes, texts = folders_of(self.entries.table.array(self.column))
        # One folder can be named in several ways.
        numbers: dict[str, int] = {}
        of_each = [numbers.setdefault(os.path.normpath(text), len(numbers)) for text in texts]
        return np.array(of_each, np.int64)[codes]
