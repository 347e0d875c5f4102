"""Counts what the structure of the library is judged by, in a checkout of any commit.

python benchmarks/structure.py [FOLDER ...]        # docs/architecture.md; seconds
"""

import argparse
import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def modules_of(root: Path) -> dict[str, ast.Module]:
    """The modules of the library, parsed, by their dotted names."""
    files = {".".join(file.relative_to(root).with_suffix("").parts): file for file in root.glob("keras_mp/**/*.py")}
    return {name.removesuffix(".__init__"): ast.parse(file.read_text()) for name, file in files.items()}


def imports_of(module: ast.Module) -> Iterator[tuple[str, ...]]:
    """The names that each import of a module may mean, the longest first."""
    for node in ast.walk(module):
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


def rooms_of(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same graph of folders and files directly below the library."""
    rooms: dict[str, set[str]] = {}
    for name, others in graph.items():
        room = name.split(".")[1]
        rooms.setdefault(room, set()).update({other.split(".")[1] for other in others} - {room})
    return rooms


def patches_keras(module: ast.Module) -> bool:
    """Whether a module assigns to an attribute of something imported from Keras, or lists such attributes."""
    aliases = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(module)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and (getattr(node, "module", None) or node.names[0].name).split(".")[0] == "keras"
        for alias in node.names
    }
    stored = [node for node in ast.walk(module) if isinstance(getattr(node, "ctx", None), ast.Store)]
    roots = {ast.unparse(node).split(".")[0] for node in stored if isinstance(node, ast.Attribute)}
    return bool(aliases & roots) or "PATCHES" in [node.id for node in stored if isinstance(node, ast.Name)]


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many lines a function has below its signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def measures_of(root: Path) -> dict[str, int]:
    """What is counted, by name."""
    modules = modules_of(root)
    package = modules.pop("keras_mp")  # names every public module for type checkers
    graph = graph_of(modules)
    rooms = rooms_of(graph)
    examples = [choices[-1].split(".")[0] for module in [package, *modules.values()] for choices in imports_of(module)]
    return {
        "modules": len(modules),
        "files on the root": len(list(root.glob("keras_mp/*.py"))),
        "rooms: folders, and files on the root": len(rooms),
        "floors: the longest chain of imports, of rooms": floors_of(rooms, circles_of(rooms)),
        "circles of imports": len(circles_of(graph)),
        "modules that patch Keras": sum(map(patches_keras, modules.values())),
        "imports of the repository's examples": sum(name in ("models", "recipes") for name in examples),
        "functions over 50 lines, without their docstrings": sum(
            length_of(node) > 50
            for module in modules.values()
            for node in ast.walk(module)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ),
    }


def main() -> None:
    """Prints the table, of one or more checkouts side by side."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[Path(__file__).resolve().parents[1]])
    folders = parser.parse_args().folders
    columns = [measures_of(folder) for folder in folders]
    print("| measure |" + " ".join(f" {folder.name} |" for folder in folders))
    print("| --- |" + " ---: |" * len(folders))
    for name in columns[0]:
        print(f"| {name} |" + "".join(f" {column[name]} |" for column in columns))


if __name__ == "__main__":
    main()
