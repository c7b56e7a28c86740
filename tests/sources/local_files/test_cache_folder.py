"""Kept files are used only as they were written, and failing to keep one is no error."""

import logging
import os

import pytest

from lit_async_data.sources.local_files.cache_folder import CacheFolder

OF, NAME, HEAD, BODY = "x.h5", "a.index", b"of x.h5", b"chunks"


@pytest.fixture
def folder(tmp_path):
    return CacheFolder(tmp_path / "kept", "index")


def test_a_file_is_used_only_with_its_head_and_with_every_byte(folder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert folder.load(OF, NAME, HEAD) is None
    assert not caplog.records
    folder.store(OF, NAME, HEAD, BODY)
    assert folder.load(OF, NAME, HEAD) == BODY
    assert folder.load(OF, NAME, b"of y.h5") is None
    whole = (tmp_path / "kept" / NAME).read_bytes()
    changed = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    for damaged in (*changed, whole[:-1], whole + b"\0", b""):
        (tmp_path / "kept" / NAME).write_bytes(damaged)
        assert folder.load(OF, NAME, HEAD) is None
    assert len(caplog.records) == 1 + len(whole) + 3
    assert "x.h5: the index in" in caplog.text


def test_a_file_that_cannot_be_kept_leaves_the_one_before(folder, tmp_path, monkeypatch, caplog):
    folder.store(OF, NAME, HEAD, BODY)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    folder.store(OF, NAME, HEAD, b"others")
    assert folder.load(OF, NAME, HEAD) == BODY
    assert os.listdir(tmp_path / "kept") == [NAME]
    assert "x.h5: its index cannot be kept in" in caplog.text
