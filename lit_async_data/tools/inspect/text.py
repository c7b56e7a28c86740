"""Draws a report for people."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lit_async_data.tools.folding import folded_command, folded_python
from lit_async_data.tools.inspect.report import ColumnReport, DatasetReport, Report, SuggestionReport
from lit_async_data.tools.terminal import sized

if TYPE_CHECKING:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

# Colours of the ways of reading, from the fastest.
_COLOURS = {"copied": "green", "decoded": "cyan", "locked": "yellow", "python": "yellow", None: "red"}
# Attributes and differing files that are shown; the others are counted.
MOST_SHOWN = 12
_VALUE_CHARACTERS = 60
# Width of the lines over suggestions, also where the output is wider.
RULE_COLUMNS = 100


def print_report(report: Report, console: Console) -> None:
    """Print a report.

    Args:
        report: What was found.
        console: Where to.
    """
    from rich.padding import Padding

    console.print(_title(report))
    console.print()
    table = _columns(report.columns) if report.kind == "table" else _datasets(report.datasets)
    console.print(Padding(table, (0, 0, 0, 1), expand=False))
    _section(console, "Why not a field" if report.kind == "table" else "Why not faster", list(_reasons(report)))
    _section(console, "Attributes", list(_attributes(report)))
    _section(console, "Cannot be read", _listed(list(report.unreadable.values()), "files"))
    differing = [f"{path}: {', '.join(found)}" for path, found in report.differences.items()]
    _section(console, f"Unlike {os.path.basename(report.files[0]['path'])}", _listed(differing, "files"))
    _section(console, "Notes", report.notes)
    for suggestion in report.suggestions:
        _print_suggestion(console, suggestion)


def _title(report: Report) -> Text:
    from rich.text import Text

    files, total = report.files, sum(file["bytes"] for file in report.files)
    kind = "table" if report.kind == "table" else f"HDF5{f' of {report.writer}' if report.writer else ''}"
    said = [kind, sized(total)]
    if report.kind == "table":
        said.append(_counted(report.rows or 0, "row"))
    else:
        said.append(_counted(len(report.datasets), "dataset"))
        said += [f"{group['count']:,} groups {group['name']}" for group in report.groups]
    title = Text(files[0]["path"], style="bold")
    if len(files) > 1:
        title.append(f" and {_counted(len(files) - 1, 'other file')}", style="bold")
    return title.append("   " + " · ".join(said), style="not bold dim")


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _listed(lines: Sequence[str], what: str) -> list[str]:
    more = len(lines) - MOST_SHOWN
    return list(lines) if more <= 1 else [*lines[:MOST_SHOWN], f"and {more:,} more {what}".rstrip()]


def _table(*headers: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim", show_edge=False)
    for place, header in enumerate(headers):
        table.add_column(
            header, overflow="fold", ratio=None, no_wrap=False, min_width=4, style="bold" if place == 0 else ""
        )
    return table


def _datasets(datasets: Sequence[DatasetReport]) -> Table:
    from rich.text import Text

    table = _table("dataset", "shape", "type", "stored", "read")
    for each in datasets:
        table.add_row(
            Text(each.name), _shape(each), each.type, _storage(each), Text(each.how, style=_COLOURS[each.reading])
        )
    return table


def _shape(dataset: DatasetReport) -> str:
    if dataset.shape is None:
        return ""
    if not dataset.shape:
        return "one value"
    first = f"{dataset.shape[0]:,}"
    if dataset.rows and dataset.rows[0] < dataset.rows[1]:
        first = f"{dataset.rows[0]:,}–{dataset.rows[1]:,}"
    return "×".join([first, *map(str, dataset.shape[1:])])


def _storage(dataset: DatasetReport) -> str:
    if dataset.shape is None:
        return ""
    words = [sized(dataset.bytes)]
    if dataset.filters:
        words.append(", ".join(dataset.filters))
        if dataset.stored_bytes and dataset.bytes > 1.05 * dataset.stored_bytes:
            words[0] = f"{sized(dataset.stored_bytes)} of {words[0]}"
    if dataset.chunks:
        words.append("chunks of " + "×".join(map(str, dataset.chunks)))
    return ", ".join(words)


def _columns(columns: Sequence[ColumnReport]) -> Table:
    from rich.text import Text

    table = _table("column", "type", "values", "missing", "field", "for example")
    for each in columns:
        table.add_row(
            Text(each.name),
            each.type,
            "" if each.distinct is None else f"{each.distinct:,}",
            f"{each.missing:,}" if each.missing else "",
            Text(each.kind or "none", style="green" if each.kind else "red"),
            Text(", ".join(each.examples), style="dim"),
        )
    return table


def _reasons(report: Report) -> Iterator[str]:
    """Why things are not faster: datasets with one reason together."""
    rows: list[DatasetReport | ColumnReport] = [*report.datasets, *report.columns]
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.why:
            names.setdefault(row.why, []).append(row.name)
    for why, alike in names.items():
        yield f"{', '.join(_listed(alike, ''))}: {why}"


def _attributes(report: Report) -> Iterator[str]:
    held = {"": report.attributes} | {row.name: row.attributes for row in report.datasets}
    lines = [
        f"{name or 'file'}: {', '.join(f'{key} = {_value(value)}' for key, value in attributes.items())}"
        for name, attributes in held.items()
        if attributes
    ]
    yield from _listed(lines, "datasets with attributes")


def _value(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 1]}…"


def _section(console: Console, title: str, lines: Sequence[str]) -> None:
    from rich.text import Text

    if not lines:
        return
    console.print()
    console.print(Text(title, style="bold"))
    texts = []
    for line in lines:
        name, colon, rest = line.partition(": ")
        texts.append(Text.assemble((name, "cyan"), colon, rest) if colon and len(name) < 80 else Text(line))
    console.print(_items(texts))


def _items(texts: Sequence[Text]) -> Table:
    """One below the other; lines that go on are indented."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=2, justify="right")
    grid.add_column(overflow="fold")
    for text in texts:
        grid.add_row("·", text)
    return grid


def _print_suggestion(console: Console, suggestion: SuggestionReport) -> None:
    from rich.syntax import Syntax
    from rich.text import Text

    samples = ", ".join(
        f"{number:,}{'' if stage == 'all' else f' {stage}'}" for stage, number in suggestion.samples.items()
    )
    batch = ", ".join(
        f"{key} {each['dtype']} ({', '.join(map(str, ['N', *each['shape']]))})"
        for key, each in suggestion.batch.items()
    )
    console.print()
    console.print(_ruled(suggestion.title[:1].upper() + suggestion.title[1:], min(console.width, RULE_COLUMNS)))
    console.print(_indented(Text(f"{samples} samples · {batch} · {suggestion.reading}", style="dim")))
    console.print()
    # Broken where Python and the shell allow it, so that they can be copied.
    code = Syntax("", "python", theme="ansi_dark").highlight(folded_python(suggestion.python, console.width - 2))
    for line in code.split():
        console.print(Text("  ").append_text(line), soft_wrap=True)
    console.print()
    for command in folded_command(suggestion.command, console.width - 2):
        console.print(Text(f"  {command}", style="green"), soft_wrap=True)
    if suggestion.notes:
        console.print()
        console.print(_items([Text(note, style="dim") for note in suggestion.notes]))


def _ruled(title: str, width: int) -> Text:
    from rich.text import Text

    return Text.assemble(("── ", "dim"), (title, "bold"), (" " + "─" * (width - len(title) - 4), "dim"))


def _indented(text: Text) -> Padding:
    from rich.padding import Padding

    return Padding(text, (0, 0, 0, 2), expand=False)
