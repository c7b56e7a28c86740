"""Draws a report for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lit_async_data.sources.contract.storage_layout import HOW_READ, Reading
from lit_async_data.tools.doctor.report import DoctorReport, Trial
from lit_async_data.tools.terminal import PIPE_COLUMNS, counted, items, listed, section, sized, table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


# Columns of a compact table whose cells wrap between words, and a text that sets the least width of each.
_WRAPPED = {"decoded per sample": "", "mixing": "(y 1.00)", "": ""}


def print_report(report: DoctorReport, console: Console) -> None:
    """Print a report.

    Args:
        report: What was measured.
        console: Where to.
    """
    from rich.padding import Padding
    from rich.text import Text

    batch = ", ".join(
        f"{key} {each['dtype']} ({', '.join(map(str, ['N', *each['shape']]))})" for key, each in report.batch.items()
    )
    reading: Reading = report.reading  # type: ignore[assignment]
    facts = f"{counted(report.samples, 'sample')} · {batch} · {HOW_READ[reading]} · {counted(report.cores, 'core')}"
    console.print(Text.assemble((report.source, "bold"), (f"   {facts}", "dim")))
    console.print()
    tables = (_trials(report), _trials(report, compact=True))
    fitting = next((each for each in tables if _width(each, console) < console.width), None)
    console.print(Padding(fitting, (0, 0, 0, 1), expand=False) if fitting else items(list(_lines(report))))
    section(console, "Prediction", list(_prediction(report)))
    section(console, "Where the readers' time goes", list(_stages(report)))
    section(console, "Risks", listed(report.risks, "risks"))
    section(console, "Notes", report.notes)
    _print_use(report, console)
    if report.why_pack:
        section(console, "Pack", [report.why_pack])
        console.print(Text(f"    {report.pack}", style="green"), soft_wrap=True)


def _trials(report: DoctorReport, *, compact: bool = False) -> Table:
    """The settings, each on one line; if compact, long cells take several, and columns are closer."""
    from rich.text import Text

    drawn = table("shuffle", "workers", "samples/s", "steps/s", "decoded per sample", "mixing", "memory", "")
    for number, trial in enumerate(report.trials):
        chosen = number == report.chosen
        drawn.add_row(
            Text(_shuffle(trial), style="bold" if chosen else "not bold"),
            _workers(trial),
            rounded(trial.samples_per_s),
            rounded(trial.samples_per_s / report.step_samples),
            f"{trial.amplification:.1f}",
            _mixing(trial).replace(" (", "\n(") if compact else _mixing(trial),
            sized(trial.memory),
            Text("use this" if chosen else "", style="green"),
        )
    for column in drawn.columns:
        column.no_wrap = not compact or column.header not in _WRAPPED
        if not column.no_wrap:
            words = " ".join(map(str, [column.header, *column.cells])).split()
            column.width = max(len(word) for word in [*words, _WRAPPED[str(column.header)]])
    if compact:
        drawn.padding = (0, 1, 0, 0)
    return drawn


def _width(drawn: Table, console: Console) -> int:
    """Columns of a table that has all the room it wants."""
    return console.measure(drawn, options=console.options.update(max_width=PIPE_COLUMNS)).maximum


def _lines(report: DoctorReport) -> Iterator[Text]:
    from rich.text import Text

    for number, trial in enumerate(report.trials):
        chosen = number == report.chosen
        rates = (
            f"{rounded(trial.samples_per_s)} samples/s, {rounded(trial.samples_per_s / report.step_samples)} steps/s"
        )
        yield Text.assemble(
            (f"{_shuffle(trial)}; workers: {_workers(trial)}", "bold" if chosen else ""),
            f": {rates}; decoded per sample {trial.amplification:.1f}; mixing {_mixing(trial)}; {sized(trial.memory)}",
            ("; use this" if chosen else "", "green"),
        )


def _workers(trial: Trial) -> str:
    return f"{trial.workers} ({trial.worker_kind})" if trial.workers else "the loop reads"


def _shuffle(trial: Trial) -> str:
    return f"chunk, {trial.shuffle_chunks}" if trial.shuffle == "chunk" else trial.shuffle


def _mixing(trial: Trial) -> str:
    if trial.shuffle == "none":
        return "none"
    labels = ", ".join(f"{name} {share:.2f}" for name, share in trial.labels.items())
    return f"{trial.mixing:.2f}{f' ({labels})' if labels else ''}"


def _prediction(report: DoctorReport) -> Iterator[str]:
    step_ms = 1e3 / max(report.steps_per_s, 1e-9)
    yield (
        f"{rounded(report.samples_per_s)} samples/s, at most {rounded(report.steps_per_s)} steps/s of "
        f"{report.step_samples:,}: a step shorter than {rounded(step_ms)} ms waits for data, and so does one that "
        "takes the readers' cores"
    )
    warm, cold = report.warm.samples_per_s, report.cold
    if not report.bytes:
        return
    has = f"{counted(report.files, 'file')}, {sized(report.bytes)}"
    memory = f"{sized(report.free_memory)} of memory that the page cache may take"
    if report.fits:
        first = "" if cold is None else f", the first at {rounded(cold.samples_per_s)} samples/s from the disk"
        fit = "fits" if report.files == 1 else "fit"
        yield f"{has}, {fit} into the {memory}: every epoch but the first is read from there{first}"
    else:
        fit = "does not fit" if report.files == 1 else "do not fit"
        yield f"{has}, {fit} into the {memory}: every epoch is read from the disk"
        if cold is not None:
            yield f"from memory it would be {rounded(warm)} samples/s"
    if cold is None:
        yield f"from the disk: not measured: {report.why_not_cold}"


def _stages(report: DoctorReport) -> Iterator[str]:
    for where, reading in (("from the page cache", report.warm), ("from the disk", report.cold)):
        if reading is None:
            continue
        if not reading.read_mb_per_s:
            yield f"{where}: nothing is read any more; readers copy from decoded chunks, which are kept"
            continue
        words = [f"{rounded(reading.read_mb_per_s)} MB/s while reading"]
        if reading.decode_mb_per_s:
            share = f"{100 * reading.decoding:.0f} % of its time"
            words.append(f"{rounded(reading.decode_mb_per_s)} MB/s while decoding, which takes {share}")
        yield f"{where}: each reader {', '.join(words)}"


def _print_use(report: DoctorReport, console: Console) -> None:
    from rich.syntax import Syntax
    from rich.text import Text

    console.print()
    console.print(Text("Use", style="bold"))
    if report.python:
        code = Syntax("", "python", theme="ansi_dark").highlight(report.python)
        for line in code.split():
            console.print(Text("    ").append_text(line), soft_wrap=True)
        if not report.command:
            return
        console.print()
    if not report.override:
        console.print(Text("    the options as they are", style="green"))
        return
    if not report.command:
        console.print(Text("    on the command line of your program:"))
    console.print(Text(f"    {f'{report.command} {report.override}'.strip()}", style="green"), soft_wrap=True)


def rounded(number: float) -> str:
    """Three digits of a number: measurements are no better.

    Example:
        >>> rounded(58_929.4), rounded(3.14159), rounded(0.02)
        ('58,900', '3.14', '0.02')
    """
    return f"{float(f'{number:.3g}'):,g}" if number < 100 else f"{int(float(f'{number:.3g}')):,}"
