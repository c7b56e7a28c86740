"""Lines are printed above a progress bar, not into it; it shows how full the queues are."""

import io
import logging
import pathlib
import pickle
import re
import sys

import pytest
from support.lightning.trainer import (
    BATCH,
    NO_STAGES,
    SAMPLES,
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
from lit_async_data.engine.stats import Wait
from lit_async_data.engine.verdict import Verdict, Watch
from lit_async_data.lightning import display
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


STEPS = -(-SAMPLES // BATCH)


@pytest.fixture
def lines(caplog):
    """The lines that say how long something waited."""
    caplog.set_level("INFO")
    return lambda: [each.getMessage() for each in caplog.records if " waited " in each.getMessage()]


def all_stages():
    return datamodule(train=CountingSource(), val=CountingSource(), test=CountingSource(), predict=CountingSource())


@pytest.fixture
def short(monkeypatch):
    """Loops that are as short as those of tests are spoken of, too."""
    monkeypatch.setattr(display, "LEAST_S", 0.0)
    monkeypatch.setattr(display, "LEAST_STEPS", 1)


@pytest.fixture
def found(monkeypatch, short):
    """Share, cause and hint that are found out, loop by loop: a list to fill."""
    left, measured = [], Watch.verdict

    def verdict(self, total_s=None):
        return Verdict(measured(self, total_s).waited, *(left.pop(0) if left else (0.5, "read")))

    monkeypatch.setattr(Watch, "verdict", verdict)
    return left


def test_every_stage_is_counted_and_says_how_long_it_waited(lines, found):
    callback, dm = lad.DevicePrefetcher(), all_stages()
    fit = trainer(callback, max_epochs=1, num_sanity_val_steps=1)
    fit.fit(Recorder(), datamodule=dm)
    fit.test(Recorder(), datamodule=dm)
    fit.predict(Recorder(), datamodule=dm)
    fit.validate(Recorder(), datamodule=dm)  # nothing new
    begins = ["validation", "epoch 0: training", "test", "prediction"]
    assert [line.partition(" waited 50.0 % of ")[0] for line in lines()] == begins
    # Without the sanity check, whose batches are a part of a pass.
    assert {stage: waited.steps for stage, waited in callback.evaluated.items()} == {
        "val": 2 * STEPS,
        "test": STEPS,
        "predict": STEPS,
    }
    assert all(waited.total_s > waited.waited_s > 0 for waited in callback.evaluated.values())


def test_a_sentence_is_said_again_only_if_something_has_changed(lines, found):
    found += [(0.5, "decode", "workers", 3), (0.45, "decode", "workers", 4), (0.7, "decode", "workers", 3)]
    found += [(0.5, "decode", "pack"), (0.01, "loop")]
    found += 2 * [(0.5, "read", "workers", 3), (0.7, "decode", "workers", 3)]  # two causes that take turns
    trainer(lad.DevicePrefetcher(), max_epochs=9).fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    assert [line.partition(":")[0] for line in lines()] == [f"epoch {epoch}" for epoch in (0, 2, 3, 4, 5)]


def test_a_validation_that_keeps_up_is_not_spoken_of_in_training(lines, found):
    found += [(0.0, "loop")] * 2
    trainer(lad.DevicePrefetcher()).fit(Recorder(), datamodule=all_stages())
    assert [line.partition(" ")[0] for line in lines()] == ["epoch"]


@pytest.mark.parametrize(("seconds", "steps", "said"), [(1.0, 20, 1), (0.9, 20, 0), (1.0, 19, 0)])
def test_a_short_epoch_is_not_spoken_of(lines, monkeypatch, seconds, steps, said):
    slow = Verdict(Wait(steps, wait_s=0.5, busy_s=seconds - 0.5), 0.5, "read")
    monkeypatch.setattr(Watch, "verdict", lambda *_: slow)
    trainer(lad.DevicePrefetcher()).fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    assert len(lines()) == said


def test_the_level_of_the_packages_logger_silences_lines_and_gauge(caplog, short):
    caplog.set_level("INFO")
    callback = lad.DevicePrefetcher()
    fit = trainer(callback, enable_progress_bar=True)
    metrics = []

    def look(stage, batch):
        metrics.append(fit.progress_bar_callback.get_metrics(fit, fit.lightning_module))

    logger = logging.getLogger("lit_async_data")
    logger.setLevel(logging.WARNING)
    try:
        fit.fit(Recorder(look), datamodule=all_stages())
    finally:
        logger.setLevel(logging.NOTSET)
    assert "waited" not in caplog.text
    assert "memory" not in caplog.text
    assert metrics
    assert not any("data" in each for each in metrics)
    assert callback.waited.steps == STEPS  # it measures all the same


def test_with_several_ranks_the_slowest_is_named_with_its_own_cure(monkeypatch, lines, short):
    fit = trainer(lad.DevicePrefetcher())

    def reduce(values, *_, reduce_op, **__):
        if reduce_op == "sum" and values.shape == (2,):
            assert not values[1]
            values[1] = 1.0
        return values

    def broadcast(mine, src=0):
        return Verdict(mine.waited, 1.0, "decode", "workers", 4) if isinstance(mine, Verdict) and src == 1 else mine

    monkeypatch.setattr(type(fit), "world_size", 2)
    monkeypatch.setattr(fit.strategy, "reduce", reduce)
    monkeypatch.setattr(fit.strategy, "broadcast", broadcast)
    fit.fit(Recorder(), datamodule=datamodule(train=CountingSource()))
    (line,) = lines()
    assert "training on rank 1, the slowest of 2, waited 100.0 % of " in line
    assert line.endswith(", mostly for decoding; set loader.workers=4")


def test_a_copy_of_the_callback_keeps_its_options():
    copied = pickle.loads(pickle.dumps(lad.DevicePrefetcher(3)))
    assert (copied.device_depth, copied.evaluated) == (3, {})
