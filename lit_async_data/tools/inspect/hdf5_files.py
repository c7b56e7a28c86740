"""The report on HDF5 files: what is in the first, how the others differ, and the lines that read all of them."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_async_data.errors import AsyncDataError
from lit_async_data.sources.hdf5.index.cache import IndexCache
from lit_async_data.sources.hdf5.schema.field import Field
from lit_async_data.sources.hdf5.schema.open_group import OpenGroup
from lit_async_data.sources.hdf5.storage.failures import as_source_errors, open_h5py
from lit_async_data.tools.inspect.contents.differences import differences
from lit_async_data.tools.inspect.contents.how import How, how
from lit_async_data.tools.inspect.contents.scope import Scope, common_start, scopes_of, stage_of
from lit_async_data.tools.inspect.contents.tree import Node, Tree, tree_of
from lit_async_data.tools.inspect.guesses.datasets import Guess, guesses, is_label
from lit_async_data.tools.inspect.report.report import DatasetReport, Report
from lit_async_data.tools.inspect.report.suggestion import Call, Suggestion
from lit_async_data.tools.inspect.report.verified import first_that_works

# More datasets of one file are counted, not described.
MOST_DATASETS = 500
MATLAB = b"MATLAB 7.3 MAT-file"


def hdf5_report(paths: Sequence[str]) -> Report:
    """Inspect HDF5 files.

    Args:
        paths: The files, one or more; the first that can be read is described, the others are compared with it.

    Raises:
        AsyncDataError: No file can be read; the error of the first.
    """
    trees: dict[str, Tree] = {}
    errors: dict[str, AsyncDataError] = {}
    for path in paths:
        try:
            trees[path] = _tree(path)
        except AsyncDataError as error:
            errors[path] = error
    if not trees:
        raise next(iter(errors.values()))
    first, tree = next(iter(trees.items()))
    writer, scopes = _writer(first, tree), scopes_of(tree)
    described = _described(first, scopes)
    notes = list(_notes(first, tree, scopes, described))
    suggestions = []
    for scope in scopes:
        usable = [node for node in scope.nodes if node.name in described and described[node.name].field is not None]
        for alternatives in guesses(scope, usable, writer=writer):
            listed = [_suggestion(guess, scope, list(trees)) for guess in alternatives]
            found = first_that_works(listed, doubles=writer == "MATLAB v7.3")
            if isinstance(found, AsyncDataError):
                notes.append(f"{listed[0].python().splitlines()[-1]} does not fit: {found}")
            else:
                suggestions.append(found)
            described |= _with_layout(first, scope, alternatives[0])
    if not described:
        notes.append("there are no datasets in it")
    elif not any(found.field for found in described.values()):
        notes.append("no dataset can be read as it is")
    elif not suggestions and not any("does not fit" in note for note in notes):
        notes.append('no dataset looks like samples of a network: name yours in fields={"x": NAME, "y": NAME}')
    return Report(
        "hdf5",
        [{"path": path, "bytes": os.path.getsize(path)} for path in trees],
        writer,
        tree.attributes,
        [{"name": scope.group, "count": len(scope.groups)} for scope in scopes if scope.group],
        [_dataset(scope, node, described.get(node.name)) for scope in scopes for node in scope.nodes],
        differences={path: unlike for path, other in trees.items() if (unlike := differences(tree, other))},
        unreadable={path: " ".join(str(error).split()) for path, error in errors.items()},
        suggestions=suggestions,
        notes=notes,
    )


def _tree(path: str) -> Tree:
    with as_source_errors(path, "cannot be read", file=path), open_h5py(path) as file:
        return tree_of(file)


def _writer(path: str, tree: Tree) -> str | None:
    with open(path, "rb") as file:
        if file.read(len(MATLAB)) == MATLAB:
            return "MATLAB v7.3"
    if tree.attributes.get("encoding-type") == "anndata":
        return "AnnData"
    if tree.pytables:
        return "PyTables"
    return "NetCDF" if any(node.scale for node in tree.all_nodes()) else None


def _described(path: str, scopes: Sequence[Scope]) -> dict[str, How]:
    """How each dataset is read, by name."""
    nodes = [node for scope in scopes for node in scope.nodes][:MOST_DATASETS]
    with as_source_errors(path, "cannot be read", file=path), open_h5py(path) as file:
        group = OpenGroup(file, path, "/", IndexCache(None), allow_external=False)
        return {
            node.name: How(None, "not read", node.problem) if node.problem else how(group, node.name, None)
            for node in nodes
        }


def _with_layout(path: str, scope: Scope, guess: Guess) -> dict[str, How]:
    """How the fields of a guess are read that have no samples on axis 0."""
    found = {}
    with as_source_errors(path, "cannot be read", file=path), open_h5py(path) as file:
        group = OpenGroup(file, path, "/", IndexCache(None), allow_external=False)
        for key, letters in guess.layout.items():
            given = guess.fields[key]
            name = given if isinstance(given, str) else given.name
            if letters[0] != "N":
                full = f"{scope.groups[0].name}/{name}" if scope.groups else name
                found[full] = how(group, full, letters)
    return found


def _dataset(scope: Scope, node: Node, found: How | None) -> DatasetReport:
    found = found or How(None, "not described", f"only the first {MOST_DATASETS} datasets are")
    return DatasetReport(
        scope.shown(node),
        node.type,
        node.shape,
        len(scope.groups) or 1,
        scope.rows(node),
        node.chunks,
        node.filters,
        node.nbytes,
        node.stored,
        node.attributes,
        found.reading,
        found.words,
        found.why or None,
    )


def _notes(path: str, tree: Tree, scopes: Sequence[Scope], described: Mapping[str, How]) -> Iterator[str]:
    if not tree.full:
        yield "the file holds more objects than are shown"
    for scope, node in ((each, node) for each in scopes for node in each.nodes):
        if node.dtype is not None and node.dtype.names is not None:
            names = ", ".join(f"{name!r}" for name in node.dtype.names)
            yield (
                f"{node.name} holds compound values: copy its parts once, with h5py.File(NEW, 'w') as out: "
                f"[out.create_dataset(name, data=file[{node.name!r}][name]) for name in ({names})]"
            )
        elif node.type == "text" and len(node.shape or ()) == 1 and is_label(node) and not scope.groups:
            codes = f"{node.name}_code"
            yield (
                f"{node.name} holds text: store class numbers once, with h5py.File({path!r}, 'r+') as file: "
                f"names, file[{codes!r}] = numpy.unique(file[{node.name!r}].asstr()[:], return_inverse=True)"
            )
        elif node.encoded == "csc" and node.name in described:
            yield f"{node.name}: {described[node.name].why}"


# -- suggestions ------------------------------------------------------------------------------------------------------


def _suggestion(guess: Guess, scope: Scope, paths: Sequence[str]) -> Suggestion:
    options: dict[str, Any] = {}
    if guess.layout:
        options["layout"] = dict(guess.layout)
    if scope.group:
        options["group"] = scope.group
    if guess.stride:
        options["stride"] = guess.stride
    if guess.stages:
        calls = {
            stage: Call("HDF5Source", path_of(paths), _renamed(guess.fields, names), options)
            for stage, names in guess.stages.items()
        }
    else:
        calls = {
            stage: Call("HDF5Source", path_of(files), guess.fields, options) for stage, files in by_stage(paths).items()
        }
    notes = list(guess.notes)
    together = "group" if scope.group else "file" if len(paths) > 1 else ""
    if "all" in calls and together and not any("split(" in note for note in notes):
        notes.append(
            f'split(source, {{"train": 0.8, "val": 0.2}}, groups="{together}") keeps each {together} in one stage'
        )
    return Suggestion(guess.title, calls, tuple(notes))


def _renamed(fields: Mapping[str, str | Field], names: Mapping[str, str]) -> dict[str, str | Field]:
    import dataclasses

    return {
        key: names[key] if isinstance(given, str) else dataclasses.replace(given, name=names[key])
        for key, given in fields.items()
    }


def by_stage(paths: Sequence[str]) -> dict[str, list[str]]:
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
    end = common_start([path[::-1] for path in paths])[::-1]
    end = end if "/" not in end else os.path.splitext(paths[0])[1]
    begin = os.path.join(glob.escape(folder), "")
    for pattern in (
        f"{begin}*{os.path.splitext(end)[1] or end}",
        f"{begin}{glob.escape(name)}*{end}",
        f"{begin}*/*{end}",
        f"{begin}**/*{end}",
    ):
        found = glob.glob(pattern, recursive=True)
        if sorted(each for each in found if not os.path.isdir(each)) == sorted(paths):
            return pattern
    return list(paths)
