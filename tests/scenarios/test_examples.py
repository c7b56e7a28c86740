"""Every example runs as it stands."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hydra.core.global_hydra import GlobalHydra

ROOT = Path(__file__).parents[2]
# Libraries that are not installed with this package, by example.
LIBRARIES = {"albumentations_crops": "albumentations", "ray_train": "ray", "torchvision_v2": "torchvision"}
# They leave threads in the process that they run in.
OWN_PROCESS = {"ray_train", "zarr_array"}


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path, tmp_path, monkeypatch, capsys, process_as_before):
    if path.stem in LIBRARIES:
        pytest.importorskip(LIBRARIES[path.stem])
    if path.stem in OWN_PROCESS:
        said = output_of([str(path)], tmp_path)
    else:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(path)])
        if "\nSAMPLES = 2048\n" in (text := path.read_text()):  # which takes long to compress
            (path := tmp_path / path.name).write_text(text.replace("\nSAMPLES = 2048\n", "\nSAMPLES = 256\n"))
        runpy.run_path(str(path), run_name="__main__")
        GlobalHydra.instance().clear()
        said = capsys.readouterr().out
    assert "waited" in said


def output_of(arguments, folder):
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.processes
def test_a_file_of_a_reader_is_compared_with_a_plain_dataloader(h5, tmp_path):
    program, given = str(ROOT / "benchmarks/loading/your_file.py"), ["--batch-size", "4", "--seconds", "0.05"]
    h5("secret.h5", images=np.arange(40 * 48).reshape(40, 4, 4, 3).astype(np.uint8), labels=np.arange(40) % 2)
    said = output_of([program, "secret.h5", *given], tmp_path)
    assert re.search(r"^DataLoader, h5py rows, num_workers=0 +[\d,]+ +[\d.]+$", said, re.MULTILINE)
    assert "secret" not in said
    (tmp_path / "mine.py").write_text("def dataset():\n    return [0] * 40\n")
    given += ["--dataset", "mine:dataset"]
    assert "DataLoader, your Dataset" in output_of([program, "secret.h5", *given], tmp_path)


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


@pytest.mark.long  # a part of `make check`
@pytest.mark.skipif(shutil.which("basedpyright", path=Path(sys.executable).parent) is None, reason="not installed")
def test_a_type_checker_finds_nothing_wrong_with_the_programs_of_readme_and_docs(tmp_path):
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
    programs = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(programs) >= 8
    (tmp_path / "programs.py").write_text(AROUND + "\n".join(programs))
    checker = shutil.which("basedpyright", path=Path(sys.executable).parent)
    settings = {"typeCheckingMode": "standard", "include": ["."], "extraPaths": [str(ROOT)]}
    settings["reportMissingImports"] = False  # libraries of recipes that are not installed
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [checker, "--outputjson", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert not [(each["range"]["start"]["line"], each["message"]) for each in found]
