"""Fixtures that compose the configuration of `train.py`, and that run it."""

from __future__ import annotations

import logging
import runpy
import sys

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict, read_write
from support.lightning.command_line import CONFIGS, ROOT

from lit_async_data.reference.slurm import job_id

OmegaConf.register_new_resolver("slurm_job", job_id, replace=True)  # as train.py does


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


@pytest.fixture
def logging_as_before():
    """Restores the loggers, which Hydra disables if its logging is switched off."""
    loggers = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
    before = [(logger, logger.disabled, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, disabled, level, handlers in before:
        logger.disabled, logger.handlers[:] = disabled, handlers
        logger.setLevel(level)


@pytest.fixture
def typed(monkeypatch, tmp_path, capfd, logging_as_before):
    """Runs ``python train.py ARGUMENTS`` in this process; returns its output and its exit message."""
    monkeypatch.setenv("PROJECT_ROOT", str(tmp_path))

    def run(*arguments):
        monkeypatch.setenv("HYDRA_FULL_ERROR", "")  # which a run sets
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
            ending = None
        except SystemExit as exit_:
            ending = exit_.code
        GlobalHydra.instance().clear()
        return capfd.readouterr().out, ending

    return run
