"""Draws a report for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lit_async_data.sources.contract.storage_layout import HOW_READ
from lit_async_data.tools.doctor.advice import Trial
from lit_async_data.tools.doctor.rates import Rate
from lit_async_data.tools.terminal import counted, section, sized, table

if TYPE_CHECKING:
    from rich.console import Console


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print a report."""
    from rich.syntax import Syntax
    from rich.text import Text

    batch = ", ".join(
        f"{key} {each['dtype']} ({', '.join(map(str, ['N', *each['shape']]))})" for key, each in report["batch"].items()
    )
    how = f"{HOW_READ[report['reading']]} · {counted(report['cores'], 'core')}"
    facts = f"{counted(report['samples'], 'sample')} · {batch} · {how}"
    console.print(Text.assemble((report["source"], "bold"), (f"   {facts}", "dim")))
    console.print()
    drawn = table("shuffle", "workers", "samples/s", "decoded per sample", "mixing", "memory", "")
    for number, trial in enumerate(report["trials"]):
        chosen = number == report["chosen"]
        drawn.add_row(
            Text(f"chunk, {trial.shuffle_chunks}" if trial.shuffle == "chunk" else trial.shuffle),
            f"{trial.workers} ({trial.worker_kind})" if trial.workers else "the loop reads",
            _rounded(trial.samples_per_s),
            f"{trial.amplification:.1f}",
            _mixing(trial),
            sized(trial.memory),
            Text("use this" if chosen else "", style="green"),
            style="bold" if chosen else "",
        )
    console.print(drawn)
    cold = f"not measured: {report['why_not_cold']}" if report["cold"] is None else _rate(report["cold"])
    section(console, "Rates of this setting", [f"from memory: {_rate(report['warm'])}", f"from the disk: {cold}"])
    console.print()
    console.print(Text("Use", style="bold"))
    for line in Syntax("", "python", theme="ansi_dark").highlight(report["python"]).split():
        console.print(Text("    ").append_text(line), soft_wrap=True)
    if report["command"]:
        console.print()
        console.print(Text(f"    {report['command']} {report['override']}".rstrip(), style="green"), soft_wrap=True)
    if report["why_pack"]:
        section(console, "Pack", [report["why_pack"]])
        console.print(Text(f"    {report['pack']}", style="green"), soft_wrap=True)


def _mixing(trial: Trial) -> str:
    if trial.shuffle == "none":
        return "none"
    labels = ", ".join(f"{name} {share:.2f}" for name, share in trial.labels.items())
    return f"{trial.mixing:.2f}{f' ({labels})' if labels else ''}"


def _rate(rate: Rate) -> str:
    words = f"{_rounded(rate.samples_per_s)} samples/s"
    if not rate.read_mb_per_s:
        return f"{words}; nothing is read any more: readers copy from decoded chunks, which are kept"
    words += f"; each reader {_rounded(rate.read_mb_per_s)} MB/s while reading"
    if not rate.decode_mb_per_s:
        return words
    decoding = f"{_rounded(rate.decode_mb_per_s)} MB/s while decoding"
    return f"{words}, {decoding}, which takes {100 * rate.decoding:.0f} % of its time"


def _rounded(number: float) -> str:
    """Three digits: measurements are no better."""
    return f"{float(f'{number:.3g}'):,g}" if number < 100 else f"{int(float(f'{number:.3g}')):,}"
