"""`Room`: bytes that several loaders reserve in one source."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterable


class Giver:
    """Identifies one loader from its first read until it is closed."""


class Room:
    """The sum of the reservations of all givers. Thread-safe to read; change it under a lock.

    A giver counts as long as somebody refers to it. A reservation therefore ends even if an interrupt (Ctrl-C)
    prevented its loader from storing the function that releases it.

    Example:
        >>> room, giver = Room(), Giver()
        >>> room.set(giver, 100)
        >>> room.nbytes
        100
        >>> del giver
        >>> room.nbytes
        0
    """

    def __init__(self) -> None:
        self._given: dict[weakref.ref[Giver], int] = {}

    @property
    def nbytes(self) -> int:
        """Reserved bytes."""
        return sum([nbytes for giver, nbytes in self._given.copy().items() if giver() is not None])

    def set(self, giver: Giver, nbytes: int) -> None:
        """Set the reservation of one giver; 0 ends it."""
        others = {each: room for each, room in self._given.items() if each() not in (None, giver)}
        self._given = {**others, weakref.ref(giver): nbytes} if nbytes else others

    def __bool__(self) -> bool:
        """Whether there is any giver."""
        return any(giver() is not None for giver in self._given.copy())


def reserved(reserve: Iterable[Callable[[], Callable[[], None]]]) -> Callable[[], None]:
    """Reserve memory in several sources.

    Args:
        reserve: Functions that each reserve in one source and return a function that releases it.

    Returns:
        A function that releases all. If an interrupt ends it early, call it again.
    """
    releases: list[Callable[[], None]] = []
    release = functools.partial(_release_all, releases)
    try:
        releases.extend(map(operator.call, reserve))  # in C: no interrupt between the call and the append
    except BaseException:
        release()
        raise
    return release


def _release_all(releases: list[Callable[[], None]]) -> None:
    with contextlib.ExitStack() as stack:  # calls all, even if one raises
        for each in releases:
            stack.callback(each)
