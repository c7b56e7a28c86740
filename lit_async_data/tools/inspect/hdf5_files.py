"""The report on HDF5 files: what is in the first, how the others differ, and the lines that read all of them."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_data.errors import AsyncDataError
from lit_async_data.sources.hdf5.index.cache import IndexCache
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.open_group import OpenGroup
from lit_async_data.sources.hdf5.storage.failures import as_source_errors, open_h5py
from lit_async_data.tools.inspect.contents import Dataset, Tree, describe, tree_of
from lit_async_data.tools.inspect.guesses import Guess, guesses
from lit_async_data.tools.inspect.report import Report
from lit_async_data.tools.inspect.scopes import Scope, common_start, scopes_of, stage_of
from lit_async_data.tools.inspect.verified import first_that_works
from lit_async_data.tools.suggestion import Call, Suggestion

# More datasets of one file are not described.
MOST_DATASETS = 500


def hdf5_report(paths: Sequence[str]) -> Report:
    """Inspect HDF5 files: the first that can be read is described.

    Raises:
        AsyncDataError: No file can be read; the error of the first.
    """
    trees: dict[str, Tree] = {}
    errors: dict[str, AsyncDataError] = {}
    for path in paths:
        try:
            with as_source_errors(path, "cannot be read", file=path), open_h5py(path) as file:
                trees[path] = tree_of(file)
        except AsyncDataError as error:
            errors[path] = error
    if not trees:
        raise next(iter(errors.values()))
    first, tree = next(iter(trees.items()))
    scopes = scopes_of(tree)
    nodes = [node for scope in scopes for node in scope.nodes]
    _describe(first, {node.name: None for node in nodes[:MOST_DATASETS]}, nodes)
    for node in nodes[MOST_DATASETS:]:
        node.how = "not described"
    of_pandas = [group.name for group in tree.all_groups() if group.pandas]
    report = Report(
        "hdf5",
        [{"path": path, "bytes": os.path.getsize(path)} for path in trees],
        _writer(first, tree),
        [{"name": scope.group, "count": len(scope.groups)} for scope in scopes if scope.group],
        unreadable={path: " ".join(str(error).split()) for path, error in errors.items()},
        notes=[
            f"{name} was written by pandas: ManifestSource takes the DataFrame pandas.read_hdf({first!r}, {name!r})"
            for name in of_pandas
        ],
    )
    for scope in scopes:
        usable = [node for node in scope.nodes if node.reading and node.name.rpartition("/")[0] not in of_pandas]
        found, why = guesses(scope, usable, writer=report.writer, parts=_parts(scope, list(trees.values())))
        report.notes += [why] if why else []
        for alternatives in found:
            works = first_that_works([_suggestion(guess, scope, list(trees)) for guess in alternatives])
            if isinstance(works, str):
                report.notes += [works] if works else []
            else:
                report.suggestions.append(works)
            _describe(first, _across(scope, alternatives[0]), nodes)
    report.datasets = [scope.report(node) for scope in scopes for node in scope.nodes]
    if not nodes:
        report.notes.append("there are no datasets in it")
    elif not any(node.reading for node in nodes):
        report.notes.append("no dataset can be read as it is")
    elif not report.suggestions and not report.notes:
        report.notes.append('no dataset looks like samples of a network: name yours in fields={"x": NAME, "y": NAME}')
    return report


def _describe(path: str, layouts: Mapping[str, str | None], nodes: Sequence[Dataset]) -> None:
    with as_source_errors(path, "cannot be read", file=path), open_h5py(path) as file:
        group = OpenGroup(file, path, "/", IndexCache(None), allow_external=False)
        for node in nodes:
            if node.name in layouts:
                describe(group, node, layouts[node.name])


def _across(scope: Scope, guess: Guess) -> dict[str, str | None]:
    """The layouts of those fields of a guess that have no samples on axis 0, by the name of the dataset."""
    begin = f"{scope.groups[0].name}/" if scope.groups else ""
    return {begin + Field.of(guess.fields[k]).name: letters for k, letters in guess.layout.items() if letters[0] != "N"}


def _writer(path: str, tree: Tree) -> str | None:
    with open(path, "rb") as opened:
        if opened.read(15).startswith(b"MATLAB 7.3"):
            return "MATLAB v7.3"
    return tree.writer or ("NetCDF" if any(node.scale for node in tree.all_nodes()) else None)


def _parts(scope: Scope, trees: Sequence[Tree]) -> int:
    """Number of groups, or of files, if these have equal shapes; else 1."""
    if scope.groups:
        return len(scope.groups) if all(len(scope.shapes(node)) < 2 for node in scope.nodes) else 1
    shapes = [{node.name: node.shape for node in tree.all_nodes()} for tree in trees]
    return len(trees) if all(each == shapes[0] for each in shapes) else 1


def _suggestion(guess: Guess, scope: Scope, paths: Sequence[str]) -> Suggestion:
    given: dict[str, Any] = {"layout": dict(guess.layout), "group": scope.group, "stride": guess.stride}
    options = {name: value for name, value in given.items() if value}
    staged = {stage: _renamed(guess.fields, names) for stage, names in guess.stages.items()}
    files = {stage: list(paths) for stage in staged} or _by_stage(paths)
    calls = {
        stage: Call("HDF5Source", path_of(part), staged.get(stage, guess.fields), options)
        for stage, part in files.items()
    }
    together = "group" if scope.group else "file" if len(paths) > 1 else ""
    notes = list(guess.notes)
    if "all" in calls and together and not any("split(" in note for note in notes):
        call = f'split(source, {{"train": 0.8, "val": 0.2}}, groups="{together}")'
        notes.append(f"{call} keeps each {together} in one stage")
    return Suggestion(guess.title, calls, tuple(notes), guess.likely)


def _renamed(fields: Mapping[str, str | Field], names: Mapping[str, str]) -> dict[str, str | Field]:
    return {
        key: names[key] if isinstance(given, str) else dataclasses.replace(given, name=names[key])
        for key, given in fields.items()
    }


def _by_stage(paths: Sequence[str]) -> dict[str, list[str]]:
    """Files by the stage in their names, or in those of their folders; all of them as ``all`` if one has none."""
    found: dict[str, list[str]] = {}
    for path in paths:
        folder, name = os.path.split(path)
        stage = stage_of(os.path.splitext(name)[0])[0] or stage_of(os.path.basename(folder))[0]
        found.setdefault(stage, []).append(path)
    if "" in found or "train" not in found or len(found) < 2:
        return {"all": list(paths)}
    return {stage: found[stage] for stage in ("train", "val", "test") if stage in found}


def path_of(paths: Sequence[str]) -> str | list[str]:
    """One path for files: the file, a pattern that matches them and no others, or else a list."""
    if len(paths) == 1:
        return paths[0]
    folder, name = os.path.split(common_start(paths))
    begin, end = os.path.join(glob.escape(folder), ""), os.path.splitext(paths[0])[1]
    for pattern in (f"{begin}*{end}", f"{begin}{glob.escape(name)}*{end}", f"{begin}**/*{end}"):
        if sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True))) == sorted(paths):
            return pattern
    return list(paths)
