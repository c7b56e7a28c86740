"""`Scope`: where a suggestion looks for its fields: the file, or groups of equal structure."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import glob
import re
from collections.abc import Iterator, Sequence
from typing import Any

from lit_async_data.tools.inspect.contents.tree import Node, Tree

# Words in the name of a file, group or dataset that say which stage it is for.
STAGES = {"train": "train", "training": "train", "tr": "train", "val": "val", "valid": "val", "validation": "val"}
STAGES |= {"dev": "val", "test": "test", "testing": "test", "te": "test"}


@dataclasses.dataclass
class Scope:
    """Datasets that may be fields of one source.

    Attributes:
        group: The pattern of their groups; None for the whole file.
        nodes: The datasets; of a pattern, those of its first group.
        groups: The groups of the pattern, in order.
        name: What stands before names in tables: the pattern, or nothing.
    """

    group: str | None
    nodes: list[Node]
    groups: list[Tree] = dataclasses.field(default_factory=list)

    def relative(self, node: Node) -> str:
        """The name of a dataset as a field has it."""
        return node.name[len(self.groups[0].name) + 1 :] if self.groups else node.name

    def shown(self, node: Node) -> str:
        """The name of a dataset with the pattern of its groups."""
        return f"{self.group}/{self.relative(node)}" if self.group else node.name

    def rows(self, node: Node) -> tuple[int, int] | None:
        """Least and most rows of a dataset over the groups."""
        name = self.relative(node)
        shapes = [
            each.shape for group in self.groups for each in group.all_nodes() if each.name == f"{group.name}/{name}"
        ]
        counts = [shape[0] for shape in shapes or [node.shape] if shape]
        return (min(counts), max(counts)) if counts else None


def scopes_of(tree: Tree) -> list[Scope]:
    """The whole file without groups of equal structure, and each set of these. A set has one row in tables."""
    rest, patterns = _split(tree)
    return ([Scope(None, rest)] if rest else []) + patterns


def _split(tree: Tree) -> tuple[list[Node], list[Scope]]:
    alike: dict[Any, list[Tree]] = collections.defaultdict(list)
    for group in tree.groups:
        alike[group.structure()].append(group)
    nodes, patterns = list(tree.nodes), []
    taken = set()
    for groups in alike.values():
        pattern = _pattern(groups, tree)
        if pattern is not None:
            taken |= {group.name for group in groups}
            patterns.append(Scope(pattern, list(groups[0].all_nodes()), groups))
    for group in tree.groups:
        if group.name not in taken:
            below, more = _split(group)
            nodes, patterns = nodes + below, patterns + more
    return nodes, patterns


def _pattern(groups: Sequence[Tree], parent: Tree) -> str | None:
    """The pattern that matches these groups and nothing else; None if there is none, or they are stages."""
    names = [group.name.rpartition("/")[2] for group in groups]
    if len(groups) < 2 or not any(groups[0].all_nodes()) or all(stage_of(name)[0] for name in names):
        return None
    if glob.has_magic(parent.name):  # `group` takes wildcards in its last component only
        return None
    all_names = [*(node.name for node in parent.nodes), *(group.name for group in parent.groups)]
    others = {name.rpartition("/")[2] for name in all_names} - set(names)
    prefix = glob.escape(common_start(names).rstrip("0123456789"))
    for pattern in dict.fromkeys((f"{prefix}*", f"{prefix}[0-9]*", "*")):
        matched = fnmatch.filter(names, pattern)
        if len(matched) == len(names) and not fnmatch.filter(others, pattern):
            return f"{parent.name}/{pattern}" if parent.name else pattern
    return None


def common_start(texts: Sequence[str]) -> str:
    """The characters that all texts begin with."""
    first, last = min(texts), max(texts)
    return first[: next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def stage_of(name: str) -> tuple[str, str]:
    """The stage that a name is for, and the name without the word for it; the stage is empty if there is none.

    Example:
        >>> stage_of("X_train"), stage_of("test/images"), stage_of("strain")
        (('train', 'X'), ('test', 'images'), ('', 'strain'))
    """
    for word in words(name):
        if word.lower() in STAGES:
            found = re.search(rf"(?<![A-Za-z]){re.escape(word)}(?![a-z])", name)
            if found is not None:
                rest = (name[: found.start()].rstrip("_-./ ") + "/" + name[found.end() :].lstrip("_-./ ")).strip("/")
                return STAGES[word.lower()], rest
    return "", name


def words(name: str) -> Iterator[str]:
    """The words of a name: ``testImages_1`` has test, Images and 1."""
    for found in re.finditer(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name):
        yield found[0]
