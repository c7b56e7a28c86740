"""What the configuration builds by default is installed by the line that a user has typed, and by nothing else.

The environment of the tests has more. So `train.py` runs with a folder of links to the packages that `pyproject.toml`
asks for, and to all that these ask for. `.ci/first_minute.py` does the same with real environments.
"""

import importlib.metadata
import os
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.lightning.command_line import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def installed(folder):
    """Fills a folder with links to the packages that ``pip install -e .`` brings; returns their names."""
    waiting, known = [Requirement(each) for each in PROJECT["dependencies"]], set()
    while waiting:
        asked = waiting.pop()
        for extra in ["", *asked.extras]:
            if (key := (canonicalize_name(asked.name), extra)) in known:
                continue
            known.add(key)
            found = importlib.metadata.distribution(asked.name)
            wanted = [Requirement(each) for each in found.requires or ()]
            waiting += [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": extra})]
            for name in {each.parts[0] for each in found.files or ()} - {".."}:
                if not (folder / name).exists():
                    (folder / name).symlink_to(found.locate_file(name))
    return {name for name, _ in known}


PROGRAM = """
import runpy, sys
import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

def train(*typed):
    sys.argv = ["train.py", *typed]
    try:
        runpy.run_path(f"{ROOT}/train.py", run_name="__main__")
    except SystemExit as end:
        print(end)
    GlobalHydra.instance().clear()

train()
train("data=hdf5", "data.train.path=x.h5", "data.val.path=x.h5", "trainer.max_epochs=1")
with initialize_config_dir(f"{ROOT}/configs", version_base="1.3"):
    for choice in ("trainer=cpu", "trainer=ddp_sim", "debug=overfit", "experiment=digits_wide"):
        cfg = compose("train", overrides=[choice, "paths.output_dir=out", "paths.work_dir=."])
        for section in (*cfg.callbacks.values(), *cfg.logger.values(), cfg.trainer, cfg.model):
            print(section and type(hydra.utils.instantiate(section)).__name__)
"""


@pytest.mark.processes
def test_all_that_is_built_by_default_comes_with_the_package(tmp_path, images):
    os.link(images, tmp_path / "x.h5")
    os.makedirs(packages := tmp_path / "packages")
    assert "rich" not in installed(packages)  # else this shows nothing
    variables = os.environ | {"PYTHONPATH": f"{packages}:{ROOT}", "PROJECT_ROOT": str(tmp_path), "HYDRA_FULL_ERROR": ""}
    command = [sys.executable, "-S", "-c", f"ROOT = {str(ROOT)!r}\n{PROGRAM}"]  # -S leaves the tests' packages out
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, *_ = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert first.startswith(
        "error: data: scikit-learn, which contains the digits, is missing: pip install -e '.[demo]'"
    )
    assert done.stdout.count("error: ") == 1
    assert "Epoch 0: 100%" in done.stdout + done.stderr
    assert list(tmp_path.rglob("last.ckpt"))
    assert {"TQDMProgressBar", "CSVLogger", "Trainer", "ImageClassifier"} <= {*done.stdout.split()}
