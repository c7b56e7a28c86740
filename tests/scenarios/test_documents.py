"""Every program in README.md and docs/ runs unchanged, on small data at the paths it names.

Links, and the pages and programs that documents and messages name, are where they say.
"""

import ast
import functools
import re
import sys
import types
from pathlib import Path

import pytest
from support import pages
from support.lightning.trainer import NO_STAGES, pl, trainer
from support.ranks.processes import free_port, run_together

from lit_async_data import errors
from lit_async_data.engine.stats import CAUSES, HINTS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# All that is ours, without what virtual environments and runs have written.
OURS = (".ci", ".github", "benchmarks", "configs", "docs", "examples", "lit_async_data", "tests")
INSIDE = [path for name in OURS for path in (ROOT / name).rglob("*")]
FILES = [path for path in [*ROOT.iterdir(), *INSIDE] if path.is_file()]
DOCUMENTS = sorted(path for path in FILES if path.suffix == ".md")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAMED = re.compile(r"(?<![\w/])(?:benchmarks|docs|examples|tests)/[\w/]+\.(?:md|png|py|sbatch)\b")
TEST = re.compile(r"\[`(test_\w+)`\]\(([^)\s]+)\)")
REMARKS = "does not have many workers|will create 4 worker processes|have no `val(_dataloader|idation_step)`"
pytestmark = [NO_STAGES, pytest.mark.filterwarnings(f"ignore:.*({REMARKS})")]
# A line of docs/training/gpu.md for a machine with a GPU.
NEEDS_A_GPU = {"gpu"}
# torch never closes all that a process group opens.
NEEDS_A_PROCESS = {"many_gpus"}
# The program of LightningCLI, which lightning/trainer/test_cli.py runs.
NEEDS_ARGUMENTS = {"command_line"}
NEEDS_OBSTORE = {"remote"}
ELSEWHERE = NEEDS_A_GPU | NEEDS_A_PROCESS | NEEDS_ARGUMENTS
# `make docs` runs notebooks, in a kernel of Jupyter.
HERE = [page for page in PAGES if page.stem not in ELSEWHERE and page.parent.name != "notebooks"]


@pytest.mark.parametrize("page", [page for page in HERE if pages.programs(page)], ids=lambda page: page.stem)
def test_the_programs_of_a_page_run(page, tmp_path, monkeypatch):
    if page.stem in NEEDS_OBSTORE:
        pytest.importorskip("obstore")
    monkeypatch.chdir(tmp_path)
    pages.write_files(page)
    module = types.ModuleType("page")  # classes that a program defines can be pickled
    monkeypatch.setitem(sys.modules, "page", module)
    names = vars(module)
    names.update(pages.given(pl, trainer))
    pages.run(page, names, pl)
    names.clear()


@pytest.mark.parametrize("name", sorted(NEEDS_A_PROCESS))
def test_the_programs_of_a_page_run_as_one_rank(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages.write_files()
    (page,) = (page for page in PAGES if page.stem == name)
    before = "import torch\ndataset = [torch.zeros(3)] * 6\n"
    (tmp_path / "page.py").write_text(before + "\n".join(pages.programs(page)))
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
    links = [(index, link) for index in indexes for link in LINK.findall(index.read_text())]
    listed = {(index.parent / link.partition("#")[0]).resolve() for index, link in links}
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
    files = (ROOT / "lit_async_data").rglob("*.py")
    return [node for path in files for node in ast.walk(ast.parse(path.read_text()))]


# Functions whose texts others log as warnings.
SAYING = {"slow"}


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
    assert not [hint for hint in HINTS.values() if hint[2:].format(prefix="loader.", value="…") not in page]
    metrics = (ROOT / "docs/training/metrics.md").read_text().replace("`", "")
    causes = [cause.format(hooks="Model.on_after_batch_transfer") for cause in CAUSES.values()]
    assert not [cause for cause in causes if re.sub("^ (for data)?[:, ]*", "", cause) not in metrics]


def test_the_messages_that_are_explained_are_said():
    said = "\n".join(node.value for node in code() if isinstance(node, ast.Constant) and isinstance(node.value, str))
    page = (ROOT / "docs/troubleshooting.md").read_text()
    usual = page[page.index("### Usual messages") : page.index("## Warnings of")]
    messages = re.findall(r"^\| `(.+?)` \|", usual, re.MULTILINE)
    assert len(messages) > 10
    assert not [piece for text in messages for piece in text.split("…") if piece.strip(" :;") not in said]
