"""`pack_arguments`: what to type behind ``python -m lit_async_data pack`` for the samples of a source."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping

from lit_async_data.sources.contract.source import Source


@functools.singledispatch
def pack_arguments(source: Source) -> list[str]:  # noqa: ARG001  # of any source
    """The input and its options; empty where no command line can name them. Kinds of sources register their own.

    Selected rows, windows and strides are left out: the packed file holds all rows, and they are given again.
    """
    return []


def option(name: str, value: object) -> list[str]:
    """An option as words; none if it is not given.

    Example:
        >>> option("layout", {"x": "NHWC"}), option("image_size", (32, 48)), option("group", None)
        (['--layout', 'x=NHWC'], ['--image-size', '32', '48'], [])
    """
    if value is None or value == {}:
        return []
    if isinstance(value, Mapping):
        words = [f"{key}={each}" for key, each in value.items()]
    elif isinstance(value, Iterable) and not isinstance(value, str):
        words = [str(each) for each in value]
    else:
        words = [str(value)]
    return [f"--{name.replace('_', '-')}", *words]


def shown_path(path: str | os.PathLike[str]) -> str:
    """An absolute path, or the one from the working folder if that does not lead out of it."""
    absolute = os.path.abspath(os.path.expanduser(path))
    try:
        relative = os.path.relpath(absolute)
    except ValueError:  # another drive of Windows
        return absolute
    return absolute if relative.startswith(os.pardir) else relative
