"""What is suggested for tables can be meant, and both lines read it."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import csv, parquet
from support.files import examples
from support.lines import built_by_python, check, check_said, only, sides

from lit_async_data.tools.inspect.command import report_on
from lit_async_data.tools.inspect.tables import table_report


def written(table, suffix):
    name = f"birds.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, name)
    elif suffix == "jsonl":
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        csv.write_csv(table, name, csv.WriteOptions(delimiter=";" if suffix == "tsv" else ","))
    return name


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_of_images(folder, suffix):
    report = table_report(written(examples.bird_table(folder), suffix))
    kinds = {"id": "number" if suffix == "csv" else "class", "path": "image", "species": "class", "site": "class"}
    assert {each.name: each.kind for each in report.columns} == kinds
    suggestion = only(report)
    assert '{"x": "path", "y": "species"}' in suggestion.call.python()
    assert 'id="id"' in suggestion.call.python()
    assert "image_size" not in suggestion.call.python()
    check(suggestion)
    assert any('groups="site"' in note for note in suggestion.notes)


@pytest.mark.parametrize("suffix", ["tsv", "jsonl"])
def test_a_table_with_a_column_of_stages_and_images_of_several_sizes(folder, suffix):
    suggestion = only(table_report(written(examples.bird_table(folder, split=True, sizes=3), suffix)))
    assert "image_size=224" in suggestion.call.python()
    assert 'split(source, by="part") has the sides that it names: training, val' in suggestion.notes
    check(suggestion)


def test_folders_that_fit_are_all_named(folder):
    for name in ("large", "small"):
        examples.class_folders(f"tables/{name}", 1)
    Path("tables/t.csv").write_text("file,species\n" + "auk/0.png,auk\nowl/1.png,owl\n" * 20)
    suggestion = only(table_report("tables/t.csv"))
    assert suggestion.call.options["root"] == "tables/large"
    assert "files lie in other folders, too: root='tables/small'" in suggestion.notes
    check(suggestion)


@pytest.mark.parametrize("table", ["tables/birds.csv", "photos/birds.csv"])
def test_absolute_paths_start_from_the_folder_that_all_of_them_are_in(folder, table):
    rows = ["file,species"]
    for name in ("auk", "owl"):
        (folder / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(f"photos/{name}/1.png")
        rows += [f"{folder}/photos/{name}/1.png,{name}"] * 4
    Path("tables").mkdir()
    Path(table).write_text("\n".join(rows))
    report = table_report(table)
    source = built_by_python(only(report).call.python())
    assert [source[number]["y"] for number in (0, 7)] == [0, 1]
    source.close()
    assert report.columns[0].examples[0].endswith("photos/auk/1.png")


TABLES = [
    ("0.png,1\n1.png,0\n", None, "the first line looks like data (0.png)"),
    ("path,label,slice\nx.h5,0,0\nx.h5,1,1\nx.h5,0,2\n", '{"name": "path", "row": "slice", "dataset": "images"', ""),
    ("a,tags\n" + "1,b|c\n2,c\n3,b\n4,b|c\n5,c|b\n", '{"name": "tags", "separator": "|"}', ""),
    ("a,tags\n" + "1,\n2,c\n3,b\n4,b|c\n", '{"name": "tags", "separator": "|", "null": "zero"}', ""),
    ("a,b,target,when\n" + "1,.5,1,x\n2,1,0,x\n3,2,1,x\n4,3,0,x\n", '{"x": ["a", "b"], "y": "target"}', ""),
    ("a,species,kinds\n" + "1,b,p\n2,c,p\n3,b,q\n4,c,q\n", '"y": "species"', ""),
]


@pytest.mark.parametrize(("rows", "suggested", "noted"), TABLES)
def test_what_is_suggested_for_a_table_can_be_meant(rows, suggested, noted):
    examples.images("x.h5")
    header, _, rest = rows.partition("\n")
    Path("t.csv").write_text(f"{header}\n{rest * 6}")
    check_said(table_report("t.csv"), suggested, noted)


@pytest.mark.parametrize(("given", "stages"), [(["*.h5", "t/patients.csv"], "0 1 2"), (["*.h5"], "train train val")])
def test_a_table_with_a_row_for_each_file_labels_the_samples(folder, given, stages):
    (folder / "t").mkdir()
    for number in range(3):
        examples.datasets(f"scan_{number}.h5", {"image": np.zeros((8, 9, 9), "f4")})
    rows = [f"scan_{n}{'.h5' * (n % 2)},{'ab'[n % 2]},{stage}" for n, stage in enumerate(stages.split())]
    Path(given[-1].replace("*.h5", "patients.csv")).write_text("\n".join(["scan,diagnosis,fold", *rows]))
    suggestion = report_on(given).suggestions[0]
    assert suggestion.call.options["on"] == {"scan": "file"}
    assert check(suggestion)["y"].tolist() == [0, 0, 0, 0]
    with sides(suggestion, suggestion.notes[0].partition('"fold")')[0] + '"fold")') as found:
        assert {key: len(side) for key, side in found.items()} == {"train": 16, "val": 8}


def test_a_column_that_can_be_no_field_says_why():
    Path("t.jsonl").write_text('{"a": 1, "b": {"c": 2}}\n')
    fitting, other = table_report("t.jsonl").columns
    assert (fitting.why, other.why.partition(",")[0]) == ("", "holds struct<c: int64>")
