"""LightningCLI: the YAML in the docs runs, and so does what it saves, with the defaults of each class."""

import copy
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.lightning.trainer import Learning

import lit_async_data as lad
from lit_async_data import AsyncDataModule

jsonargparse = pytest.importorskip("jsonargparse", reason="pip install 'jsonargparse[signatures]'")
# jsonargparse only warns of what it cannot save, and where warnings are errors it tries another type.
pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = Path(__file__).parents[3] / "docs/training/command_line.md"
FLIP = """
class Flip:
    def __init__(self, p: float):
        self.p = p
    def __call__(self, sample):
        return {**sample, "x": -sample["x"] * self.p}
"""


class Summing(Learning):
    total = 0.0

    def training_step(self, batch):
        Summing.total += batch["x"].sum().item()
        return self.layer(batch["y"][:, None]).sum()


@pytest.mark.parametrize("stage", ["train", ""])
def test_the_configuration_in_the_docs_runs_and_is_saved_so_that_it_runs_again(h5, tmp_path, monkeypatch, stage):
    from pytorch_lightning.cli import LightningCLI

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("transforms.py").write_text(FLIP)
    h5("waves_train.h5", signal=np.ones((64, 8), np.float32), target=np.zeros(64, np.float32))
    text = re.search(r"^```yaml\n(# cli.yaml.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
    if not stage:  # a class for all stages
        text = re.sub(r"sample_transform:.*\n +train: ", "sample_transform: ", text)
    Path("cli.yaml").write_text(text)
    off = ("logger", "enable_checkpointing", "enable_progress_bar")
    quiet = ["--trainer.accelerator=cpu", *(f"--trainer.{each}=false" for each in off)]
    for config in ("cli.yaml", "config.yaml"):
        Summing.total = 0.0
        monkeypatch.setattr(sys, "argv", ["main.py", "fit", "--config", config, "--seed_everything=1", *quiet])
        LightningCLI(Summing, AsyncDataModule, save_config_kwargs={"overwrite": True})
        assert Summing.total == -64 * 8 * 0.5


def source(**options):
    return {"class_path": "lit_async_data.HDF5Source", "init_args": {"path": "x.h5"} | options}


TABLE = {"table": "x.csv", "fields": {"x": "path", "y": "kind"}, "image_size": 8}
# What a user types of each class; all other options keep the defaults that jsonargparse makes of the annotations.
TYPED = {
    lad.HDF5Source: [
        {"path": ["x.h5"], "fields": ["data", "labels"], "exclude": [1, 2]},
        {"path": "x.h5", "fields": {"x": {"name": "data", "window": [0, 3]}}, "rows": [3, 4, 20]},
    ],
    lad.ManifestSource: [
        TABLE | {"image_size": [8, 9], "resize": "pad", "fill": 7, "exclude": [3]},
        TABLE | {"fields": {"x": {"name": "path", "mode": "L", "fill": 3}, "y": {"name": "kind", "null": "drop"}}},
    ],
    lad.SubsetSource: [{"source": source(), "samples": [3, 1, 2]}],
    lad.ConcatSource: [{"sources": [source(), source(rows=[0, 1])]}],
    lad.Field: [{"name": "x", "decode": "image", "image_size": 8}, {"name": ["a", "b"]}, {"name": "x", "column": 0}],
    lad.LoaderOptions: [
        {"batch_size": 8, "max_bad": 10, "on_error": "skip"},
        {"batch_size": 8, "weights": {"balanced": "y"}},
        {"batch_size": 8, "batch_by": "x", "buckets": [4, 8]},
    ],
    AsyncDataModule: [
        {"train": source(), "loader": {"batch_size": 8, "max_bad": 10}, "val_loader": {"workers": 0}},
        {"source": source(), "split": {"train": 0.75, "val": 0.25}, "balance": "labels", "loader": {"batch_size": 8}},
        {"source": source(), "split": {"train": [0, 1], "val": [2]}, "groups": "labels", "loader": {"batch_size": 8}},
    ],
    lad.DevicePrefetcher: [{"device_depth": 3}],
    lad.PredictionWriter: [{"path": "out.h5"}],
    lad.Normalize: [{}, {"mean": [[0, 1], [2, 3]], "std": 1, "fields": "x", "scale": "type", "axis": [0, 1]}],
    lad.ToFloat: [{"fields": ["x"], "dtype": "float16"}],
}


@pytest.mark.parametrize(
    ("kind", "typed"),
    [(kind, typed) for kind, several in TYPED.items() for typed in several],
    ids=lambda each: getattr(each, "__name__", ",".join(each) if isinstance(each, dict) else ""),
)
def test_what_is_typed_and_all_defaults_build_the_same_after_they_were_saved(kind, typed, h5, tmp_path, monkeypatch):
    """The assumption that was wrong: a value passes jsonargparse as it is, whatever the annotation of the option."""
    monkeypatch.chdir(tmp_path)
    h5("x.h5", data=np.zeros((24, 8), np.float32), labels=np.arange(24) % 3)
    Image.new("RGB", (9, 8)).save("x.png")
    Path("x.csv").write_text("path,kind\n" + "x.png,auk\nx.png,owl\n" * 4)

    def parsed(read):
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(kind, "it")
        namespace = read(parser)
        return parser.instantiate_classes(namespace).it, parser.dump(namespace, skip_none=False)

    made, saved = parsed(lambda parser: parser.parse_object({"it": copy.deepcopy(typed)}))
    again, saved_again = parsed(lambda parser: parser.parse_string(saved))
    assert saved_again == saved
    assert shown(again) == shown(made)
    if "class_path" not in repr(typed):
        assert shown(kind(**typed)) == shown(made)


def shown(made):
    return repr(made) if type(made).__repr__ is not object.__repr__ else [*vars(made)]
