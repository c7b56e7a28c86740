"""`class_folders`: lists a tree with one folder per class as a table."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator

import numpy as np

from lit_async_data.errors import ConfigError, ManifestError, MissingError, few
from lit_async_data.sources.local_files.descriptors import raise_if_none_left
from lit_async_data.sources.manifest.fields.column import IMAGES, NPY
from lit_async_data.sources.table.arrow import arrow
from lit_async_data.sources.table.reading import FolderTable
from lit_async_data.sources.table.row_origin import quoted

# Names of the columns.
PATH, LABEL = "path", "label"
# Names of folders for stages, each of which holds all classes.
_STAGES = ("train", "training", "trn", "val", "valid", "validation", "dev", "test", "testing", "eval", "evaluation")

_log = logging.getLogger(__name__)


def class_folders(root: str, *, links: bool = False) -> FolderTable:
    """List the images and ``.npy`` files below a folder with one folder per class; links to folders only if wanted.

    Returns:
        A table with the columns ``path``, relative to ``root``, and ``label``, the class name. Classes are sorted by
        name, and files within a class too.
    """
    if not os.path.isdir(root):
        raise ConfigError(f"{root} is not a folder; give one with a folder per class", "from_folder")
    folders = [entry for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")]
    if not links:
        _check_no_links([entry.path for entry in folders])
    classes = sorted(_utf8_path(entry.name) for entry in folders)
    if not classes:
        raise ConfigError(f"{root} has no folders; it needs one for each class", "from_folder")
    _check_no_stages(root, classes)
    library = arrow()
    chunks, others = [], Counter[str]()
    for name in classes:
        # One class at a time, so that only its paths are Python strings.
        skipped = Counter[str]()
        chunks.append(library.array(list(_files(root, name, skipped, links=links)), library.large_string()))
        others += skipped
        if not len(chunks[-1]):
            what = f", but {_counted(skipped)}; convert those" if skipped else "; add some"
            raise MissingError(
                f"from_folder: {os.path.join(root, name)} has no images or .npy files{what}, or move the folder "
                "away if it is not a class",
                file=os.path.join(root, name),
            )
    if others:
        _log.warning("from_folder: %s: skipped files that are neither images nor .npy: %s", root, _counted(others))
    codes = np.repeat(np.arange(len(classes), dtype=np.int32), list(map(len, chunks)))
    labels = library.DictionaryArray.from_arrays(codes, library.array(classes, library.large_string()))
    return FolderTable(root, library.table({PATH: library.chunked_array(chunks), LABEL: labels}))


def _check_no_stages(root: str, folders: list[str]) -> None:
    """Refuse folders such as ``train`` and ``val`` that hold class folders. A folder ``test`` may hold only files."""
    if not all(name.lower() in _STAGES for name in folders):
        return
    for name in folders:
        _, below, files = next(os.walk(os.path.join(root, name), onerror=raise_if_none_left), ("", [], []))
        shown = [each for each in (*below, *files) if not each.startswith(".")]
        if any(each in shown for each in below) and not any(map(_is_readable, shown)):
            sources = " and ".join(f"from_folder({os.path.join(root, each)!r})" for each in folders)
            raise ConfigError(
                f"{root} has folders of stages ({', '.join(folders)}) that hold the folders of classes; "
                f"give each stage its own source, {sources}; or rename one if these are the classes",
                "from_folder",
            )


def _is_readable(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in (*IMAGES, *NPY)


def _counted(suffixes: Counter[str]) -> str:
    return few([f"{count} {suffix}" for suffix, count in suffixes.most_common()])


def _check_no_links(folders: list[str]) -> None:
    for folder in filter(os.path.islink, folders):
        raise ConfigError(
            f"{quoted(folder)} is a link to a folder; set allow_external=True to follow it, or remove it",
            "from_folder",
            file=folder,
        )


def _files(root: str, name: str, skipped: Counter[str], *, links: bool) -> Iterator[str]:
    """Paths below a class folder, relative to the root; other files are counted by suffix, hidden ones are not."""
    seen: set[str] = set()  # visited folders: links may form a cycle
    for folder, below, files in os.walk(os.path.join(root, name), onerror=raise_if_none_left, followlinks=links):
        if os.path.realpath(folder) in seen:
            below.clear()
            continue
        seen.add(os.path.realpath(folder))
        below[:] = sorted(each for each in below if not each.startswith("."))
        if not links:
            _check_no_links([os.path.join(folder, each) for each in below])
        relative = os.path.relpath(folder, root)
        for file in sorted(each for each in files if not each.startswith(".")):
            if _is_readable(file):
                yield _utf8_path(os.path.join(relative, file))
            else:
                skipped[os.path.splitext(file)[1].lower() or "without a suffix"] += 1


def _utf8_path(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ManifestError(f"{quoted(path)}: the name is not UTF-8; rename the file", file=path) from None
    return path
