"""The command line: its commands, folders that may not be listed, and outputs that fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.files import examples

import lit_async_data
from lit_async_data.__main__ import COMMANDS, main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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
