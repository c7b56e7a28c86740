"""`ManifestSource.from_folder`: trees with a folder for each class."""

import shutil

import numpy as np
import pytest
from PIL import Image
from support.sources.oracle import read

from lit_async_data import ManifestSource
from lit_async_data.errors import ConfigError, ManifestError, MissingError, SourceError


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for name, numbers in {"owl": range(3), "auk": range(3, 10), "emu/deep": range(10, 12)}.items():
        (root / name).mkdir(parents=True)
        for number in numbers:
            Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(root / name / f"{number:02d}.png")
    (root / "owl/.hidden.png").write_bytes(b"nothing")
    (root / "owl/notes.txt").write_text("nothing")
    (root / ".git").mkdir()
    (root / "README.md").write_text("nothing")
    return root


def test_a_folder_for_each_class(tree):
    source = ManifestSource.from_folder(tree)
    assert source.spec["y"].classes == ("auk", "emu", "owl")
    got = read(source, np.arange(len(source)))
    assert got["x"][:, 0, 0, 0].tolist() == [*range(3, 10), 10, 11, 0, 1, 2]
    assert got["y"].tolist() == [0] * 7 + [1] * 2 + [2] * 3
    assert source.locate([8])[0].path == str(tree / "emu/deep/11.png")
    assert source.column("label").tolist() == ["auk"] * 7 + ["emu"] * 2 + ["owl"] * 3
    assert ManifestSource.from_folder(str(tree), image_size=2).spec["x"].shape == (3, 2, 2)


def test_a_folder_says_that_its_name_is_a_class(tmp_path):
    for name in ("5 mm", "10 mm"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "a.npy", np.zeros(3))
    assert ManifestSource.from_folder(tmp_path).spec["y"].classes == ("10 mm", "5 mm")


def test_fields_of_a_tree(tree):
    source = ManifestSource.from_folder(tree, ["path", "label"], filters=[["label", "!=", "emu"]], id="path")
    assert len(source) == 10
    assert source.locate([0])[0].id == "auk/03.png"
    assert not source.spec.as_mapping
    with pytest.raises(ConfigError, match=r"^resise.*resize"):
        ManifestSource.from_folder(tree, resise="crop")
    given = {"x": "path", "y": {"name": "label", "classes": ["owl", "emu", "auk"]}}
    assert read(ManifestSource.from_folder(tree, given), [0])["y"].tolist() == [2]


def test_a_tree_that_is_none(tree, tmp_path):
    (tree / "dodo").mkdir()
    with pytest.raises(MissingError, match="dodo"):
        ManifestSource.from_folder(tree)
    with pytest.raises(ConfigError, match="nope"):
        ManifestSource.from_folder(tmp_path / "nope")
    with pytest.raises(ConfigError, match="deep"):
        ManifestSource.from_folder(tree / "emu/deep")


def test_files_of_other_kinds_are_counted(tree, caplog):
    (tree / "auk/phone.HEIC").write_bytes(b"nothing")
    ManifestSource.from_folder(tree)
    (record,) = caplog.records
    assert "skipped files that are neither images nor .npy: 1 .heic, 1 .txt" in record.getMessage()
    (tree / "dodo").mkdir()
    (tree / "dodo/phone.HEIC").write_bytes(b"nothing")
    with pytest.raises(MissingError, match=r"^from_folder: .*dodo has no images .*, but 1 \.heic; convert those, or"):
        ManifestSource.from_folder(tree)
    (tree / "dodo/phone.HEIC").unlink()
    with pytest.raises(MissingError, match=r"dodo has no images or .npy files; add some, or move the folder"):
        ManifestSource.from_folder(tree)


STAGES = [["train"], ["train", "val"], ["Train", "valid", "TEST"], ["training", "validation", "evaluation"]]


@pytest.mark.parametrize("stages", STAGES, ids="-".join)
def test_folders_of_stages_are_no_classes(stages, tree, tmp_path):
    for stage in stages:
        shutil.copytree(tree, tmp_path / "img" / stage)
        (tmp_path / "img" / stage / "._owl.png").write_bytes(b"of macOS")
    with pytest.raises(ConfigError, match="has folders of stages") as caught:
        ManifestSource.from_folder(tmp_path / "img")
    for stage in stages:
        assert f"from_folder('{tmp_path}/img/{stage}')" in str(caught.value)
        assert len(ManifestSource.from_folder(tmp_path / "img" / stage)) == 12
    assert "rename one if these are the classes" in str(caught.value)
    (tmp_path / "img" / stages[0]).rename(tmp_path / "img/bus")
    assert "bus" in ManifestSource.from_folder(tmp_path / "img").spec["y"].classes


def test_classes_that_are_called_as_stages_are(tree, tmp_path):
    for name in ("train", "test"):
        shutil.copytree(tree / "owl", tmp_path / "img" / name)
    assert ManifestSource.from_folder(tmp_path / "img").spec["y"].classes == ("test", "train")


def test_errors_in_a_tree_name_the_folder_and_no_table(tree):
    (tree / "emu/deep/10.png").write_bytes(b"nothing")
    source = ManifestSource.from_folder(tree, check_files="none")
    with pytest.raises(SourceError, match=rf"^file 7 of {tree}: {tree}/emu/deep/10\.png: ") as caught:
        read(source, [7])
    assert caught.value.row == 7
    assert source.locate([7])[0].file == str(tree)
    assert [part.file for part in source.parts] == [str(tree)]
    source = ManifestSource.from_folder(tree, id="path", check_files="none")
    (tree / "emu/deep/10.png").unlink()
    with pytest.raises(MissingError, match=rf"^file 7 of {tree}, id 'emu/deep/10\.png': "):
        read(source, [7])
    with pytest.raises(ManifestError, match=rf"^{tree}, file 0, column 'label': 'auk' is not a number"):
        ManifestSource.from_folder(tree, {"y": {"name": "label", "kind": "number"}}, check_files="none")


def test_links_in_a_tree(tree, tmp_path):
    (tmp_path / "kiwi").mkdir()
    Image.fromarray(np.full((4, 4, 3), 99, np.uint8)).save(tmp_path / "kiwi/1.png")
    (tree / "kiwi").symlink_to(tmp_path / "kiwi")
    (tree / "owl/more").symlink_to(tmp_path / "kiwi")
    with pytest.raises(ConfigError, match=r"from_folder: .*owl/more' is a link|from_folder: .*kiwi' is a link"):
        ManifestSource.from_folder(tree)
    (tree / "kiwi").unlink()
    with pytest.raises(ConfigError, match=r"from_folder: .*owl/more' is a link to a folder; set allow_external=True"):
        ManifestSource.from_folder(tree)
    (tree / "owl/more").unlink()
    (tree / "kiwi").symlink_to(tmp_path / "kiwi")
    # A class is not left out without a word.
    with pytest.raises(ConfigError, match=r"from_folder: .*kiwi' is a link to a folder; set allow_external=True"):
        ManifestSource.from_folder(tree)
    source = ManifestSource.from_folder(tree, allow_external=True)
    assert source.spec["y"].classes == ("auk", "emu", "kiwi", "owl")
    assert 99 in read(source, np.arange(len(source)))["x"]


def test_links_that_lead_back_end_somewhere(tmp_path):
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a/1.npy", np.zeros(2))
    for name in ("back", "again"):
        (tmp_path / "a" / name).symlink_to(tmp_path / "a")
    source = ManifestSource.from_folder(tmp_path, allow_external=True)
    assert len(source) == 1
    assert source.name == str(tmp_path)
