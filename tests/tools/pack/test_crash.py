"""A pack that is killed at any of its writes never leaves a wrong file, and the next run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.files import pack_kills

from lit_async_data.errors import SourceError
from lit_async_data.testing import ArraySource
from lit_async_data.tools.pack import compare, packing
from lit_async_data.tools.pack.packing import pack
from lit_async_data.tools.pack.planning import plan
from lit_async_data.tools.pack.progress import Silent
from lit_async_data.tools.pack.writing import writes
from lit_async_data.tools.pack.writing.journal import Commit, Journal
from lit_async_data.tools.pack.writing.staged_file import StagedFile

VALUES = (np.add.outer(np.arange(24), np.arange(4096)) // 9 % 256).astype("u1")


def test_a_pack_killed_at_any_write_goes_on_and_never_leaves_a_wrong_file(tmp_path):
    program = [sys.executable, pack_kills.__file__, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []
    assert found["steps"] > 30
    assert found["resumed"] > found["steps"] // 3  # after the first commit, the next run begins where it ended


def small_steps(monkeypatch):
    monkeypatch.setattr(plan, "PIECE_BYTES", 3 * 4096)
    monkeypatch.setattr(packing, "COMMIT_BYTES", 2 * 3 * 4096)


class Ear(Silent):
    def __init__(self, stop_at=None):
        self.stop_at, self.lines, self.done = stop_at, [], 0

    def print_line(self, text):
        self.lines.append(text)

    def advance(self, nbytes):
        self.done += nbytes
        if self.stop_at is not None and self.done >= self.stop_at:
            raise KeyboardInterrupt


def test_ctrl_c_loses_at_most_the_work_since_the_last_commit(tmp_path, monkeypatch):
    small_steps(monkeypatch)
    out = str(tmp_path / "x.h5")
    with pytest.raises(KeyboardInterrupt):
        pack(ArraySource({"x": VALUES}), out, codec="deflate", progress=Ear(stop_at=14 * 4096))
    assert sorted(os.listdir(tmp_path)) == ["x.h5.part", "x.h5.part.journal"]
    ear = Ear()
    pack(ArraySource({"x": VALUES}), out, codec="deflate", progress=ear)
    assert ear.lines == [f"going on with {out}.part: 12 of 24 samples are packed"]
    assert os.listdir(tmp_path) == ["x.h5"]
    with h5py.File(out) as file:
        assert np.array_equal(file["x"][...], VALUES)


def test_a_full_disk_can_be_cleared_and_the_run_goes_on(tmp_path, monkeypatch):
    small_steps(monkeypatch)
    out, count, write_at = str(tmp_path / "x.h5"), 0, writes.write_at

    def full(*args):
        nonlocal count
        count += 1
        if count > 40:
            raise OSError(28, "No space left on device")
        write_at(*args)

    with monkeypatch.context() as patched:
        patched.setattr(writes, "write_at", full)
        with pytest.raises(SourceError, match=r"x.h5: cannot be written: .*free some space, and run the same again"):
            pack(ArraySource({"x": VALUES}), out, codec="deflate")
    ear = Ear()
    packed = pack(ArraySource({"x": VALUES}), out, codec="deflate", progress=ear)
    assert "going on" in ear.lines[0]
    assert len(compare.packed_source(out, packed.plan)) == 24


@given(st.data())
def test_a_staged_file_reads_what_was_written_and_changes_no_committed_byte(data):
    committed = data.draw(st.integers(0, 9000))
    descriptor = os.memfd_create("staged")
    try:
        before = bytes(range(256)) * 36
        os.pwrite(descriptor, before[:committed], 0)
        file, model = StagedFile(descriptor, committed), bytearray(before[:committed])
        for _ in range(data.draw(st.integers(1, 6))):
            at, size = data.draw(st.integers(0, 14000)), data.draw(st.integers(1, 5000))
            written = bytes([data.draw(st.integers(1, 255))]) * size
            file.seek(at)
            assert file.write(written) == size
            model.extend(bytes(max(at + size - len(model), 0)))
            model[at : at + size] = written
            first, count = data.draw(st.integers(0, 14000)), data.draw(st.integers(1, 9000))
            buffer = bytearray(count)
            file.seek(first)
            assert buffer[: file.readinto(buffer)] == model[first : first + count]
        assert file.seek(0, os.SEEK_END) == len(model)
        assert os.pread(descriptor, committed, 0) == before[:committed]
        for place, page in file.pages().items():
            os.pwrite(descriptor, page, place)
        assert os.pread(descriptor, 30000, 0) == model
    finally:
        os.close(descriptor)


@given(st.lists(st.tuples(st.integers(0, 99), st.binary(max_size=20)), max_size=4), st.integers(0, 60))
def test_a_journal_cut_anywhere_gives_a_whole_commit_or_none(commits, lost):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/journal"
        with Journal(path) as journal:
            journal.begin({"a": 1})
            for samples, page in commits:
                journal.add(Commit(samples, 7, {0: page}))
        os.truncate(path, max(os.path.getsize(path) - lost, 0))
        with Journal(path) as journal:
            assert journal.plan in ({"a": 1}, None)
            assert journal.last is None or (journal.last.samples, journal.last.pages[0]) in commits
            if journal.plan is None:
                journal.begin({"a": 1})
            journal.add(Commit(5, 8, {}))
        with Journal(path) as journal:
            assert journal.last == Commit(5, 8, {})
