"""`class_folders`: a tree of folders, one for each class, as a table."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from lit_async_data.errors import ConfigError, ManifestError, MissingError
from lit_async_data.sources.descriptors import raise_if_none_left
from lit_async_data.sources.manifest.paths import IMAGES, NPY
from lit_async_data.sources.manifest.table.arrow import arrow
from lit_async_data.sources.manifest.table.reading import FolderTable
from lit_async_data.sources.manifest.table.row_origin import shown

# Columns of the table.
PATH, LABEL = "path", "label"
# What folders are called that hold the classes of a stage, each of them all classes.
_STAGES = ("train", "training", "trn", "val", "valid", "validation", "dev", "test", "testing", "eval", "evaluation")
# Kinds of files that a message lists.
_LISTED = 5

_log = logging.getLogger(__name__)


def class_folders(root: str, *, links: bool = False) -> FolderTable:
    """The images and ``.npy`` files below a folder; the class of each is the folder of the first level that it is in.

    Args:
        root: A folder that holds a folder for each class; these may hold folders too.
        links: Whether to go into folders that are links.

    Returns:
        A table of ``path``, relative to ``root``, and ``label``, the names of classes. Classes in the order of their
        names, and the files of each in the order of theirs; hidden ones are left out, and those of other kinds, which
        a warning counts.

    Raises:
        ConfigError: It is no folder, holds none, or one that is a link is not to be gone into; or its folders are those
            of stages, not of classes.
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
    _check_no_stages(root, classes)
    library = arrow()
    chunks, counts, others = [], [], Counter[str]()
    for name in classes:
        # Text of one class at a time: no more of it is held as objects.
        before = others.copy()
        found = library.array(list(_files(root, name, others, links=links)), library.large_string())
        if not len(found):
            rest = others - before
            what = f", but {_counted(rest)}; convert those" if rest else "; put some there"
            raise MissingError(
                f"from_folder: {os.path.join(root, name)} has no images or .npy files in it{what}, or move the folder "
                "away if it is no class",
                file=os.path.join(root, name),
            )
        chunks.append(found)
        counts.append(len(found))
    if others:
        _log.warning("from_folder: %s: left out what is no image or .npy file: %s", root, _counted(others))
    names = library.array(classes, library.large_string())
    labels = [
        library.DictionaryArray.from_arrays(np.full(count, code, np.int32), names) for code, count in enumerate(counts)
    ]
    return FolderTable(root, library.table({PATH: library.chunked_array(chunks), LABEL: library.chunked_array(labels)}))


def _check_no_stages(root: str, folders: list[str]) -> None:
    """Refuse folders such as ``train`` and ``val`` that hold the folders of classes; ``test`` often holds files."""
    stages = all(name.lower() in _STAGES for name in folders)
    if not stages or not any(_holds_folders_only(os.path.join(root, name)) for name in folders):
        return
    sources = " and ".join(f"from_folder({os.path.join(root, name)!r})" for name in folders)
    raise ConfigError(
        f"from_folder: {root} is divided into stages ({', '.join(folders)}), with the folders of classes in "
        f"them; give each stage a source of its own, {sources}; or, if these are the classes, rename one"
    )


def _holds_folders_only(folder: str) -> bool:
    entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    return any(entry.is_dir() for entry in entries) and not any(_is_wanted(entry.name) for entry in entries)


def _is_wanted(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in (*IMAGES, *NPY)


def _counted(suffixes: Counter[str]) -> str:
    listed = [f"{count} {suffix}" for suffix, count in suffixes.most_common(_LISTED)]
    return ", ".join(listed) + (", …" if len(suffixes) > _LISTED else "")


def _check_no_links(folders: Iterable[str]) -> None:
    for folder in folders:
        if os.path.islink(folder):
            raise ConfigError(
                f"from_folder: {shown(folder)} is a link to a folder; write allow_outside_root=True to "
                "follow it, or remove it",
                file=folder,
            )


def _files(root: str, name: str, others: Counter[str], *, links: bool) -> Iterator[str]:
    """Paths below a class's folder, relative to the root; other files are counted by how they end."""
    seen: set[tuple[int, int]] = set()  # folders: links may lead back to where they are
    for folder, below, files in os.walk(os.path.join(root, name), onerror=raise_if_none_left, followlinks=links):
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
            if file.startswith("."):
                continue
            if _is_wanted(file):
                yield _text(os.path.join(inside, file))
            else:
                others[os.path.splitext(file)[1].lower() or "without a suffix"] += 1


def _text(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ManifestError(f"{shown(path)}: a name that is not UTF-8; rename the file", file=path) from None
    return path
