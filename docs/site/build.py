"""Builds the site, in ``build/site``, from README.md, docs/ and docstrings: ``python docs/site/build.py``.

Pages are copied into ``build/pages`` at the paths that they have in the repository, so links between them stay as they
are. A file that a page links to, such as a test or an example, becomes a page that shows it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import api
import notebooks
import yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = Path(__file__).with_name("mkdocs.yml")
PAGES, SITE = ROOT / "build/pages", ROOT / "build/site"
NOTEBOOKS = "docs/notebooks/"
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sbatch": "bash"}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
# In a list, GitHub indents a new paragraph by two spaces, the site by four; and only GitHub begins an item after it.
AMBIGUOUS = re.compile(r"\n\n {1,3}\S.*|\n\n {4}.*(\n {4}.*)*\n- .*")


def main() -> None:
    shutil.rmtree(ROOT / "build/pages", ignore_errors=True)
    reference = api.write(PAGES / "reference")
    stage(["README.md", "CHANGELOG.md", *room_pages()])
    shutil.copy(CONFIGURATION.with_name("site.css"), PAGES)
    nav = navigation()
    lost = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")} - {*paths_of(nav), "docs/README.md"}
    if lost:
        sys.exit(f"no index links {', '.join(sorted(lost))}: add a line to docs/README.md, or to the README beside it")
    nav += [{"Reference": reference}, {"Changes": "CHANGELOG.md"}]
    generated = {"docs_dir": "pages", "site_dir": "site", "nav": nav}
    (ROOT / "build/mkdocs.yml").write_text(CONFIGURATION.read_text() + yaml.safe_dump(generated, sort_keys=False))
    command = [os.path.join(sysconfig.get_path("scripts"), "zensical"), "build", "--strict", "--config-file"]
    if subprocess.run([*command, "build/mkdocs.yml"], cwd=ROOT, check=False).returncode:
        sys.exit("the site has the warnings above")
    write_llms_txt(nav)


def room_pages() -> list[str]:
    """The READMEs of the package and its rooms."""
    return [str(page.relative_to(ROOT)) for page in sorted((ROOT / "lit_async_data").rglob("README.md"))]


def stage(files: list[str]) -> None:
    """Copy these files and all to which they lead."""
    for name in files:  # grows while it is read
        target = PAGES / staged(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".png"):
            shutil.copy(ROOT / name, target)
        else:
            target.write_text(relinked(page_of(name), name, files))


def staged(name: str) -> str:
    if (ROOT / name).is_dir():
        return f"{name}/index.md"
    return name if name.endswith((".md", ".png")) else f"{name}.md"


def page_of(name: str) -> str:
    """A page as it is, a notebook with its outputs, or a page that shows a source file or the files of a folder."""
    file = ROOT / name
    if name.startswith(NOTEBOOKS):
        return notebooks.executed(file, PAGES / os.path.dirname(name))
    if file.suffix == ".md":
        text = file.read_text()
        if found := AMBIGUOUS.search(FENCED.sub("", text)):
            line = found[0].splitlines()[-1]
            sys.exit(f"{name}: {line!r}: indent by four spaces, and begin the next item after an empty line")
        return text
    if file.is_dir():
        tracked = subprocess.run(["git", "ls-files"], cwd=file, capture_output=True, text=True, check=True)
        return f"{UNSEARCHED}# {name}\n\n" + "".join(f"- [{each}]({each})\n" for each in tracked.stdout.split())
    return f"{UNSEARCHED}# {name}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}````\n"


def relinked(text: str, name: str, files: list[str]) -> str:
    """The text, whose links lead to staged pages; their files are added to the list."""
    folder = name if (ROOT / name).is_dir() else os.path.dirname(name)

    def replaced(link: re.Match[str]) -> str:
        label, path, anchor = link.groups("")
        target = os.path.normpath(os.path.join(folder, path))
        generated = path.endswith((".ipynb", ".png")) and (PAGES / target).exists()
        if not path or "://" in path or generated:
            return link[0]
        if (ROOT / target / "README.md").exists():
            target += "/README.md"
        if target not in files:
            files.append(target)
        return f"[{label}]({os.path.relpath(staged(target), os.path.dirname(staged(name)))}{anchor})"

    return outside_code(text, lambda part: LINK.sub(replaced, part))


def outside_code(text: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for code in FENCED.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def navigation() -> list[Any]:
    """A section for each heading of docs/README.md, with the pages that it lists, in their order."""
    nav, known = [{"Home": "README.md"}], {"docs/README.md"}
    for section in (ROOT / "docs/README.md").read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        nav.append({title: listed(text, "docs", known)})
    rooms = [{os.path.dirname(page).removeprefix("lit_async_data/"): page} for page in room_pages()]
    nav[-1][title].append({"Inside the package": rooms})
    return nav


def listed(text: str, folder: str, known: set[str]) -> list[Any]:
    """The pages to which a text links for the first time, each index followed by its own pages."""
    entries: list[Any] = []
    for label, path, _ in LINK.findall(FENCED.sub("", text)):
        page, title = os.path.normpath(os.path.join(folder, path)), label.replace("`", "")
        if path.endswith(".md") and page.startswith("docs/") and page not in known:
            known.add(page)
            entries.append({title[0].upper() + title[1:]: page})
            if path.endswith("README.md"):
                entries += listed((ROOT / page).read_text(), os.path.dirname(page), known)
    return entries


def paths_of(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        (value,) = entry.values()
        yield from [value] if isinstance(value, str) else paths_of(value)


def write_llms_txt(nav: list[Any]) -> None:
    """Write the index of https://llmstxt.org, and the Markdown of each page beside its HTML."""
    (summary,) = re.findall(r"^site_description: (.+)", CONFIGURATION.read_text(), re.MULTILINE)
    lines = ["# lit_async_data", "", f"> {summary}"]
    for entry in nav:
        lines += ["", f"## {next(iter(entry))}", ""]
        for page in paths_of([entry]):
            lines.append(f"- [{TITLE.search((PAGES / page).read_text())[1]}]({page})")
            (SITE / page).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PAGES / page, SITE / page)
    (SITE / "llms.txt").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
