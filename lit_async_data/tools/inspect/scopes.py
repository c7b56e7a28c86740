"""`Scope`: where a suggestion looks for its fields: the file, or groups of equal structure; and words in names."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import glob
import re
from collections.abc import Sequence

from lit_async_data.tools.inspect.contents import Dataset, Tree

# Words in the name of a file, group or dataset that say which stage it is for.
STAGES = {"train": "train", "training": "train", "tr": "train", "val": "val", "valid": "val", "validation": "val"}
STAGES |= {"dev": "val", "test": "test", "testing": "test", "te": "test"}


@dataclasses.dataclass
class Scope:
    """The datasets of a file; or of each group that matches a pattern, where they are told by those of the first."""

    group: str | None
    nodes: list[Dataset]
    groups: list[Tree] = dataclasses.field(default_factory=list)

    def relative(self, node: Dataset) -> str:
        """The name of a dataset as a field has it."""
        return (node.name[len(self.groups[0].name) + 1 :] or ".") if self.groups else node.name

    def report(self, node: Dataset) -> Dataset:
        """The dataset, called by the pattern of its groups."""
        if not self.groups:
            return node
        rows = [shape[0] for shape in self.shapes(node)]
        name = f"{self.group}/{self.relative(node)}".removesuffix("/.")
        spread = (min(rows), max(rows)) if rows else None
        return dataclasses.replace(node, name=name, groups=len(self.groups), rows=spread)

    def shapes(self, node: Dataset) -> set[tuple[int, ...]]:
        """The shapes of a dataset over the groups."""
        end = node.name[len(self.groups[0].name) :] if self.groups else ""
        alike = [n for group in self.groups for n in group.all_nodes() if n.name == group.name + end]
        return {each.shape for each in alike or [node] if each.shape}


def scopes_of(tree: Tree) -> list[Scope]:
    """The whole file without groups of equal structure, and each set of these."""
    nodes, patterns = _split(tree)
    return ([Scope(None, nodes)] if nodes else []) + patterns


def _split(tree: Tree) -> tuple[list[Dataset], list[Scope]]:
    alike = collections.defaultdict(list)
    for group in tree.groups:
        alike[group.structure()].append(group)
    nodes, patterns = list(tree.nodes), []
    for groups in alike.values():
        pattern = _pattern(groups, tree)
        if pattern is not None:
            patterns.append(Scope(pattern, groups[0].all_nodes(), groups))
            continue
        for below, more in map(_split, groups):
            nodes, patterns = nodes + below, patterns + more
    return nodes, patterns


def _pattern(groups: Sequence[Tree], parent: Tree) -> str | None:
    """The pattern that matches these groups and nothing else; None if there is none, or they are stages."""
    names = [group.name.rpartition("/")[2] for group in groups]
    # `group` takes wildcards in its last component only.
    if (
        len(groups) < 2
        or not groups[0].all_nodes()
        or all(stage_of(n)[0] for n in names)
        or glob.has_magic(parent.name)
    ):
        return None
    siblings = [*(n.name for n in parent.nodes), *(g.name for g in parent.groups)]
    others = {each.rpartition("/")[2] for each in siblings} - set(names)
    prefix = glob.escape(common_start(names).rstrip("0123456789"))
    for pattern in (f"{prefix}*", f"{prefix}[0-9]*"):
        if len(fnmatch.filter(names, pattern)) == len(names) and not fnmatch.filter(others, pattern):
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
        found = re.search(rf"(?<![A-Za-z]){word}(?![a-z])", name) if word.lower() in STAGES else None
        if found is not None:
            rest = (name[: found.start()].rstrip("_-./ ") + "/" + name[found.end() :].lstrip("_-./ ")).strip("/")
            return STAGES[word.lower()], rest
    return "", name


def words(name: str) -> list[str]:
    """The words of a name: ``testImages_1`` has test, Images and 1."""
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)


def has_word(name: str, pattern: str) -> bool:
    """Whether a word of the last component of a name is one of a pattern."""
    return any(re.fullmatch(pattern, word.lower()) for word in words(name.rpartition("/")[2]))
