"""Patterns of paths: which files they match, for sources and tools alike."""

from __future__ import annotations

import glob
import os
import re

from lit_async_data.errors import MissingError
from lit_async_data.sources.local_files.descriptors import check_listable


def is_pattern(path: str) -> bool:
    """Whether a path has wildcards; a file of that very name is none."""
    return glob.has_magic(path) and not os.path.exists(path)


def natural(path: str) -> list[tuple[bool, int, str]]:
    """Sorts scan2 before scan10."""
    return [(piece.isdecimal(), int(piece) if piece.isdecimal() else 0, piece) for piece in re.split(r"(\d+)", path)]


def files_matching(pattern: str) -> list[str]:
    """The files that a pattern matches, in natural order: no folders, and ``**`` stands for any number of folders.

    Names that begin with a dot match only a pattern that writes the dot.
    """
    check_listable(pattern)
    found = set(glob.glob(pattern, recursive=True))
    files = sorted((path for path in found if not os.path.isdir(path)), key=natural)
    if not files:
        what = f"matches folders only; for the files in them write {pattern}/*" if found else "matches no file"
        raise MissingError(f"{pattern}: {what}; check the pattern", file=pattern)
    return files


def folder_of(pattern: str) -> str:
    """The folder in front of the first wildcard."""
    while glob.has_magic(pattern):
        pattern = os.path.dirname(pattern)
    return pattern
