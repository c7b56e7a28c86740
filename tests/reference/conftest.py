"""Fixtures that compose the configuration of `train.py`, and that run it."""

import functools
import runpy
import sys

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict, read_write
from support.lightning.command_line import CONFIGS, ROOT

from lit_async_data.lightning import display  # a logger writes to the standard error of its import
from reference import command_line


@pytest.fixture
def composed(monkeypatch, tmp_path):
    """Composes the configuration with overrides, as hydra.main does."""
    monkeypatch.setenv("PROJECT_ROOT", str(tmp_path))

    def cfg(*overrides):
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            made = compose("train", overrides=[*overrides], return_hydra_config=True)
        with read_write(made.hydra.runtime), open_dict(made.hydra.runtime):
            made.hydra.runtime.output_dir = str(tmp_path / "out")
            made.hydra.runtime.cwd = str(tmp_path)
        HydraConfig.instance().set_config(made)
        return made

    yield cfg
    HydraConfig.instance().cfg = None
    GlobalHydra.instance().clear()


@functools.cache
def known(config_dir, *chosen, of=command_line._known):
    return of(config_dir, chosen)


@pytest.fixture
def composed_once(monkeypatch):
    """Composes each choice once, for all tests: that takes most of the time of a check."""
    monkeypatch.setenv("PROJECT_ROOT", "/tmp")
    monkeypatch.setattr(command_line, "_known", lambda config_dir, chosen: {**known(config_dir, *chosen)})


@pytest.fixture
def typed(monkeypatch, tmp_path, capfd, process_as_before, composed_once):
    """Runs ``python train.py ARGUMENTS`` in this process; returns its output and lines, and its exit message."""
    said = []
    monkeypatch.setattr("pytorch_lightning.utilities.rank_zero_info", lambda message, **_: said.append(str(message)))
    monkeypatch.setattr(display.log, "log", lambda level, form, line: said.append(line))
    monkeypatch.setenv("PROJECT_ROOT", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments):
        monkeypatch.setenv("HYDRA_FULL_ERROR", "")  # which a run sets
        said.clear()
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
            ending = None
        except SystemExit as exit_:
            ending = exit_.code
        GlobalHydra.instance().clear()
        captured = capfd.readouterr()
        return "\n".join([captured.out, captured.err, *said]), ending

    return run
