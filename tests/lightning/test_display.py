"""Lines are printed above a progress bar, not into it."""

import io
import logging
import re
import sys

import pytest
from tqdm import tqdm

from lit_async_data.lightning.compat import pl
from lit_async_data.lightning.display import print_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Where Lightning logs to."""
    shown, logger = Terminal(), logging.getLogger(pl.__name__)
    handler = logging.StreamHandler(shown)
    monkeypatch.setattr(logger, "handlers", [handler])
    yield shown
    assert handler.stream is shown


def shown_alone(text, line):
    """Whether a line begins a row of the terminal, and ends one."""
    return re.search(rf"(\A|\n|\r|\x1b\[2K){line}\s*\n", text) is not None


def test_without_a_bar_a_line_is_what_lightning_logs(terminal):
    print_line("epoch 0: fine")
    assert terminal.getvalue() == "epoch 0: fine\n"


def test_a_line_stands_above_a_bar_of_tqdm(terminal, monkeypatch):
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # no thread
    with tqdm(total=3, file=terminal, mininterval=0) as bar:
        bar.update()
        print_line("epoch 0: fine")
    assert shown_alone(terminal.getvalue(), "epoch 0: fine")


def test_a_line_stands_above_a_bar_of_rich_and_none_of_it_is_overwritten(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal)
    rich = pytest.importorskip("rich.console")
    progress = pytest.importorskip("rich.progress")
    console = rich.Console(file=terminal, force_terminal=True, width=40)
    long = "epoch 0: " + "and so on " * 8
    with progress.Progress(console=console, auto_refresh=False) as bar:
        bar.add_task("training", total=3)
        bar.refresh()
        print_line(long)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    rows = [row.rpartition("\r")[2].rstrip() for row in plain.split("\n")]
    first = rows.index("epoch 0: and so on and so on and so on")
    assert " ".join(rows[first : first + 3]).split()[:26] == long.split()
    assert "training" in rows[first + 3]  # rich draws the bar again below


def test_a_quiet_logger_says_nothing(terminal):
    logger = logging.getLogger("lit_async_data")
    before = logger.level
    logger.setLevel("WARNING")
    try:
        print_line("epoch 0: fine")
    finally:
        logger.setLevel(before)
    assert terminal.getvalue() == ""
