"""The groups of `lit_async_data.conf`, as projects of others use them: with nothing but Hydra's search path."""

import dataclasses
import inspect
import os
import re
import shutil
from pathlib import Path

import h5py
import hydra
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from PIL import Image

import lit_async_data.conf
from lit_async_data import LoaderOptions, ManifestSource
from lit_async_data.sources.images.formats import ImageOptions

ROOT = Path(__file__).parents[2]
PACKAGE = Path(*lit_async_data.conf.__path__)
# Their only mention of the package.
CONFIG = """
defaults:
  - data: hdf5
  - _self_
hydra:
  searchpath: [pkg://lit_async_data.conf]
"""
# What a user types at least, by choice.
GIVEN = {
    "folder": ["data.source.root=animals", "data.source.image_size=8"],
    "hdf5": ["data.train.path=x.h5"],
    "hdf5_split": ["data.source.path=x.h5"],
    "mixture": ["data.train.sources.first.source.path=x.h5", "data.train.sources.second.source.path=x.h5"],
    "manifest": ["data.source.table=x.csv", "data.source.image_size=8", "data.source.fields.y=kind"],
    "manifest_stages": ["data.train.table=x.csv", "data.train.image_size=8", "data.train.fields.y=kind"],
}
LOADER = ["data.loader.workers=2", "data.loader.batch_size=5", "data.loader.seed=7", "data.loader.shuffle=global"]


@pytest.fixture
def files(tmp_path, monkeypatch, h5):
    monkeypatch.chdir(tmp_path)
    h5(data=np.zeros((30, 4, 4), np.uint8), labels=np.arange(30) % 3)


@pytest.fixture
def table(files, tmp_path):
    Image.new("RGB", (10, 12)).save("x.png")
    for number in range(30):
        os.makedirs(folder := f"animals/{('auk', 'owl')[number % 2]}", exist_ok=True)
        Image.new("RGB", (10, 12)).save(f"{folder}/{number}.png")
    Path("x.csv").write_text("path,kind\n" + "x.png,auk\nx.png,owl\n" * 15)


@pytest.fixture
def foreign(tmp_path):
    """Composes the configuration of a project that has no other file than this one."""
    folder = tmp_path / "theirs"
    folder.mkdir()

    def cfg(*overrides, config=CONFIG):
        (folder / "config.yaml").write_text(config)
        with initialize_config_dir(str(folder), version_base="1.3"):
            return compose("config", overrides=[*overrides])

    yield cfg
    GlobalHydra.instance().clear()


def test_a_configuration_has_every_option_of_a_loader_with_its_default():
    keys = OmegaConf.to_container(OmegaConf.load(PACKAGE / "loader/threads.yaml"))
    assert keys.keys() == {option.name for option in dataclasses.fields(LoaderOptions)}
    assert LoaderOptions(**keys) == LoaderOptions(batch_size=64)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("choice", "at"), [("hdf5", "train"), ("hdf5_split", "source")])
def test_labels_come_from_a_table(foreign, choice, at):
    for key, on in {"who": "{who: file}", "file": "file"}.items():
        Path("t.csv").write_text(f"{key},kind\nx,auk\n")
        options = ["table=t.csv", f"on={on}", "fields={x: data, y: kind}", "filters=[[kind, '==', auk]]", "sample=row"]
        given = [f"data.{at}.{each}" for each in options]
        dm = hydra.utils.instantiate(foreign(f"data={choice}", *GIVEN[choice], *given).data)
        assert dm.classes == {"y": ("auk",)}


@pytest.mark.parametrize("choice", [path.stem for path in sorted((PACKAGE / "data").glob("*.yaml"))])
def test_a_choice_of_data_works_in_a_foreign_project_with_values_as_stored_or_by_a_transform(foreign, table, choice):
    to_float = "+data.device_transform._target_=lit_async_data.ToFloat"
    halved = "data.device_transform={_target_: lit_async_data.Normalize, scale: type, dtype: float16}"
    typed = {"+callbacks=device_prefetcher": torch.uint8, to_float: torch.float32, halved: torch.float16}
    for each, dtype in typed.items():
        dm = hydra.utils.instantiate(foreign(f"data={choice}", *GIVEN[choice], *LOADER, each).data)
        loader = dm.train_dataloader()
        assert (loader.options.workers, loader.options.batch_size, loader.options.seed) == (2, 5, 7)
        batch = loader.next()
        assert (batch["x"].dtype, len(batch["y"])) == (dtype, 5)
        assert ("device_transform" in dm.describe()) == (dtype != torch.uint8)
        assert bool(dm.sources["val"]) == ("split" in choice or choice in ("folder", "manifest"))
        dm.close()


