"""The structure of the package: imports go one way, rooms and modules stay small, importing costs nothing."""

import ast
import collections
import dataclasses
import graphlib
import inspect
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import numpy as np
import pytest

import lit_async_data

PACKAGE = Path(lit_async_data.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
# The rooms: modules and folders at the top of the package. A module imports only from its own room and those before.
ROOMS = ["errors", "options", "system", "order", "batch", "sources", "reading", "engine", "lightning", "tools"]
ROOMS += ["testing", "conf", "__main__"]
FOLDERS = sorted({path.parent for path in MODULES} - {PACKAGE})
MOST_LINES = 700
LEAST_TESTED_LINES = 100
# The most lines of each room.
BUDGET = {
    ".": 1520,
    "batch": 1040,
    "conf": 20,
    "engine": 1620,
    "engine/device": 1130,
    "engine/loader": 1810,
    "engine/pipeline": 1060,
    "engine/prefetch": 1120,
    "engine/processes": 1160,
    "lightning": 2290,
    "order": 1770,
    "sources": 850,
    "sources/composed": 1260,
    "sources/contract": 1180,
    "sources/files": 1520,
    "sources/hdf5": 1040,
    "sources/hdf5/index": 450,
    "sources/hdf5/parts": 2200,
    "sources/hdf5/readers": 1730,
    "sources/hdf5/schema": 2200,
    "sources/hdf5/storage": 1080,
    "sources/images": 930,
    "sources/manifest": 1670,
    "sources/table": 1800,
    "tools": 2150,
}
MOST_README_LINES, MOST_TEST_LINES = 15, 41_440


def dotted(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def room_of(module):
    return module.partition(".")[0]


def imported(path):
    """The modules of this package that a module imports, dotted."""
    names = {dotted(module) for module in MODULES}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lit_async_data":
            module = node.module.removeprefix("lit_async_data").removeprefix(".")
            for alias in node.names:
                inner = f"{module}.{alias.name}" if module else alias.name
                yield inner if inner in names else module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("lit_async_data."):
                    yield alias.name.removeprefix("lit_async_data.")


def test_modules_import_one_way_and_only_from_their_own_room_and_those_above_it():
    graph = {dotted(path): set(imported(path)) for path in MODULES}
    for module, names in graph.items():
        for name in names:
            assert ROOMS.index(room_of(name)) <= ROOMS.index(room_of(module)), f"{module} imports {name}"
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_a_module_is_short_enough_to_be_read_at_one_sitting():
    for path in MODULES:
        assert len(path.read_text().splitlines()) <= MOST_LINES, path


def test_a_module_of_some_length_has_tests_of_its_name_in_the_same_place():
    for path in MODULES:
        module = PACKAGE.parent / "tests" / path.relative_to(PACKAGE).with_suffix("")
        tests = [module.with_name(f"test_{path.stem.strip('_')}.py"), module]  # one file, or a folder of several
        assert any(map(Path.exists, tests)) or len(path.read_text().splitlines()) < LEAST_TESTED_LINES, path


def test_a_test_that_needs_a_gpu_runs_without_one_too():
    """Its sizes and expectations are wrong here as there: parametrise it by `MACHINES`, which has the mark."""
    tests = Path(__file__).parent
    marked = [path.relative_to(tests) for path in tests.rglob("*.py") if re.search(r"mark\.gpu\b", path.read_text())]
    assert marked == [Path("support/device/pretended.py")]


def test_a_room_keeps_its_budget_of_lines():
    """A room that needs more raises its number here, and its commit says what for."""
    lines = collections.Counter()
    for path in PACKAGE.rglob("*.py"):
        lines[str(path.parent.relative_to(PACKAGE))] += len(path.read_text().splitlines())
    assert {room: count for room, count in lines.items() if count > BUDGET[room]} == {}
    tests = Path(__file__).parent.rglob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in tests) <= MOST_TEST_LINES


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PACKAGE)))
def test_the_readme_of_a_folder_is_short_and_names_every_module(folder):
    text = (folder / "README.md").read_text()
    assert len(text.splitlines()) <= MOST_README_LINES
    for path in folder.glob("*.py"):
        assert path.name == "__init__.py" or f"`{path.name}`" in text, path.name


def test_the_readme_of_the_package_names_every_room():
    text = (PACKAGE / "README.md").read_text()
    for room in ROOMS:
        assert f"`{room}/`" in text or f"`{room}.py`" in text, room


