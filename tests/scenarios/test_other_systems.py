"""macOS and Windows, as far as Linux can play them: what they lack is taken away before the package loads."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lit_async_data

PACKAGE = Path(lit_async_data.__file__).parent
# Names of `os` and `mmap` that one of the systems lacks, beside those of `system.py`. Reader processes use more of
# them, where all are there.
LACKING = {
    *("O_CLOEXEC", "O_NOFOLLOW", "O_NOCTTY", "O_NONBLOCK", "O_DIRECTORY", "RWF_NOWAIT", "sched_getaffinity", "sysconf"),
    *("geteuid", "getuid", "fchown", "fchmod", "preadv", "pread", "register_at_fork", "fork", "memfd_create"),
    *("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_NORESERVE", "MADV_RANDOM", "madvise", "getrlimit", "flock"),
}
MODULES = ("os", "mmap", "resource", "fcntl")
TESTS = [f"tests/sources/{name}.py" for name in ("hdf5/test_source", "manifest/test_source", "manifest/test_files")]

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
    assert users == {"sources/manifest/files.py": {"preadv"}}


@pytest.mark.parametrize("played", [pytest.param("macos", marks=pytest.mark.long), "windows"])
def test_sources_work_without_what_the_system_lacks(played):
    plugins = ["-p", "support.other_systems", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-m", CHOSEN, "-k", "not fork", *TESTS]
    environment = os.environ | {"PLAYED_SYSTEM": played, "PYTEST_ADDOPTS": "", "PYTEST_XDIST_WORKER": ""}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 280, "cwd": PACKAGE.parent}
    ran = subprocess.run(command, check=False, **options)
    assert ran.returncode == 0, ran.stdout[-4000:]
