"""`Reservations`: bytes that several loaders reserve in one source."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable


class Owner:
    """Identifies one loader from its first read until it is closed."""


class Reservations:
    """The sum of the reservations of all owners. Thread-safe to read; change it under a lock.

    An owner counts as long as somebody refers to it. A reservation therefore ends even if an interrupt (Ctrl-C)
    prevented its loader from storing the function that releases it.

    Example:
        >>> reservations, owner = Reservations(), Owner()
        >>> reservations.set(owner, 100)
        >>> reservations.nbytes
        100
        >>> del owner
        >>> reservations.nbytes
        0
    """

    def __init__(self) -> None:
        self._by_owner: dict[weakref.ref[Owner], int] = {}

    @property
    def nbytes(self) -> int:
        """Reserved bytes."""
        reserved = 0
        for owner, nbytes in self._by_owner.copy().items():  # no comprehension: this is called often
            if owner() is not None:
                reserved += nbytes
        return reserved

    def set(self, owner: Owner, nbytes: int) -> None:
        """Set the reservation of one owner; 0 ends it."""
        others = {
            each: reserved_bytes for each, reserved_bytes in self._by_owner.items() if each() not in (None, owner)
        }
        self._by_owner = {**others, weakref.ref(owner): nbytes} if nbytes else others

    def __bool__(self) -> bool:
        """Whether there is any owner."""
        return any(owner() is not None for owner in self._by_owner.copy())


def reserved(reserve: Iterable[Callable[[], Callable[[], None]]]) -> Callable[[], None]:
    """Reserve memory in several sources.

    Args:
        reserve: Functions that each reserve in one source and return a function that releases it.

    Returns:
        A function that releases all.
    """
    releases: list[Callable[[], None]] = []
    release = functools.partial(_release_all, releases)
    try:
        releases.extend(each() for each in reserve)
    except BaseException:
        release()
        raise
    return release


def _release_all(releases: list[Callable[[], None]]) -> None:
    with contextlib.ExitStack() as stack:  # calls all, even if one raises
        for each in releases:
            stack.callback(each)
