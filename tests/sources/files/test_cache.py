"""A cache folder: who may have it, who shares it, and a disk that is full."""

import contextlib
import errno
import logging
import os
import signal
import subprocess
import sys
import types

import h5py
import numpy as np
import pytest
from support.files.far import ROWS, VALUES
from support.sources.oracle import read

from lit_async_data import ConfigError, HDF5Source, StoreError
from lit_async_data.sources.files import files as files_module
from lit_async_data.sources.files import mirror as mirror_module
from lit_async_data.sources.files.mirror import BLOCK


def written(path, values=VALUES):
    with h5py.File(path, "w") as file:
        file["x"] = values
    return str(path)


@pytest.fixture
def path(tmp_path):
    return written(tmp_path / "x.h5")


def assert_right(path, cache, values=VALUES, **options):
    with contextlib.closing(HDF5Source(path, ["x"], cache=cache, **options)) as source:
        samples = np.random.default_rng(0).permutation(ROWS)
        assert np.array_equal(read(source, samples)["x"], values[samples])


def mirrors(cache):
    return sorted(name for name in os.listdir(cache) if name.endswith(".data"))


def test_a_folder_that_others_may_write_to_is_refused(path, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o770)
    with pytest.raises(ConfigError, match=r"others may write to .*chmod go-w") as caught:
        HDF5Source(path, ["x"], cache=tmp_path / "cache")
    assert caught.value.option == "cache"


def test_a_folder_that_cannot_be_written_to_is_an_error_that_says_so(path, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files_module.os, "utime", refuse)
    with pytest.raises(StoreError, match=r"its mirror in .*cache cannot be made: Read-only file system"):
        HDF5Source(path, ["x"], cache=tmp_path / "cache")


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
def test_a_disk_that_is_full_is_an_error_and_no_block_is_wrong_later(path, tmp_path, monkeypatch, call):
    real, left = getattr(os, call), [5 if call == "pwrite" else 0]

    def full(descriptor, data, *place):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[: len(data) // 2] if call == "pwrite" else data, *place)

    with monkeypatch.context() as patched:
        patched.setattr(mirror_module.os, call, full)
        with pytest.raises(StoreError, match=r"x\.h5: its mirror .*No space left on device; make room, or give"):
            assert_right(path, tmp_path / "cache")
    assert_right(path, tmp_path / "cache")


@pytest.mark.parametrize("why", ["limit", "disk"])
def test_a_file_that_has_no_room_stays_in_memory_after_a_warning(path, tmp_path, monkeypatch, caplog, why):
    if why == "disk":
        full = types.SimpleNamespace(f_bavail=10, f_frsize=4096)
        monkeypatch.setattr(files_module.os, "statvfs", lambda _: full)
    assert_right(path, tmp_path / "cache", cache_limit="100KB" if why == "limit" else None)
    assert mirrors(tmp_path / "cache") == []
    (said,) = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert said == f"{path} has no room in {tmp_path}/cache, and stays in memory in part"


def test_room_counts_what_other_mirrors_will_still_take(path, tmp_path, monkeypatch):
    other = written(tmp_path / "other.h5")
    size = os.path.getsize(path)
    free = types.SimpleNamespace(f_bavail=size + BLOCK, f_frsize=1)
    monkeypatch.setattr(files_module.os, "statvfs", lambda _: free)
    monkeypatch.setattr(files_module, "HEAD_BYTES", 1)
    monkeypatch.setattr(files_module, "WHOLE_BYTES", 0)
    with contextlib.closing(HDF5Source(path, ["x"], cache=tmp_path / "cache")):
        assert len(mirrors(tmp_path / "cache")) == 1
        assert_right(other, tmp_path / "cache")
        assert len(mirrors(tmp_path / "cache")) == 1


def test_a_new_version_takes_the_place_of_the_old_one(path, tmp_path):
    assert_right(path, tmp_path / "cache")
    before = mirrors(tmp_path / "cache")
    written(path, VALUES + 1)
    assert_right(path, tmp_path / "cache", VALUES + 1)
    assert mirrors(tmp_path / "cache") != before
    assert len(os.listdir(tmp_path / "cache")) == 2


def test_jobs_share_a_limit_and_what_nobody_uses_makes_room(tmp_path):
    paths = [written(tmp_path / f"{name}.h5", VALUES + number) for number, name in enumerate("abcd")]
    cache, limit = tmp_path / "cache", 2 * os.path.getsize(paths[0])
    assert_right(paths[0], cache, cache_limit=limit)
    (first,) = mirrors(cache)
    os.utime(cache / first, (1, 1))
    with contextlib.closing(HDF5Source(paths[1], ["x"], cache=cache, cache_limit=limit)) as used:
        assert_right(paths[2], cache, VALUES + 2, cache_limit=limit)
        assert first not in mirrors(cache)
        assert_right(paths[3], cache, VALUES + 3, cache_limit=limit)
        assert len(mirrors(cache)) == 2
        assert np.array_equal(read(used, np.arange(ROWS))["x"], VALUES + 1)


def test_a_build_lists_the_folder_once_whatever_the_number_of_files(tmp_path, monkeypatch):
    paths, cache = [written(tmp_path / f"{number}.h5") for number in range(35)], tmp_path / "cache"
    HDF5Source(paths[20:], ["x"], cache=cache).close()  # which make room
    listed, scandir = [], os.scandir
    monkeypatch.setattr(files_module.os, "scandir", lambda path: listed.append(path) or scandir(path))
    limit = 20 * os.path.getsize(paths[0])
    with contextlib.closing(HDF5Source(paths[:20], ["x"], cache=cache, cache_limit=limit)) as source:
        for sample in range(0, len(source), ROWS):
            assert np.array_equal(read(source, np.array([sample]))["x"], VALUES[:1])
    assert listed == [str(cache)]
    assert len(mirrors(cache)) == 20


PROGRAM = """
import os, signal, sys
import h5py, numpy as np
from lit_async_data import HDF5Source
from lit_async_data.sources.files import files, mirror

path, cache, seed, deadly = sys.argv[1:]
files.HEAD_BYTES, files.WHOLE_BYTES, mirror.MOST_BLOCKS = mirror.BLOCK, 0, 2
written, real = 0, os.pwrite

def pwrite(descriptor, data, place):
    global written
    written += 1
    if written == int(deadly):
        real(descriptor, data[: len(data) // 2], place)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(descriptor, data, place)

mirror.os.pwrite = pwrite
source = HDF5Source(path, ["x"], cache=cache)
samples = np.random.default_rng(int(seed)).permutation(len(source))
print("ready", flush=True)
sys.stdin.readline()
for each in samples:
    out = source.spec.empty(1)
    source.read_into(np.array([each]), out)
    with h5py.File(path) as file:
        assert np.array_equal(out["x"][0], file["x"][each]), each
source.close()
"""


def started(path, cache, seed, deadly=0):
    command = [sys.executable, "-c", PROGRAM, path, str(cache), str(seed), str(deadly)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_fill_one_mirror_at_once_and_one_that_is_killed_leaves_no_wrong_block(path, tmp_path):
    programs = [started(path, tmp_path / "cache", seed, deadly=6 * (seed == 0)) for seed in range(3)]
    for program in programs:
        assert program.stdout.readline() == "ready\n"
    programs[0].communicate("\n")
    for program in programs[1:]:
        program.stdin.write("\n")
        program.stdin.flush()
    for program in programs[1:]:
        program.communicate()
    assert [program.returncode for program in programs] == [-signal.SIGKILL, 0, 0]
    assert len(mirrors(tmp_path / "cache")) == 1
    assert_right(path, tmp_path / "cache")
