"""The first minute of a new user: each install line of the README alone, and what README and pages show after it.

``python .ci/first_minute.py`` clones this checkout (its HEAD), and makes an environment for each line, with nothing of
the tests. A new page, program or line of `train.py` is added to `LINES`.
"""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = os.environ.get("PYTHON", sys.executable)
LIMIT_S = 900
CLI = "CI/cli.py fit --data.loader.batch_size=8 --data.train=lit_async_data."


@dataclasses.dataclass
class Line:
    """A line of the README that installs, ``pip install -e '.EXTRAS'``, and what must run after it.

    Attributes:
        extras: ``"[demo]"``, …
        pages: Documents, with all Python that they show; from the wheel, outside of the clone.
        inspected: Arguments of ``inspect``, whose Python runs from the wheel, and its ``train.py`` from the clone.
        programs: Python programs, from the wheel; ``CLONE`` and ``CI`` stand for folders.
        train: Arguments of ``train.py``, from the clone.
        beside: Pages and programs by the further packages that they say are needed.
    """

    extras: str
    pages: tuple[str, ...] = ()
    inspected: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    beside: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.extras.strip("[]").replace(",", "_") or "none"


# What `make train` installs. It runs first, then these.
DEMO = (
    "ckpt_path=last trainer.max_epochs=3",
    "train=false ckpt_path=best",
    "trainer.max_steps=5",
    "debug=fdr",
)
LINES = (
    Line(
        "",
        pages=(
            "docs/first_steps.md",
            "docs/data/any_loader.md",
            "docs/data/reading.md",
            "docs/data/transforms.md",
            "docs/training/metrics.md",
            "docs/training/resume.md",
        ),
        inspected=("cells.h5", "x.h5"),
        programs=("CLONE/examples/hydra_project/train.py", "CLONE/examples/plain_pytorch.py"),
        train=(
            "data=hdf5_split data.source.path=x.h5 'loader.weights={balanced: y}' trainer.max_epochs=1",
            "data=hdf5 data.train.path=x.h5 data.statistics=train loader.workers=2 trainer.max_epochs=1",
        ),
        beside={"jsonargparse[signatures]": (CLI + "HDF5Source --data.train.path=x.h5",)},
    ),
    Line("[cloud]", pages=("docs/data/remote.md",)),
    Line(
        "[manifest,codecs]",
        pages=("README.md", "docs/data/hdf5.md", "docs/data/tables.md", "docs/training/bad_samples.md"),
        inspected=("photos/birds.csv", "train"),
        train=(
            (
                "data=manifest_stages data.train.table=birds.csv data.train.root=photos data.train.fields.y=species "
                "data.train.image_size=32 trainer.max_epochs=1"
            ),
        ),
        beside={
            "jsonargparse[signatures]": (
                CLI + "ManifestSource --data.train.table=birds.csv --data.train.root=photos --data.train.image_size=32"
                " --data.train.fields='{x: path, y: species}'",
            ),
            "pandas": ("docs/training/predictions.md", "docs/recipes/folds.md"),
        },
    ),
)


def main() -> None:
    """Prove all lines, or those of the extras that are named, such as ``demo`` or ``none``."""
    chosen = sys.argv[1:] or ["demo", *(line.name for line in LINES)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        clone = os.path.join(place, "clone")
        if _run("git status --porcelain", ROOT):
            print("changes that are not committed are not in the clone", flush=True)
        _run(f"git clone --quiet {shlex.quote(str(ROOT))} {clone}", place)
        if "demo" in chosen:
            print("== make train", flush=True)
            _step(f"make train ARGS=trainer.max_epochs=2 PYTHON={PYTHON}", clone)
            for arguments in DEMO:
                _step(f".venv/bin/python train.py {arguments}", clone)
        _step(f"{PYTHON} .ci/distributions.py {place}/dist", clone)
        for line in LINES:
            if line.name in chosen:
                print(f"== pip install '.{line.extras}'", flush=True)
                _prove(line, place, clone)
    print(f"the first minute: all ran, in {time.monotonic() - began:.0f} s", flush=True)


def _prove(line: Line, place: str, clone: str) -> None:
    environment, files = os.path.join(place, f"venv_{line.name}"), os.path.join(place, f"files_{line.name}")
    python = f"{environment}/bin/python"
    pip = f"{python} -m pip install --quiet --constraint {clone}/constraints.txt"
    (wheel,) = Path(place).glob("dist/*.whl")
    os.mkdir(files)
    _step(f"{PYTHON} -m venv {environment}", files)
    _step(f"{pip} '{wheel}{line.extras}'", files)
    _step(f"{environment}/bin/lit-async-data --help", files)
    _run(f"{python} -c 'import support.pages; support.pages.write_files()'", files, tests=clone)
    _pages(python, line.pages, files, clone)
    commands = []
    for arguments in line.inspected:
        suggested = json.loads(_run(f"{python} -m lit_async_data inspect --json {arguments}", files))["suggestions"][0]
        _step(f"{python} -c {shlex.quote(suggested['python'] + chr(10) + 'print(source)')}", files)
        commands.append(suggested["command"].removeprefix("python train.py ") + " trainer.max_epochs=1")
    for program in line.programs:
        _step(f"{python} {_placed(program, clone)}", files, tests=clone)
    _step(f"{pip} --editable '{clone}{line.extras}'", files)
    for arguments in [*commands, *line.train]:
        _step(f"{python} {clone}/train.py {arguments}", files)
    for packages, programs in line.beside.items():
        _step(f"{pip} '{packages}'", files)
        _pages(python, [each for each in programs if each.endswith(".md")], files, clone)
        for program in programs:
            if not program.endswith(".md"):
                _step(f"{python} {_placed(program, clone)}", files, tests=clone)
                _step(
                    f"{python} {clone}/.ci/cli.py fit --config lightning_logs/version_0/config.yaml", files, tests=clone
                )


def _placed(program: str, clone: str) -> str:
    return program.replace("CLONE/", f"{clone}/").replace("CI/", f"{clone}/.ci/")


def _pages(python: str, pages, files: str, clone: str) -> None:
    if pages:
        _step(f"{python} -m support.pages {' '.join(f'{clone}/{page}' for page in pages)}", files, tests=clone)


def _step(command: str, folder: str, tests: str | None = None) -> None:
    began = time.monotonic()
    _run(command, folder, tests)
    shown = command.replace(os.path.dirname(folder) + "/", "").replace("\n", "; ")
    print(f"{time.monotonic() - began:5.0f} s  {shown}", flush=True)


def _run(command: str, folder: str | Path, tests: str | None = None) -> str:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if tests is not None:
        variables["PYTHONPATH"] = f"{tests}/tests"
    done = subprocess.run(
        command, shell=True, cwd=folder, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}{done.stderr[-8000:]}\nfailed ({done.returncode}): {command}")
    return done.stdout


if __name__ == "__main__":
    main()
