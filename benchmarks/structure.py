"""Counts what the structure of the library is judged by, in a checkout of any commit.

python benchmarks/structure.py [FOLDER]        # docs/architecture.md; seconds
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# An attribute of Keras, or of what Keras computes with, that is replaced while a block runs or for good.
HOSTS = ("keras", "tf", "tensorflow", "jax", "backend_lib")


def modules_of(root: Path) -> dict[str, ast.Module]:
    """The modules of the library, parsed, by their dotted names."""
    files = {".".join(file.relative_to(root).with_suffix("").parts): file for file in root.glob("keras_mp/**/*.py")}
    return {name.removesuffix(".__init__"): ast.parse(file.read_text()) for name, file in files.items()}


def imports_of(module: ast.Module) -> Iterator[tuple[str, ...]]:
    """The names that a module may import with each statement, the longest first; those for type checkers are left out."""
    skipped = {
        id(inner)
        for node in ast.walk(module)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(module):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.name,)


def graph_of(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Which modules of the library each imports."""
    return {
        name: {next((choice for choice in choices if choice in modules), "") for choices in imports_of(module)}
        - {"", name}
        for name, module in modules.items()
    }


def circles_of(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules each of which imports the others, directly or not."""

    @cache
    def reached(start: str) -> frozenset[str]:
        seen, waiting = set(), [start]
        while waiting:
            for name in graph[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        return frozenset(seen)

    groups = {frozenset({name, *(other for other in reached(name) if name in reached(other))}) for name in graph}
    return [set(group) for group in groups if len(group) > 1]


def floors_of(graph: dict[str, set[str]], circles: list[set[str]]) -> int:
    """How many modules the longest chain of imports has; a circle counts as one."""
    together = {name: min(circle) for circle in circles for name in circle}
    merged: dict[str, set[str]] = {}
    for name, others in graph.items():
        merged.setdefault(together.get(name, name), set()).update(together.get(other, other) for other in others)

    @cache
    def height(name: str) -> int:
        return 1 + max((height(other) for other in merged[name] - {name}), default=0)

    return max(map(height, merged))
