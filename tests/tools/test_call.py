"""`Call`: which source the words of a command line mean, and values as arguments of ``train.py``."""

import argparse
import os
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lit_async_data.errors import ConfigError
from lit_async_data.tools.call import Call, add_source_arguments, given_source, override


def call_of(paths, *typed):
    parser = argparse.ArgumentParser()
    add_source_arguments(parser)
    return given_source(paths, parser.parse_args(typed))


def test_words_become_fields_and_options():
    typed = ["--fields", "x=images", "labels", "age=scan@age", "--layout", "x=NHWC", "--group", "run_*"]
    fields = {"x": "images", "labels": "labels", "age": {"name": "scan", "attr": "age"}}
    assert call_of(["a.h5"], *typed) == Call("HDF5Source", "a.h5", fields, {"layout": {"x": "NHWC"}, "group": "run_*"})
    of_groups = {"id": {"name": "", "attr": "patient"}}
    for typed, on in ((["file"], "file"), (["scan=file"], {"scan": "file"}), (["id=@patient"], of_groups)):
        assert call_of(["a.h5"], "--table", "t.csv", "--on", *typed).options == {"table": "t.csv", "on": on}
        joined = Call("HDF5Source", "a.h5", {}, {"table": "t.csv", "on": on})
        assert call_of(["a.h5", "t.csv"], "--on", *typed) == joined
    assert call_of(["a.h5", "b.h5"], "--layout", "NHWC") == Call("HDF5Source", ["a.h5", "b.h5"], {}, {"layout": "NHWC"})
    for typed, size in ((["8"], 8), (["8", "6"], (8, 6))):
        assert call_of(["t.csv"], "--image-size", *typed).options == {"image_size": size}


@pytest.mark.parametrize(
    ("name", "source"), [("x.parquet", "ManifestSource"), ("auk/1.png", "ManifestSource.from_folder")]
)
def test_a_folder_is_a_table_or_classes(name, source):
    Path("data", name).parent.mkdir(parents=True)
    Path("data", name).touch()
    assert call_of(["data"]).source == source


@pytest.mark.parametrize(
    ("paths", "typed", "said"),
    [
        (["x.h5"], ["--delimiter", ";"], "delimiter: HDF5Source has no such option"),
        (["scans"], [], r"scans is a folder of HDF5 files; write scans/\*.h5"),
        (["a.h5", "t.csv", "u.csv"], [], "u.csv is a table or a folder; give it alone, or HDF5 files and one table"),
        (["a.h5", "t.csv"], ["--table", "u.csv"], "table: t.csv is a second table; give one"),
    ],
)
def test_words_that_no_source_takes_are_named(paths, typed, said):
    os.mkdir("scans")
    Path("scans/1.h5").touch()
    with pytest.raises(ConfigError, match=said):
        call_of(paths, *typed)


@settings(max_examples=150)
@given(
    st.text("\\\\\\'\"${}[]a ,é", min_size=1, max_size=8), st.sampled_from(["Unnamed: 0", "a, [b]=c", "scan/no. 1-2"])
)
def test_any_text_comes_through_the_shell_hydra_and_omegaconf_unchanged(text, column):
    (typed,) = shlex.split(override("key", {column: [text]}))
    (parsed,) = OverridesParser.create().parse_overrides([typed])
    assert OmegaConf.create({"key": parsed.value()}).key[column][0] == text
