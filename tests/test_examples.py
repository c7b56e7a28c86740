"""Every example runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path, tmp_path):
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "waited" in done.stdout


def test_the_benchmark_runs(tmp_path):
    figures = tmp_path / "figures.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks/first.py"),
        "--quick",
        "--json",
        str(figures),
        "throughput",
        "memory",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "best DataLoader" in done.stdout
    assert figures.exists()