def test_an_option_has_the_default_of_python():
    for path in sorted((PACKAGE / "data").glob("*.yaml")):
        for where, section in sections(OmegaConf.to_container(OmegaConf.load(path))):
            made = [hydra.utils.get_method(section["_target_"])]
            made = [ImageOptions, ManifestSource, *made] if "ManifestSource" in section["_target_"] else made
            parameters = {name: each for one in made for name, each in inspect.signature(one).parameters.items()}
            for name in section.keys() & parameters.keys():
                default = parameters[name].default
                default = list(default) if isinstance(default, tuple) else default
                asked = section[name] == "???" or str(section[name]).startswith("${") or isinstance(section[name], dict)
                assert asked or section[name] == default, f"{path.name}: {where}.{name}"


def sections(config, where="data"):
    """Each mapping of a configuration that builds an object, with its place."""
    if isinstance(config, dict):
        if "_target_" in config:
            yield where, config
        for name, each in config.items():
            yield from sections(each, f"{where}.{name}")


def test_patches_are_drawn_for_training_and_on_a_grid_for_predictions(foreign, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with h5py.File("scans.h5", "w") as file:
        for scan in range(3):
            file[f"ct/{scan}"] = np.arange(8 * 9 * 10).reshape(8, 9, 10)
    typed = [f"data.{stage}.path=scans.h5" for stage in ("train", "val", "predict")]
    typed += ["data.train.fields={x: {name: ct/*, patch: [4, 4, 4]}}", "data.train.sample=dataset"]
    typed += ["data.train.patches_per_volume=5", "data.train.foreground={x: {7: 0.5}}"]
    sources = hydra.utils.instantiate(foreign(*typed).data).sources
    assert [len(sources[stage][0]) for stage in ("train", "val", "predict")] == [15, 15, 54]


def test_the_data_may_have_another_name_than_ours(foreign, files):
    config = CONFIG.replace("data: hdf5", "data@input.images: hdf5")
    typed = ["input.images.train.path=x.h5", "input.images.val.path=x.h5", "input.images.val_loader.batch_size=7"]
    dm = hydra.utils.instantiate(foreign(*typed, "input.images.train.fields={image: data}", config=config).input.images)
    assert {key: len(values) for key, values in dm.val_dataloader().next().items()} == {"image": 7}
    dm.close()


@pytest.mark.parametrize(
    ("group", "settings"),
    [
        ("hdf5", "{train: {path: x.h5, fields: {image: data}}, loader: {batch_size: 4}}"),
        ("hdf5", "{train: {path: x.h5, fields: {image: [data, {name: data}]}}, loader: {batch_size: 4}}"),
        ("manifest", """{source: {table: x.csv, fields: '${oc.decode:"{image: path}"}'}, loader: {batch_size: 4}}"""),
    ],
)
def test_settings_in_a_file_replace_ours(foreign, table, group, settings):
    dm = hydra.utils.instantiate(foreign(config=f"{CONFIG.replace('hdf5', group)}data: {settings}\n").data)
    assert (list(dm.spec), dm.train_dataloader().options.batch_size) == (["image"], 4)
    dm.close()


def test_the_configuration_in_the_docs_is_that_of_a_project(tmp_path, monkeypatch, h5):
    text = (ROOT / "docs/training/command_line.md").read_text()
    shutil.copytree(ROOT / "examples/hydra_project/conf", tmp_path / "conf")
    (tmp_path / "conf/config.yaml").write_text(re.search(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1])
    monkeypatch.chdir(tmp_path)
    h5("waves_train.h5", signal=np.zeros((40, 128), np.float32), target=np.zeros(40, np.float32))
    with initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
        cfg = compose("config")
    GlobalHydra.instance().clear()
    assert cfg.model.lr == 0.001
    dm = hydra.utils.instantiate(cfg.data)
    assert dm.train_dataloader().next()["x"].shape == (32, 128)
    dm.close()


def test_nothing_chosen_is_a_shuffle_of_training_by_the_seed_of_lightning(foreign, files, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "6")
    typed = foreign("data=hdf5", *GIVEN["hdf5"], "data.val.path=x.h5").data
    assert (typed.loader.shuffle, typed.loader.seed) == (None, None)
    dm = hydra.utils.instantiate(typed)
    val, train = dm.val_dataloader(), dm.train_dataloader()
    assert (train.order.decks.shuffle, train.order.decks.seed, val.order.decks.shuffle) == ("global", 6, "none")
    dm.close()