def test_errors_options_and_orders_need_neither_torch_nor_lightning():
    heavy = re.compile(r"^\s*(import|from) (torch|h5py|pytorch_lightning)\b", re.MULTILINE)
    for path in MODULES:
        assert room_of(dotted(path)) not in {"errors", "options", "order"} or not heavy.search(path.read_text()), path


LIGHTNING = {"pytorch_lightning", "lightning", "rich", "hydra", "omegaconf"}
IMAGES = {"pyarrow", "PIL"}


# One process imports more and more: each line, without what it must not have imported.
STEPS = {
    "import lit_async_data": LIGHTNING | IMAGES | {"torch", "tqdm", "h5py", "numpy"},
    "import lit_async_data.reading": LIGHTNING | IMAGES | {"torch", "tqdm"},
    "from lit_async_data import HDF5Source": LIGHTNING | IMAGES | {"torch", "tqdm"},
    "from lit_async_data.testing import ArraySource": LIGHTNING | IMAGES | {"torch", "tqdm"},
    "import lit_async_data.__main__": LIGHTNING | IMAGES | {"torch"},
    "from lit_async_data import AsyncLoader, prefetched, ManifestSource": LIGHTNING | {"pyarrow"},
    "from lit_async_data import AsyncDataModule, DevicePrefetcher": {"hydra", "omegaconf", "pyarrow"},
    "table = ManifestSource('t.csv', ('path', 'kind', {'name': 'even', 'null': 'ignore'}), id='path')": {"pandas"},
    "with AsyncLoader(table, {'batch_size': 2}) as loader: next(loader)": {"pandas"},
}


def test_a_public_name_imports_only_what_it_uses(tmp_path):
    (tmp_path / "t.csv").write_text("path,kind,even\n0.npy,a,\n1.npy,b,1\n")
    for number in range(2):
        np.save(tmp_path / f"{number}.npy", np.zeros(3))
    lines = [f"{step}; assert not (heavy := {without} & {{*sys.modules}}), heavy" for step, without in STEPS.items()]
    subprocess.run([sys.executable, "-c", "\n".join(["import sys", *lines])], check=True, timeout=120, cwd=tmp_path)


def test_every_public_name_can_be_imported_and_has_an_example():
    for name in lit_async_data.__all__:
        public = getattr(lit_async_data, name)
        # One example stands for all errors: that of their base.
        base = lit_async_data.AsyncDataError if isinstance(public, type) and issubclass(public, Exception) else public
        assert public.__doc__, name
        assert ">>> " in base.__doc__, name


def test_every_public_name_documents_its_arguments():
    for name in lit_async_data.__all__:
        public = getattr(lit_async_data, name)
        bases = public.__mro__[:-1] if dataclasses.is_dataclass(public) else [public]
        documented = set(re.findall(r"^ *\**(\w+): ", "\n".join(map(inspect.getdoc, bases)), re.MULTILINE))
        if not (isinstance(public, type) and issubclass(public, Exception)):
            assert set(inspect.signature(public).parameters) <= documented, name


def test_every_public_name_and_its_methods_say_what_they_are():
    for name in lit_async_data.__all__:
        public = getattr(lit_async_data, name)
        for method in [name for name in vars(public) if name[0] != "_"] if isinstance(public, type) else []:
            found = inspect.getattr_static(public, method)
            if isinstance(found, (types.FunctionType, property, classmethod, staticmethod)):
                assert inspect.getdoc(getattr(public, method)), f"{name}.{method}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Loader"):
        lit_async_data.Loader


def test_the_lowest_constraints_are_the_lower_bounds():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    bounds = {}
    for asked in [*project["dependencies"], *(each for extra in extras.values() for each in extra)]:
        name, _, version = asked.partition(",")[0].partition(">=")
        bounds[name] = version
    pins = re.findall(r"^([\w-]+)==(\S+)$", (PACKAGE.parent / "constraints-lowest.txt").read_text(), re.MULTILINE)
    assert dict(pins).items() <= bounds.items()
    needed = [each.partition(">=")[0] for each in project["dependencies"]]
    assert {*needed, "pyarrow", "pillow", "simplejpeg", "imagecodecs", "rich", "scikit-learn"} <= dict(pins).keys()
