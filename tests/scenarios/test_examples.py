"""Every example runs as it stands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Libraries that are not installed with this package, by example.
LIBRARIES = {"albumentations_crops": "albumentations", "ray_train": "ray", "torchvision_v2": "torchvision"}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path, tmp_path):
    if path.stem in LIBRARIES:
        pytest.importorskip(LIBRARIES[path.stem])
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "waited" in done.stdout


@pytest.mark.parametrize(
    ("program", "parts", "said"),
    [
        ("waiting/first", ["throughput", "memory"], "best DataLoader"),
        ("promises/scale", ["plan", "dealt", "decoding", "checkpoint"], "Samples and ranks dealt wrongly: 0,"),
        pytest.param(
            "promises/resume", ["random", "others"], "epochs those with a fault: 0,", marks=pytest.mark.processes
        ),
        pytest.param("waiting/epochs", ["epochs"], "ms beyond the list", marks=pytest.mark.processes),
    ],
)
def test_a_benchmark_runs(program, parts, said, tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / f"benchmarks/{program}.py"), "--quick", "--json", str(figures), *parts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert figures.exists()


# What the programs of the README take from around them.
AROUND = """
from typing import Any
import torch
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning import LightningModule as YourModel
from torch.utils.data import Dataset
from lit_async_data import HDF5Source
model, your_model, your_datamodule = LightningModule(), LightningModule(), LightningDataModule()
dataset: Dataset[Any] = Dataset()
your_dataloader: Any = None
source = HDF5Source("x.h5")
"""


@pytest.mark.skipif(shutil.which("basedpyright", path=Path(sys.executable).parent) is None, reason="not installed")
def test_a_type_checker_finds_nothing_wrong_with_the_programs_of_readme_and_docs(tmp_path):
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
    programs = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(programs) >= 8
    (tmp_path / "programs.py").write_text(AROUND + "\n".join(programs))
    checker = shutil.which("basedpyright", path=Path(sys.executable).parent)
    settings = {"typeCheckingMode": "standard", "include": ["."], "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [checker, "--outputjson", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert not [(each["range"]["start"]["line"], each["message"]) for each in found]
