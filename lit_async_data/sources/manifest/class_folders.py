"""`class_folders`: a tree of folders, one for each class, as a table."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from lit_async_data.errors import ConfigError, ManifestError, MissingError
from lit_async_data.sources.manifest.arrow import arrow
from lit_async_data.sources.manifest.origin import shown
from lit_async_data.sources.manifest.paths import IMAGES, NPY

# Columns of the table.
PATH, LABEL = "path", "label"


def class_folders(root: str, *, links: bool = False) -> Any:
    """The images and ``.npy`` files below a folder; the class of each is the folder of the first level that it is in.

    Args:
        root: A folder that holds a folder for each class; these may hold folders too.
        links: Whether to go into folders that are links.

    Returns:
        A ``pyarrow.Table`` of ``path``, relative to ``root``, and ``label``, the names of classes. Classes in the order
        of their names, and the files of each in the order of theirs; hidden ones and those of other kinds are left out.

    Raises:
        ConfigError: It is no folder, holds none, or one that is a link is not to be gone into.
        MissingError: A class has no files.
    """
    if not os.path.isdir(root):
        raise ConfigError(f"from_folder: {root} is no folder")
    folders = [entry for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")]
    if not links:
        _check_no_links([entry.path for entry in folders])
    classes = sorted(_text(entry.name) for entry in folders)
    if not classes:
        raise ConfigError(f"from_folder: {root} holds no folders; it must have one for each class")
    library = arrow()
    chunks, counts = [], []
    for name in classes:
        # Text of one class at a time: no more of it is held as objects.
        found = library.array(list(_files(root, name, links=links)), library.large_string())
        if not len(found):
            raise MissingError(
                f"{os.path.join(root, name)}: no images or .npy files in it; remove the folder if it is no class",
                file=os.path.join(root, name),
            )
        chunks.append(found)
        counts.append(len(found))
    names = library.array(classes, library.large_string())
    labels = [
        library.DictionaryArray.from_arrays(np.full(count, code, np.int32), names) for code, count in enumerate(counts)
    ]
    return library.table({PATH: library.chunked_array(chunks), LABEL: library.chunked_array(labels)})


def _check_no_links(folders: Iterable[str]) -> None:
    for folder in folders:
        if os.path.islink(folder):
            raise ConfigError(
                f"from_folder: {shown(folder)} is a link to a folder; say outside=True to follow it, or remove it",
                file=folder,
            )


def _files(root: str, name: str, *, links: bool) -> Iterator[str]:
    """Paths below a class's folder, relative to the root."""
    seen: set[tuple[int, int]] = set()  # folders: links may lead back to where they are
    for folder, below, files in os.walk(os.path.join(root, name), followlinks=links):
        state = os.stat(folder)
        if (state.st_dev, state.st_ino) in seen:
            below.clear()
            continue
        seen.add((state.st_dev, state.st_ino))
        below[:] = sorted(each for each in below if not each.startswith("."))
        if not links:
            _check_no_links([os.path.join(folder, each) for each in below])
        inside = os.path.relpath(folder, root)
        for file in sorted(files):
            if not file.startswith(".") and os.path.splitext(file)[1].lower() in (*IMAGES, *NPY):
                yield _text(os.path.join(inside, file))


def _text(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ManifestError(f"{shown(path)}: a name that is not UTF-8; rename the file", file=path) from None
    return path
