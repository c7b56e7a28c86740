"""Draws a report for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lit_async_data.tools.inspect.contents import Dataset
from lit_async_data.tools.inspect.report import ColumnReport, Report, SuggestionReport
from lit_async_data.tools.terminal import counted, items, listed, section, sized, table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Colours of the ways of reading, from the fastest.
_COLOURS = {"copied": "green", "decoded": "cyan", "locked": "yellow", "python": "yellow", None: "red"}
# Width of the lines over suggestions, also where the output is wider.
RULE_COLUMNS = 100


def print_report(report: Report, console: Console) -> None:
    """Print a report, without the blanks by which rich fills lines."""
    with console.capture() as captured:
        _print(report, console)
    console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _print(report: Report, console: Console) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console.print(_title(report))
    drawn = table("column", "type", "values", "missing", "field", "for example")
    for column in report.columns:
        kind = Text(column.kind or "none", style="green" if column.kind else "red")
        counts = ["" if not n else f"{n:,}" for n in (column.distinct, column.missing)]
        drawn.add_row(Text(column.name), column.type, *counts, kind, Text(", ".join(column.examples), style="dim"))
    if report.datasets:
        drawn = table("dataset", "shape", "type", "stored", "read")
    for each in report.datasets:
        drawn.add_row(
            Text(each.name), _shape(each), each.type, _storage(each), Text(each.how, style=_COLOURS[each.reading])
        )
    if report.columns or report.datasets:
        console.print()
        console.print(Padding(drawn, (0, 0, 0, 1), expand=False))
    section(console, "Why not a field", _reasons(report.columns))
    section(console, "Why not read", _reasons([each for each in report.datasets if each.reading is None]))
    section(console, "Why not faster", _reasons([each for each in report.datasets if each.reading]))
    section(console, "Cannot be read", listed(list(report.unreadable.values()), "files"))
    section(console, "Notes", report.notes)
    for suggestion in report.suggestions:
        _print_suggestion(console, suggestion)


def _title(report: Report) -> Text:
    from rich.text import Text

    kind = "table" if report.kind == "table" else f"HDF5{f' of {report.writer}' if report.writer else ''}"
    number = counted(len(report.datasets), "dataset") if report.rows is None else counted(report.rows, "row")
    parts = [kind, sized(sum(file["bytes"] for file in report.files)), number]
    parts += [f"{group['count']:,} groups {group['name']}" for group in report.groups]
    more = f" and {counted(len(report.files) - 1, 'other file')}" if len(report.files) > 1 else ""
    title = Text(report.files[0]["path"] + more, style="bold")
    return title.append("   " + " · ".join(parts), style="not bold dim")


def _shape(dataset: Dataset) -> str:
    if dataset.rows is None:
        return "one value" if dataset.bytes else ""
    least, most = dataset.rows
    first = f"{least:,}" if least == most else f"{least:,}–{most:,}"
    return "×".join([first, *map(str, dataset.shape[1:])])


def _storage(dataset: Dataset) -> str:
    size, stored = sized(dataset.bytes), dataset.stored_bytes
    if dataset.filters and stored and dataset.bytes > 1.05 * stored:
        size = f"{sized(stored)} of {size}"
    chunks = [f"chunks of {'×'.join(map(str, dataset.chunks))}"] if dataset.chunks else []
    return ", ".join([size, *dataset.filters, *chunks]) if dataset.bytes else ""


def _reasons(rows: Sequence[Dataset | ColumnReport]) -> list[str]:
    """The reasons of datasets or columns; those that share one are named together."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.why:
            names.setdefault(row.why, []).append(row.name)
    return [f"{', '.join(listed(alike, ''))}: {why}" for why, alike in names.items()]


def _print_suggestion(console: Console, suggestion: SuggestionReport) -> None:
    from rich.syntax import Syntax
    from rich.text import Text

    title, width = suggestion.title[:1].upper() + suggestion.title[1:], min(console.width, RULE_COLUMNS)
    samples = ", ".join(f"{n:,}{'' if stage == 'all' else f' {stage}'}" for stage, n in suggestion.samples.items())
    batch = ", ".join(
        f"{key} {each['dtype']} ({', '.join(map(str, ['N', *each['shape']]))})"
        for key, each in suggestion.batch.items()
    )
    console.print()
    console.print(Text.assemble(("── ", "dim"), (title, "bold"), (" " + "─" * (width - len(title) - 4), "dim")))
    console.print(Text(f"  {samples} samples · {batch} · {suggestion.reading}", style="dim"))
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
