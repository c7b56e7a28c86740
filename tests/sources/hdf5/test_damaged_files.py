"""Damaged files, at random but the same every time: right values, those of h5py, or an error that names the file."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from pathlib import Path

import pytest

DAMAGE = Path(__file__).parents[2] / "support/files/damage.py"


def program(*words):
    return [sys.executable, str(DAMAGE), *map(str, words)]


def outcomes(folder, first, count):
    """The outcome of each seed. A process that dies is an outcome too, unless h5py alone dies of it."""
    found, end = {}, first + count
    while first < end:
        done = subprocess.run(program(folder, first, end - first), capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        found |= {line[0]: line[1] for line in lines if len(line) == 2}
        assert lines, done.stderr
        first = lines[-1][0] + 1
        if done.returncode:
            seed = lines[-1][0]
            alone = subprocess.run(program(folder, seed, "h5py"), capture_output=True, check=False).returncode
            found[seed] = "crash of libhdf5" if alone else f"WRONG: ended by {done.returncode}: {done.stderr[-500:]}"
    return found


def check(found, least):
    wrong = {seed: what for seed, what in found.items() if what.startswith("WRONG")}
    assert not wrong
    counts = collections.Counter(found.values())
    # Damage is detected, and much of it matters.
    assert counts["CorruptError"] + counts["FormatError"] > least < counts["value"], counts


def test_damaged_files_give_right_values_or_errors_that_name_them(tmp_path):
    check(outcomes(tmp_path, 0, 95), 20)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 5000, 500))
def test_many_damaged_files_give_right_values_or_errors_that_name_them(tmp_path, first):
    check(outcomes(tmp_path, first, 500), 100)
