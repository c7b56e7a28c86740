"""Kept files are used only as they were written, and failing to keep one is no error."""

import errno
import logging
import os
import stat
from unittest.mock import Mock

import pytest

from lit_async_data.errors import ConfigError
from lit_async_data.sources.local_files import CacheFolder

OF, NAME, HEAD, BODY = "x.h5", "a.index", b"of x.h5", b"chunks"


@pytest.fixture
def folder(tmp_path):
    folder = CacheFolder(tmp_path, "index")
    folder.store(OF, NAME, HEAD, BODY)
    assert folder.load(OF, NAME, HEAD) == BODY
    return folder


def test_the_folder_is_made_for_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    CacheFolder("made/kept", "index")
    assert stat.S_IMODE((tmp_path / "made/kept").stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user_is_refused(tmp_path):
    os.chown(tmp_path, 65534, -1)
    with pytest.raises(ConfigError, match="belongs to user 65534") as caught:
        CacheFolder(tmp_path, "index")
    assert caught.value.option == "cache_dir"


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=r"others may write to .*chmod go-w") as caught:
        CacheFolder(tmp_path, "index")
    assert (caught.value.option, caught.value.file) == ("cache_dir", str(tmp_path))
    tmp_path.chmod(0o755)
    CacheFolder(tmp_path, "index")


def test_every_changed_byte_and_every_other_length_is_detected(folder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert folder.load(OF, "b.index", HEAD) is None
    assert not caplog.records
    assert folder.load(OF, NAME, b"of y.h5") is None
    content = (tmp_path / NAME).read_bytes()
    damaged = [content[:at] + bytes([byte ^ 1 << at % 8]) + content[at + 1 :] for at, byte in enumerate(content)]
    for each in (b"", content[:5], content[:-1], content + b"\0", b"\0" * len(content), *damaged):
        (tmp_path / NAME).write_bytes(each)
        caplog.clear()
        assert folder.load(OF, NAME, HEAD) is None
        assert f"x.h5: the index in {tmp_path / NAME} is damaged or of another state" in caplog.text


def test_a_full_disk_leaves_nothing_behind(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(errno.ENOSPC, "no space left")))
    folder.store(OF, NAME, HEAD, b"others")
    assert folder.load(OF, NAME, HEAD) == BODY
    assert os.listdir(tmp_path) == [NAME]
    assert "x.h5: its index cannot be kept in" in caplog.text
