"""The command line: its commands, wrong words, and outputs that fail; and values as arguments of ``train.py``."""

import errno
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from support.files import examples

import lit_async_data
from lit_async_data.__main__ import COMMANDS, main
from lit_async_data.tools.call import override


def test_each_command_has_help(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert "usage: lit-async-data" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "COMMAND" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert lit_async_data.__version__ in capsys.readouterr().out


def test_a_folder_that_may_not_be_listed_is_one_line(capsys, monkeypatch):
    def refused(path, listed=os.listdir):
        if path == "mine":
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    Path("mine").mkdir()
    monkeypatch.setattr("os.listdir", refused)
    for command in (["inspect", "mine"], ["pack", "mine", "-o", "x.h5"]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error == "error: mine: Permission denied; check the path, its permissions and its disk\n"


def test_a_reader_that_has_read_enough_is_no_error():
    examples.images("x.h5", 8)
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "lit_async_data", "inspect", "x.h5"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@settings(max_examples=150)
@given(st.text("\\\\\\'\"${}[]a ,é", min_size=1, max_size=8))
def test_any_text_comes_through_the_shell_hydra_and_omegaconf_unchanged(text):
    (typed,) = shlex.split(override("key", {"name": [text]}))
    (parsed,) = OverridesParser.create().parse_overrides([typed])
    assert OmegaConf.create({"key": parsed.value()}).key.name[0] == text


def test_a_full_disk_is_one_line(monkeypatch, capsys):
    examples.images("scan.h5")

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    assert main(["inspect", "--json", "scan.h5"]) == 2
    assert capsys.readouterr().err.startswith("error: output: No space left on device; ")
