"""`Shown`: how an object shows itself in a console, a log and a notebook."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Sheet:
    """What an object shows of itself.

    Attributes:
        line: One line: its `repr`.
        rows: The table in a notebook: a name for each row, and its text, of one line or several.
    """

    line: str
    rows: Mapping[str, str | Sequence[str]]


class Shown:
    """An object whose `repr` and whose table in notebooks come from one method, ``_sheet``.

    ``_sheet`` opens no file, reads no data and plans no memory. Showing never raises: debuggers show objects that are
    not built yet.

    Example:
        >>> class Owl(Shown):
        ...     def _sheet(self): return Sheet("Owl('<b>')", {"name": "<b>"})
        >>> Owl()
        Owl('<b>')
        >>> Owl()._repr_html_()
        '<table><caption>Owl</caption><tr><th>name</th><td>&lt;b&gt;</td></tr></table>'
    """

    def _sheet(self) -> Sheet:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self._shown().line

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{_lines(text)}</td></tr>" for name, text in self._shown().rows.items()
        )
        return f"<table><caption>{html.escape(type(self).__name__)}</caption>{rows}</table>"

    def _shown(self) -> Sheet:
        try:
            return self._sheet()
        except Exception as error:  # noqa: BLE001  # also the user's code, in a source or a loader
            why = f"{type(error).__name__}: {error}"
            return Sheet(f"<{type(self).__name__}, which cannot be shown: {why}>", {"cannot be shown": why})


def rows_of(shown: Shown) -> Mapping[str, str | Sequence[str]]:
    """Returns the rows of an object's table, for the table of an object that uses it."""
    return shown._shown().rows  # noqa: SLF001


def listed(names: Sequence[str], most: int = 5) -> str:
    """Returns the first names, and how many more there are.

    Example:
        >>> listed(["auk", "owl", "tit"], most=2)
        'auk, owl and 1 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _lines(text: str | Sequence[str]) -> str:
    return "<br>".join(map(html.escape, [text] if isinstance(text, str) else text))
