"""Every program in README.md and docs/ runs unchanged, on small data at the paths it names.

Links, and the pages and programs that documents and messages name, are where they say.
"""

import ast
import csv
import functools
import re
import sys
import types
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from support.files.examples import anndata
from support.files.pictures import stored
from support.lightning.trainer import NO_STAGES, Learning, pl, trainer
from support.ranks.processes import free_port, run_together
from torch.utils.data import DataLoader, Dataset

from lit_async_data import HDF5Source, errors
from lit_async_data.engine.verdict.diagnosis import Bound, Cure

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# All that is ours, without what virtual environments and runs have written.
OURS = (".ci", ".github", "benchmarks", "configs", "docs", "examples", "lit_async_data", "tests")
FILES = [
    path for path in [*ROOT.iterdir(), *(each for name in OURS for each in (ROOT / name).rglob("*"))] if path.is_file()
]
DOCUMENTS = sorted(path for path in FILES if path.suffix == ".md")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAMED = re.compile(r"(?<![\w/])(?:benchmarks|docs|examples|tests)/[\w/]+\.(?:md|png|py|sbatch)\b")
TEST = re.compile(r"\[`(test_\w+)`\]\(([^)\s]+)\)")
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
pytestmark = [
    NO_STAGES,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`"),
]


def programs(page):
    return PROGRAM.findall(page.read_text())


class Linear(Learning):
    """Accepts dicts and tuples of any images and labels."""

    def __init__(self):
        super().__init__(outputs=2)

    def training_step(self, batch, number):
        x, *_, y = batch.values() if isinstance(batch, dict) else batch
        logits = self.layer(x.float().reshape(len(y), -1).mean(1, keepdim=True))
        return torch.nn.functional.cross_entropy(logits, y.reshape(len(y), -1)[:, 0].long() % 2)

    def validation_step(self, batch, number):
        self.training_step(batch, number)


class Boxes(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, number):
        return torch.zeros(3, 4 + number, 5), {"boxes": torch.zeros(number, 4)}


def images(path, samples=40, channels_last=True):
    shape = (samples, 8, 8, 3) if channels_last else (samples, 3, 8, 8)
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
        file["labels"] = np.arange(samples) % 2


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """Small versions of the files that programs name."""
    monkeypatch.chdir(tmp_path)
    for folder in ("scans/train", "photos", "train/auk", "train/owl"):
        (tmp_path / folder).mkdir(parents=True)
    for number in range(3):
        images(f"scans/train/{number}.h5")
    images("scans/val.h5")
    images("x.h5", channels_last=False)
    with h5py.File("cells.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((80, 8, 8, 3), np.uint8), np.arange(80) % 2
    anndata("cells.h5ad")
    with h5py.File("rec.h5", "w") as file:
        for patient in range(10):
            file[f"patient_{patient}/data"] = np.zeros((1000, 4), np.float32)
    with h5py.File("singles.h5", "w") as file:
        for patient in range(4):
            file[f"patients/{patient}/image"] = np.zeros((8, 8, 3), np.uint8)
            file[f"patients/{patient}"].attrs.update({"label": patient, "sex": "fm"[patient % 2]})
    with h5py.File("each.h5", "w") as file:
        for number in range(4):
            file[f"images/{number:06}"] = np.void(stored(Image.new("RGB", (64, 48)), "JPEG"))
            file[f"images/{number:06}"].attrs["species"], file[f"boxes/{number:06}"] = "ab"[number % 2], np.zeros(4)
    rows = [("id", "path", "species", "site")]
    for number in range(20):
        Image.new("RGB", (300, 260), (number, 0, 0)).save(f"photos/{number}.jpg")
        rows.append((f"{number:03}", f"{number}.jpg", "owl" if number % 2 else "auk", f"site {number % 10}"))
    with open("birds.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    for name in ("train/auk/1.png", "train/owl/1.png"):
        Image.new("RGB", (230, 240)).save(name)


@pytest.fixture
def patients(workplace):
    """One file per patient, with two columns of labels; one per episode, with JPEGs in rows of one length."""
    for number in range(20):
        with h5py.File(f"scans/patient_{number:02}.h5", "w") as file:
            file["data"] = np.zeros((10, 8, 8, 3), np.uint8)
            file["labels"] = np.arange(20).reshape(10, 2) % 2
    with h5py.File("era5_2020.nc", "w") as file:
        for name in ("t2m", "tp"):
            file[name] = np.zeros((20, 4, 4), "i2")
            file[name].attrs.update(scale_factor=0.5, add_offset=270.0)
    with h5py.File("eeg.h5", "w") as file:
        file["eeg"] = np.zeros((4, 1000), "f4")
        file["events"] = np.array([(100, 1), (400, 0), (650, 1)], [("onset", "i8"), ("label", "u1")])
    with h5py.File("hits.h5", "w") as file:
        file["hits"] = np.zeros(20, [("momentum", "f4", (3,)), ("energy", "f4"), ("particle", "u1")])
    Path("scans/val.h5").unlink()
    Path("episodes").mkdir()
    for number in range(2):
        frames = [stored(Image.new("RGB", (64, 48), (9 * row, 0, 0)), "JPEG") for row in range(20)]
        with h5py.File(f"episodes/episode_{number}.hdf5", "w") as file:
            padded = [np.frombuffer(frame.ljust(2000, b"\0"), np.uint8) for frame in frames]
            file["observations/images/top"] = np.array(padded)
            file["compress_len"] = np.array([[len(frame) for frame in frames]], "f4")
            file["observations/qpos"] = file["action"] = np.zeros((20, 14))


def given():
    """The names that programs use without defining them."""
    loader = DataLoader([(torch.zeros(3, 4), torch.tensor(1))] * 6, batch_size=2)

    class Loaders(pl.LightningDataModule):
        def train_dataloader(self):
            return loader

    return {
        "model": Linear(),
        "your_model": Linear(),
        "your_datamodule": Loaders(),
        "your_dataloader": loader,
        "dataset": Boxes(),
        "torch": torch,
        "Trainer": lambda callbacks=(), **options: trainer(*callbacks, **options),
    }


# A line of docs/training/gpu.md for a machine with a GPU.
NEEDS_A_GPU = {"gpu"}
# torch never closes all that a process group opens.
NEEDS_A_PROCESS = {"many_gpus"}
# The program of LightningCLI, which lightning/trainer/test_cli.py runs.
NEEDS_ARGUMENTS = {"command_line"}


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if programs(page) and page.stem not in NEEDS_A_GPU | NEEDS_A_PROCESS | NEEDS_ARGUMENTS],
    ids=lambda page: page.stem,
)
def test_the_programs_of_a_page_run(page, request, monkeypatch):
    request.getfixturevalue("patients" if page.stem in {"hdf5", "robots"} else "workplace")
    module = types.ModuleType("page")  # classes that a program defines can be pickled
    monkeypatch.setitem(sys.modules, "page", module)
    names = vars(module)
    names.update(given())
    if page.stem == "transforms":
        names["source"] = HDF5Source("x.h5", {"x": "data", "y": "labels"})
    for program in programs(page):
        # There is no GPU here; Lightning's name is the one under test; its Trainer is told to be short and quiet.
        text = program.replace('"cuda"', '"cpu"').replace('"cuda:1"', '"cpu"')
        text = re.sub(r"^from pytorch_lightning import Trainer\n", "", text, flags=re.MULTILINE)
        exec(compile(text, page.name, "exec"), names)
    for dm in [value for value in names.values() if isinstance(value, pl.LightningDataModule)]:
        names["Trainer"]().fit(Linear(), datamodule=dm)  # whatever a page builds trains, too
    names.clear()


@pytest.mark.parametrize("name", sorted(NEEDS_A_PROCESS))
def test_the_programs_of_a_page_run_as_one_rank(name, workplace, tmp_path):
    (page,) = (page for page in PAGES if page.stem == name)
    before = "import torch\ndataset = [torch.zeros(3)] * 6\n"
    (tmp_path / "page.py").write_text(before + "\n".join(programs(page)))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    run_together([([sys.executable, "page.py"], address | {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1})], tmp_path)


def anchors(page):
    """The names that GitHub gives to the headings of a page."""
    headings = HEADING.findall(CODE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_a_document_leads_to_a_file_and_a_heading():
    broken = []
    for page in DOCUMENTS:
        for link in LINK.findall(CODE.sub("", page.read_text())):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert len(DOCUMENTS) > 50
    assert not broken


def test_every_page_is_in_an_index():
    indexes = [page for page in PAGES if page.name == "README.md"]
    listed = {
        (index.parent / link.partition("#")[0]).resolve()
        for index in indexes
        for link in LINK.findall(index.read_text())
    }
    assert not {page.resolve() for page in PAGES} - listed - {indexes[0].resolve()}


def test_every_test_that_a_page_names_is_in_the_file_that_it_leads_to():
    named = [(name, page.parent / path) for page in PAGES for name, path in TEST.findall(page.read_text())]
    assert len(named) > 50
    assert not [name for name, path in named if f"def {name}(" not in path.read_text()]


def test_every_file_that_documents_and_code_name_is_there():
    named = {}
    for path in FILES:
        if path.suffix in {".md", ".py", ".sbatch", ".toml", ".txt", ".yaml", ".yml"} or path.name == "Makefile":
            named |= dict.fromkeys(NAMED.findall(path.read_text()), path.relative_to(ROOT))
    assert len(named) > 50
    assert not {name: str(path) for name, path in named.items() if not (ROOT / name).exists()}


@functools.cache
def code():
    """Every node of the package's code."""
    files = (ROOT / "lit_async_data").rglob("*.py")
    return [node for path in files for node in ast.walk(ast.parse(path.read_text()))]


# Functions whose texts others log as warnings.
SAYING = {"slow", "amplified"}


def texts_of_warnings():
    """The first five fixed words of each warning of the package. Some have too few: they only join two other texts."""
    texts = []
    for node in code():
        if isinstance(node, ast.FunctionDef) and node.name in SAYING:
            texts += [each.value for each in ast.walk(node) if isinstance(each, ast.Yield | ast.Return)]
        if isinstance(node, ast.Call):
            told = [each for each in node.args if ast.unparse(each) != "logging.WARNING"]
            if told and (len(told) < len(node.args) or ast.unparse(node.func).endswith(".warning")):
                texts.append(told[0])
    for text in texts:
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        fixed = "".join(str(part.value) if isinstance(part, ast.Constant) else "%s" for part in parts)
        words = [piece.strip(" ;:,.").split() for piece in re.split(r"%[-.\d]*[a-z]", fixed)]
        yield from [" ".join(each[:5]) for each in words if len(each) > 2][:1]


def test_every_error_warning_and_verdict_is_explained():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert {f"`{each.__name__}`" for each in classes} <= set(HEADING.findall(page))
    warnings = sorted(texts_of_warnings())
    assert len(warnings) > 30
    assert not [text for text in warnings if text not in page]
    assert not [each for each in Cure if each.value[2:].format(prefix="loader.", value="…") not in page]
    metrics = (ROOT / "docs/training/metrics.md").read_text().replace("`", "")
    assert not [each for each in Bound if each.value.strip(":, ") not in metrics]


def test_the_messages_that_are_explained_are_said():
    said = "\n".join(node.value for node in code() if isinstance(node, ast.Constant) and isinstance(node.value, str))
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = re.findall(
        r"^\| `(.+?)` \|", page[page.index("### Usual messages") : page.index("## Warnings of")], re.MULTILINE
    )
    assert len(messages) > 10
    assert not [piece for text in messages for piece in text.split("…") if piece.strip(" :;") not in said]
