"""Notebooks: pages whose programs run in a kernel, and are shown with their outputs."""

from __future__ import annotations

import base64
import os
import re
import tempfile
from pathlib import Path

import jupytext
import nbclient

# A line of Lightning.
ADVERTISED = re.compile(r"^.* Tip: .*litlogger.*\n", re.MULTILINE)


def executed(page: Path, folder: Path) -> str:
    """The page with the outputs of its programs. Their pictures, and the notebook to download, go into the folder."""
    notebook = jupytext.read(page, fmt="md")
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    with tempfile.TemporaryDirectory() as place:
        nbclient.NotebookClient(
            notebook, extra_arguments=["--log-level=ERROR"], resources={"metadata": {"path": place}}
        ).execute(env=os.environ | {"PYTHONWARNINGS": "ignore"})
    jupytext.write(notebook, folder / f"{page.stem}.ipynb")
    parts = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        pictures = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
        text = "".join(output.get("text", "") for output in cell.outputs).replace(f"{place}/", "")
        if text := ADVERTISED.sub("", text):
            parts.append(f"```text\n{text.rstrip()}\n```")
        for picture in pictures:
            name = f"{page.stem}_{number}.png"
            (folder / name).write_bytes(base64.b64decode(picture))
            parts.append(f"![Output of the program above]({name})")
    title, rest = parts[0].split("\n", 1)
    download = f"[Download as a notebook]({page.stem}.ipynb), run when this site was built.\n"
    return "\n\n".join([title, download, rest, *parts[1:], ""])
