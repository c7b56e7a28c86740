"""The report on HDF5 files: what is in the first, and the lines that read all of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import cast

import h5py

from lit_async_data.sources.hdf5.index.cache import IndexCache
from lit_async_data.sources.hdf5.schema.open_group import OpenGroup
from lit_async_data.sources.hdf5.storage.failures import as_source_errors, open_h5py
from lit_async_data.sources.local_files.patterns import files_matching, is_pattern
from lit_async_data.tools.inspect.contents import datasets_of, describe, scopes_of
from lit_async_data.tools.inspect.guesses import suggestions
from lit_async_data.tools.inspect.report import Report, Suggestion
from lit_async_data.tools.inspect.words import of_training

# Of one file: datasets that are looked at; and those that are described, where groups of equal structure count once.
MOST_DATASETS, MOST_DESCRIBED = 20_000, 500


def hdf5_report(given: Sequence[str]) -> Report:
    """The report on HDF5 files, given by paths and patterns; the first is described."""
    matched = [files_matching(each) if is_pattern(each) else [each] for each in given]
    paths = of_training(dict.fromkeys(itertools.chain.from_iterable(matched)))
    first, report, found = paths[0], Report("hdf5", paths), list[list[Suggestion]]()
    with as_source_errors(first, "cannot be read", file=first), open_h5py(first) as file:
        nodes = list(itertools.islice(datasets_of(cast("h5py.Group", file["/"]), set()), MOST_DATASETS))
        group = OpenGroup(file, first, "/", IndexCache(None), allow_external=False)
        for scope in scopes_of(nodes):
            if len(scope.nodes) > MOST_DESCRIBED:
                report.notes.append(f"only the first {MOST_DESCRIBED} of {len(scope.nodes):,} datasets are shown")
                del scope.nodes[MOST_DESCRIBED:]
            for node in scope.nodes:
                describe(group, node)
            above = scope.nodes[0].path.removesuffix(scope.relative(scope.nodes[0])) if scope.nodes else ""
            scope.attributes = list(file[above or "/"].attrs)
            candidates, why = suggestions(scope, paths)
            across = candidates[0].call.options.get("layout", {}) if candidates else {}
            for key, letters in across.items():  # where samples are not on axis 0
                for node in scope.nodes:
                    if letters.find("N") > 0 and scope.relative(node) == candidates[0].call.name_of(key):
                        describe(group, node, letters)
            found.append(candidates)
            report.notes += [why] if why else []
            report.groups += [{"name": scope.group, "count": scope.count}] if scope.group else []
            report.datasets += scope.nodes
    report.bytes = sum(map(os.path.getsize, paths))
    for candidates in found:
        report.suggest(candidates)
    for name in dict.fromkeys(node.pandas for node in nodes if node.pandas):
        frame = f"pandas.read_hdf({first!r}, {name!r})"
        report.notes.append(f"pandas wrote {name}: ManifestSource takes the DataFrame {frame}")
    if not report.suggestions and not report.notes:
        report.notes.append('no dataset looks like samples of a network: name yours in fields={"x": NAME, "y": NAME}')
    if len(nodes) == MOST_DATASETS:
        report.notes.append(f"no more than the first {MOST_DATASETS:,} datasets are looked at")
    return report
