"""How a file differs from another of the same dataset."""

from __future__ import annotations

from collections.abc import Iterator

from lit_async_data.tools.inspect.contents.tree import Node, Tree

# Differences of one file that are named; the others are counted.
MOST_NAMED = 4


def differences(first: Tree, other: Tree) -> list[str]:
    """What keeps the datasets of a file from being parts of one source with those of the first; in words."""
    mine = {node.name: node for node in first.all_nodes()}
    theirs = {node.name: node for node in other.all_nodes()}
    found = [f"has no {name}" for name in mine if name not in theirs]
    found += [f"has also {name}" for name in theirs if name not in mine]
    found += [line for name, node in mine.items() if name in theirs for line in _of_dataset(node, theirs[name])]
    more = len(found) - MOST_NAMED
    return found if more <= 1 else [*found[:MOST_NAMED], f"and {more} more"]


def _of_dataset(mine: Node, other: Node) -> Iterator[str]:
    if mine.type != other.type:
        yield f"{mine.name}: {other.type} instead of {mine.type}"
    here, there = mine.shape, other.shape
    # The number of rows may differ on whichever axis counts them.
    if here is None or there is None or len(here) != len(there):
        if here != there:
            yield f"{mine.name}: shape {there} instead of {here}"
    elif sum(a != b for a, b in zip(here, there, strict=True)) > (here[:1] != there[:1]):
        yield f"{mine.name}: shape {there} instead of {here}"
    if mine.filters != other.filters:
        yield f"{mine.name}: {', '.join(other.filters) or 'no filters'} instead of {', '.join(mine.filters) or 'none'}"
