"""Lines are printed above a progress bar, not into it; it shows how full the queues are."""

import io
import logging
import pathlib
import re
import sys

import pytest
from support.lightning.trainer import (
    NO_STAGES,
    STORED,
    CountingSource,
    Recorder,
    Watching,
    datamodule,
    on_device,
    pl,
    trainer,
)
from tqdm import tqdm

import lit_async_data as lad
from lit_async_data.lightning.compat import rank_zero_only
from lit_async_data.lightning.display import print_line

pytestmark = NO_STAGES


class Terminal(io.StringIO):
    def isatty(self):
        return True


OURS = logging.getLogger("lit_async_data")


@pytest.fixture
def terminal(monkeypatch):
    """Where this package logs to."""
    shown = Terminal()
    handler = logging.StreamHandler(shown)
    monkeypatch.setattr(OURS, "handlers", [handler])
    yield shown
    assert handler.stream is shown


def unconfigured(monkeypatch):
    """As in a program that has set up no logging: without the handlers that pytest sets up for each test."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])


def shown_alone(text, line):
    """Whether a line begins a row of the terminal, and ends one."""
    return re.search(rf"(\A|\n|\r|\x1b\[2K){line}\s*\n", text) is not None


def test_without_a_bar_a_line_is_all_that_is_written(terminal):
    print_line("epoch 0: fine")
    print_line("")
    assert terminal.getvalue() == "epoch 0: fine\n"


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_without_any_logging_set_up_a_line_goes_to_stderr_once(capsys, monkeypatch, level):
    unconfigured(monkeypatch)
    for _ in range(2):
        print_line("epoch 0: 100 % fine", getattr(logging, level))
    assert capsys.readouterr().err == 2 * "epoch 0: 100 % fine\n"
    assert not OURS.handlers


def test_logging_that_is_set_up_after_the_first_line_gets_the_later_ones_alone(capsys, monkeypatch):
    unconfigured(monkeypatch)
    print_line("first")
    later = io.StringIO()
    logging.getLogger().addHandler(handler := logging.StreamHandler(later))
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    print_line("second", logging.WARNING)
    assert capsys.readouterr().err == "first\n"
    assert later.getvalue() == f"WARNING {print_line.__module__} second\n"


def fitted():
    trainer(lad.DevicePrefetcher()).fit(Recorder(), datamodule=datamodule(train=CountingSource()))


@pytest.fixture
def levels():
    """Sets levels of loggers for one test."""
    before = {}

    def change(name, level):
        before.setdefault(name, logging.getLogger(name).level)
        logging.getLogger(name).setLevel(level)

    yield change
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize("quieted", ["pytorch_lightning", "lightning.pytorch", "lightning", ""])
def test_no_other_logger_silences_the_lines(terminal, levels, quieted):
    levels(quieted, logging.ERROR)
    fitted()
    assert terminal.getvalue().startswith("train   22 samples from CountingSource")
    assert terminal.getvalue().count("memory") == 1


def test_the_own_logger_silences_them_by_their_level(terminal, levels, capsys):
    levels("lit_async_data", logging.WARNING)
    fitted()
    assert terminal.getvalue() == ""
    print_line("samples come twice", logging.WARNING)
    levels("lit_async_data", logging.ERROR)
    print_line("samples come twice", logging.WARNING)
    assert terminal.getvalue() == "samples come twice\n"
    assert capsys.readouterr().err == ""


def test_only_rank_0_prints_a_line(terminal, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    print_line("epoch 0: fine")
    assert terminal.getvalue() == ""


def test_no_module_prints_in_another_way():
    """A filter of warnings, or a level of Lightning's logger, would silence it."""
    other = re.compile(r"rank_zero_(info|warn)\b|\bwarnings\.warn\(")
    package = pathlib.Path(lad.__file__).parent
    assert [str(path) for path in package.rglob("*.py") if other.search(path.read_text())] == []


def test_a_line_stands_above_a_bar_of_tqdm(terminal):
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


@pytest.mark.parametrize("bar", ["TQDMProgressBar", "RichProgressBar"])
def test_the_progress_bar_shows_how_full_the_queues_are(bar, capsys):
    shown, made = Watching(), getattr(pl.callbacks, bar)()
    fit = trainer(lad.DevicePrefetcher(), made, shown, enable_progress_bar=True, max_epochs=2)
    fit.fit(Recorder(), datamodule=datamodule(train=CountingSource(), val=CountingSource()))
    assert len(shown.shown) == 2 * len(STORED)
    for items in shown.shown:
        ready, depth = items["data"].removeprefix("host ").split("/")
        assert 0 <= int(ready) <= int(depth)
        assert int(depth) % 3 == 0  # queue_depth slots, each of one batch or several
    assert "get_metrics" not in vars(made)
    assert "data" not in fit.callback_metrics | fit.logged_metrics
    assert "host " in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_where_batches_are_copied_the_bar_shows_the_device_too(streams):
    shown = Watching()
    with on_device() as loader:
        trainer(lad.DevicePrefetcher(), shown, enable_progress_bar=True).fit(Recorder(), loader)
    assert len(shown.shown) == len(STORED)
    assert all(re.fullmatch(r"host [0-3]/3 device [0-2]/2", items["data"]) for items in shown.shown)


def test_a_bar_is_as_it_was_after_an_error_too():
    def fails(stage, batch):
        raise RuntimeError("mine")

    class Own(pl.callbacks.TQDMProgressBar):
        pass

    bar = Own()
    bar.get_metrics = composed = lambda trainer, model: {"mine": 1}
    shown = Watching()
    fit = trainer(lad.DevicePrefetcher(), bar, shown, enable_progress_bar=True)
    with pytest.raises(RuntimeError, match="mine"):
        fit.fit(Recorder(fails), datamodule=datamodule(train=CountingSource()))
    assert bar.get_metrics is composed
