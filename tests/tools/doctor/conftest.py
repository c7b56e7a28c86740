"""What ``doctor --json`` prints, and a folder and a table of photos."""

import json
from pathlib import Path

import pytest
from PIL import Image

from lit_async_data.__main__ import main


@pytest.fixture
def as_json(capsys):
    def report(*arguments):
        assert main(["doctor", "--json", "--seconds", "0.05", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    return report


@pytest.fixture
def photos(folder):
    rows = ["path,label"]
    for number in range(12):
        path = Path("photos", "ab"[number % 2], f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10), (number, 0, 0)).save(path)
        rows.append(f"{path},{number % 2}")
    Path("photos.csv").write_text("\n".join(rows) + "\n")
