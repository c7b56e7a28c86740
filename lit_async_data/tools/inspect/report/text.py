"""Draws a report for people."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lit_async_data.tools.inspect.report.report import ColumnReport, DatasetReport, Report, SuggestionReport
from lit_async_data.tools.terminal import counted, items, listed, section, sized, table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

# Colours of the ways of reading, from the fastest.
_COLOURS = {"copied": "green", "decoded": "cyan", "locked": "yellow", "python": "yellow", None: "red"}
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
    if report.columns or report.datasets:
        console.print()
        drawn = _columns(report.columns) if report.columns else _datasets(report.datasets)
        console.print(Padding(drawn, (0, 0, 0, 1), expand=False))
    section(console, "Why not a field", list(_reasons(report.columns)))
    section(console, "Why not read", list(_reasons([each for each in report.datasets if each.reading is None])))
    section(console, "Why not faster", list(_reasons([each for each in report.datasets if each.reading])))
    section(console, "Attributes", list(_attributes(report)))
    section(console, "Cannot be read", listed(list(report.unreadable.values()), "files"))
    differing = [f"{path}: {', '.join(found)}" for path, found in report.differences.items()]
    section(console, f"Unlike {os.path.basename(report.files[0]['path'])}", listed(differing, "files"))
    section(console, "Notes", report.notes)
    for suggestion in report.suggestions:
        _print_suggestion(console, suggestion)


def _title(report: Report) -> Text:
    from rich.text import Text

    files, total = report.files, sum(file["bytes"] for file in report.files)
    kind = "table" if report.kind == "table" else f"HDF5{f' of {report.writer}' if report.writer else ''}"
    parts = [kind, sized(total)]
    if report.kind == "table":
        parts.append(counted(report.rows or 0, "row"))
    else:
        parts.append(counted(len(report.datasets), "dataset"))
        parts += [f"{group['count']:,} groups {group['name']}" for group in report.groups]
    title = Text(files[0]["path"], style="bold")
    if len(files) > 1:
        title.append(f" and {counted(len(files) - 1, 'other file')}", style="bold")
    return title.append("   " + " · ".join(parts), style="not bold dim")


def _datasets(datasets: Sequence[DatasetReport]) -> Table:
    from rich.text import Text

    drawn = table("dataset", "shape", "type", "stored", "read")
    for each in datasets:
        drawn.add_row(
            Text(each.name), _shape(each), each.type, _storage(each), Text(each.how, style=_COLOURS[each.reading])
        )
    return drawn


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

    drawn = table("column", "type", "values", "missing", "field", "for example")
    for each in columns:
        drawn.add_row(
            Text(each.name),
            each.type,
            "" if each.distinct is None else f"{each.distinct:,}",
            f"{each.missing:,}" if each.missing else "",
            Text(each.kind or "none", style="green" if each.kind else "red"),
            Text(", ".join(each.examples), style="dim"),
        )
    return drawn


def _reasons(rows: Sequence[DatasetReport | ColumnReport]) -> Iterator[str]:
    """The reasons of datasets or columns; those that share one are named together."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.why:
            names.setdefault(row.why, []).append(row.name)
    for why, alike in names.items():
        yield f"{', '.join(listed(alike, ''))}: {why}"


def _attributes(report: Report) -> Iterator[str]:
    held = {"": report.attributes} | {row.name: row.attributes for row in report.datasets}
    lines = [
        f"{name or 'file'}: {', '.join(f'{key} = {_value(value)}' for key, value in attributes.items())}"
        for name, attributes in held.items()
        if attributes
    ]
    yield from listed(lines, "datasets with attributes")


def _value(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 1]}…"


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
    # In whole lines, which the terminal wraps, so that they can be copied.
    code = Syntax("", "python", theme="ansi_dark").highlight(suggestion.python)
    for line in code.split():
        console.print(Text("  ").append_text(line), soft_wrap=True)
    console.print()
    console.print(Text(f"  {suggestion.command}", style="green"), soft_wrap=True)
    if suggestion.notes:
        console.print()
        console.print(items([Text(note, style="dim") for note in suggestion.notes]))


def _ruled(title: str, width: int) -> Text:
    from rich.text import Text

    return Text.assemble(("── ", "dim"), (title, "bold"), (" " + "─" * (width - len(title) - 4), "dim"))


def _indented(text: Text) -> Padding:
    from rich.padding import Padding

    return Padding(text, (0, 0, 0, 2), expand=False)
