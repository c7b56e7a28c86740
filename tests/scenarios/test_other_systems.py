"""macOS and Windows, as far as Linux can play them: what they lack is taken away before the package loads."""

import ast
import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lit_async_data
from lit_async_data import system

PACKAGE = Path(lit_async_data.__file__).parent
# Names of `os` and `mmap` that one of the systems lacks, beside those of `system.py`. Reader processes use more of
# them, where all are there.
LACKING = {
    *("O_CLOEXEC", "O_NOFOLLOW", "O_NOCTTY", "O_NONBLOCK", "O_DIRECTORY", "RWF_NOWAIT", "sched_getaffinity", "sysconf"),
    *("geteuid", "getuid", "fchown", "fchmod", "preadv", "pread", "register_at_fork", "fork", "memfd_create"),
    *("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_NORESERVE", "MADV_RANDOM", "madvise", "getrlimit", "flock"),
}
MODULES = ("os", "mmap", "resource", "fcntl")
TESTS = [
    "tests/sources/hdf5/test_hdf5_source.py",
    "tests/sources/manifest/test_manifest_source.py",
]

CHOSEN = "not processes and not gpu and not long"


def uses(path):
    found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute))
    return {each.attr for each in found if isinstance(each.value, ast.Name) and each.value.id in MODULES} & LACKING


def test_only_one_module_uses_what_other_systems_lack():
    users = {
        str(path.relative_to(PACKAGE)): found
        for path in PACKAGE.rglob("*.py")
        if (found := uses(path)) and not str(path.relative_to(PACKAGE)).startswith(("engine/processes/", "testing/"))
    }
    assert users.pop("system.py")
    # With the flag that makes a read fail instead of wait, which only Linux has.
    assert users == {
        "sources/manifest/files/stored_file.py": {"preadv"},
    }


@pytest.mark.parametrize("played", [pytest.param("macos", marks=pytest.mark.long), "windows"])
def test_sources_work_without_what_the_system_lacks(played):
    plugins = ["-p", "support.other_systems", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-m", CHOSEN, *TESTS]
    environment = os.environ | {"PLAYED_SYSTEM": played, "PYTEST_ADDOPTS": "", "PYTEST_XDIST_WORKER": ""}
    ran = subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=280, cwd=PACKAGE.parent
    )
    assert ran.returncode == 0, ran.stdout[-4000:]


PAGE = mmap.PAGESIZE


def second_of_three_pages():
    """Memory of which only the second page has been written to."""
    mapped = np.frombuffer(mmap.mmap(-1, 3 * PAGE), np.uint8)
    mapped[PAGE] = 1
    return mapped


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not say what is in memory")
@pytest.mark.parametrize(
    ("begin", "nbytes", "expected"),
    [
        (0, 1, [False]),
        (PAGE + 7, 1, [True]),
        (PAGE - 1, 2, [False, True]),
        (PAGE - 1, PAGE + 2, [False, True, False]),
    ],
)
def test_only_pages_that_were_touched_are_in_memory(begin, nbytes, expected):
    assert system.resident(second_of_three_pages(), begin, nbytes).tolist() == expected


def test_where_the_system_does_not_say_it_all_may_be_in_memory(monkeypatch):
    monkeypatch.setattr(system, "_mincore", lambda: None)
    assert system.resident(second_of_three_pages(), 0, 3 * PAGE).tolist() == [True] * 3


def test_a_refusal_of_the_system_is_an_error(monkeypatch):
    monkeypatch.setattr(system, "_mincore", lambda: lambda *_: -1)
    with pytest.raises(OSError, match="mincore failed"):
        system.resident(second_of_three_pages(), 0, 1)


def test_a_page_of_a_file_in_memory_is_not_cold(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(2**20))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        assert system.is_cold(file.fileno(), 2**19) is False


def test_a_system_that_cannot_tell_calls_nothing_cold(monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "preadv", unsupported)
    assert system.is_cold(0, 0) is None
