"""The two distributions of a release: the sdist, and the wheel that is built from it.

``python .ci/distributions.py FOLDER`` builds both from the files that git tracks, in an environment of its own, and
checks their metadata, README and content. On a tag, the tag must be the version.
"""

import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = os.environ.get("PYTHON", sys.executable)
# What an sdist has beside the package: what people read, and the tests with all that they need.
NOT_IN_SDIST = (".ci/", ".github/", "benchmarks/")


def main(folder: str) -> None:
    """Build, and say which file is missing in which distribution, or too many."""
    with tempfile.TemporaryDirectory() as place:
        tools, clone = os.path.join(place, "tools"), os.path.join(place, "clone")
        _run(f"{PYTHON} -m venv {tools}")
        _run(f"{tools}/bin/python -m pip install --quiet --constraint {ROOT}/constraints.txt build twine")
        _run(f"git clone --quiet {shlex.quote(str(ROOT))} {clone}")
        _run(f"{tools}/bin/python -m build --outdir {shlex.quote(folder)} {clone}")
        _run(f"{tools}/bin/python -m twine check --strict {shlex.quote(folder)}/*")
        tracked = _run(f"git -C {clone} ls-files").split()
    (wheel,), (sdist,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
    version = wheel.name.split("-")[1]
    if (tag := os.environ.get("RELEASE_TAG", f"v{version}")) != f"v{version}":
        sys.exit(f"the tag is {tag}, and the version {version}: set __version__, or move the tag")
    information, top = f"lit_async_data-{version}.dist-info/", f"lit_async_data-{version}/"
    _same(
        wheel,
        {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith(information)},
        {name for name in tracked if name.startswith("lit_async_data/")},
    )
    with tarfile.open(sdist) as archive:
        held = {name.removeprefix(top) for name in archive.getnames()} - {"PKG-INFO"}
    _same(sdist, held, {name for name in tracked if not name.startswith(NOT_IN_SDIST)})
    print(f"{wheel.name} and {sdist.name}: {len(tracked)} files of git, metadata and content as they should be")


def _same(distribution: Path, held: set[str], wanted: set[str]) -> None:
    if held != wanted:
        sys.exit(f"{distribution.name}: lacks {sorted(wanted - held)}, and has {sorted(held - wanted)} too many")


def _run(command: str) -> str:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}{done.stderr[-4000:]}\nfailed ({done.returncode}): {command}")
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1])
