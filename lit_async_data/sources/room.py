"""`Room`: bytes that several loaders allow a source to hold."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterable


class Giver:
    """Who gives room: one loader, from when it begins to read until it is closed."""


class Room:
    """The sum of what each giver allows. Safe to read from several threads; to change inside a lock.

    A giver counts as long as somebody holds it. So room does not stay reserved where an interrupt (Ctrl-C) has kept its
    loader from noting what gives it back.

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
        """Bytes that there is room for."""
        return sum([nbytes for giver, nbytes in self._given.copy().items() if giver() is not None])

    def set(self, giver: Giver, nbytes: int) -> None:
        """Set what one giver allows; 0 takes it back."""
        others = {each: room for each, room in self._given.items() if each() not in (None, giver)}
        self._given = {**others, weakref.ref(giver): nbytes} if nbytes else others

    def __bool__(self) -> bool:
        """Whether there is any giver."""
        return any(giver() is not None for giver in self._given.copy())


def reserved(reserve: Iterable[Callable[[], Callable[[], None]]]) -> Callable[[], None]:
    """Make room in several sources.

    Args:
        reserve: Each makes room in one of them, and returns what gives that back.

    Returns:
        What gives all of it back. Where that was interrupted, it is to be called again.
    """
    made: list[Callable[[], None]] = []
    give_back = functools.partial(_give_back, made)
    try:
        made.extend(map(operator.call, reserve))  # in C: no interrupt comes between the call and the list
    except BaseException:
        give_back()
        raise
    return give_back


def _give_back(made: list[Callable[[], None]]) -> None:
    with contextlib.ExitStack() as stack:  # all of them, whatever one raises
        for each in made:
            stack.callback(each)
