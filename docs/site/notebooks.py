"""Notebooks: pages whose programs run in a kernel, and are shown with their outputs."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path

import jupytext
import nbclient


def executed(page: Path, folder: Path) -> str:
    """The page with the outputs of its programs. Their pictures, and the notebook to download, go into the folder."""
    notebook = jupytext.read(page, fmt="md")
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    with tempfile.TemporaryDirectory() as place:
        nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": place}}).execute()
    jupytext.write(notebook, folder / f"{page.stem}.ipynb")
    parts = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{page.stem}_{number}.png"
                (folder / name).write_bytes(base64.b64decode(data["image/png"]))
                parts.append(f"![output of the program above]({name})")
            elif text := output.get("text") or data.get("text/plain"):
                parts.append(f"```text\n{text.rstrip()}\n```")
    title, rest = parts[0].split("\n", 1)
    download = f"[Download as a notebook]({page.stem}.ipynb), run when this site was built.\n"
    return "\n\n".join([title, download, rest, *parts[1:], ""])
