"""Counts what the structure of the library is judged by, in a checkout of any commit.

python benchmarks/structure.py [FOLDER ...]        # docs/maintainers/architecture.md; 10 seconds
python benchmarks/structure.py --visits keras_mp.loss_scaling.optimizer:LossScaleOptimizer.apply

A function changes a live object of Keras if it assigns to the `__class__` or the `__dict__` of any object, or to an
attribute that Keras's own classes have, of an object that is not `self` and that the function neither made nor copied
nor annotates with another type. The sources of the installed Keras say which attributes these are.

--visits follows names from a function through imports: what is called or handed on, methods of `self` and `super()`,
and constructors, each once, in the order of the source; of each file it says from how many functions of others. It does
not know the classes of other objects, so their methods are not followed. Of the two backends it takes TensorFlow.
"""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
# Sources of Keras whose classes' objects the kit is given.
# The product that answers without the chip, also by the names that it had; and what stands below it and below the kit.
PLANNER = ("keras_mp.planner", "keras_mp.xla", "keras_mp.advice")
BACKENDS = ("tensorflow", "jax")
GROUND = ("keras_mp.reporting", "keras_mp.system", "keras_mp.precision.chip")
OWNERS = "backend/common layers/layer.py layers/core models ops/operation.py optimizers random trainers/trainer.py"


def lines_of(text: str) -> Counter[str]:
    """How many lines are code, docstrings (those of attributes, too), comments and blank."""
    strings, code = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            strings.update(range(node.lineno, node.end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    counts = Counter({"code": len(code - strings), "docstrings": len(strings)})
    others = [line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in code]
    return counts + Counter({"comments": len([*filter(None, others)]), "blank lines": others.count("")})


def modules_of(root: Path) -> dict[str, ast.Module]:
    """The modules of the library, parsed, by their dotted names."""
    files = {".".join(file.relative_to(root).with_suffix("").parts): file for file in root.glob("keras_mp/**/*.py")}
    return {name.removesuffix(".__init__"): ast.parse(file.read_text()) for name, file in sorted(files.items())}


def file_of(root: Path, module: str) -> str:
    """The path of a module's file."""
    return (path := module.replace(".", "/")) + ("/__init__.py" if (root / path).is_dir() else ".py")


def file_rows(root: Path) -> list[str]:
    """A row for each file of more than ten lines: its path, and the first line of its docstring."""
    rows = []
    for name, module in modules_of(root).items():
        file = file_of(root, name)
        if len((root / file).read_text().splitlines()) > 10:
            rows.append(
                f"| `{file.removeprefix('keras_mp/')}` | {(ast.get_docstring(module) or '').partition(chr(10))[0]} |"
            )
    return rows


def engines_of(name: str, modules: dict[str, ast.Module], backend: str) -> list[tuple[str, tuple[str, str]]]:
    """The names that a module gives to a room's functions for a backend, each with the room and its module of these."""
    assigned = [
        node for node in modules[name].body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    ]
    engines = [node for node in assigned if ast.unparse(node.value.func) == "backend.engine_of"]
    package = name if f"{name}._{backend}" in modules else name.rpartition(".")[0]
    rooms = [getattr(node.value.args[0], "value", package) for node in engines]
    return [(node.targets[0].id, (room, f"_{backend}")) for node, room in zip(engines, rooms, strict=True)]


def graph_of(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Which modules of the library each imports."""
    graph = {}
    for name, module in modules.items():
        nodes = [node for node in ast.walk(module) if isinstance(node, (ast.Import, ast.ImportFrom))]
        pairs = [(getattr(node, "module", alias.name), alias.name) for node in nodes for alias in node.names]
        pairs += [(of, part) for backend in BACKENDS for _, (of, part) in engines_of(name, modules, backend)]
        imported = {f"{of}.{part}" if f"{of}.{part}" in modules else of for of, part in pairs}
        graph[name] = imported & (modules.keys() - {name})
    return graph


def rooms_of(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same graph of folders and files directly below the library."""
    rooms: dict[str, set[str]] = {}
    for name, others in graph.items():
        room = name.split(".")[1]
        rooms.setdefault(room, set()).update({other.split(".")[1] for other in others} - {room})
    return rooms


def reached_from(graph: dict[str, set[str]], start: str) -> set[str]:
    """What a member of a graph imports, at once or by others."""
    seen, waiting = set(), [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def floors_of(graph: dict[str, set[str]]) -> int:
    """How many members the longest chain of imports has; those that import each other count as one."""
    reached = {name: reached_from(graph, name) for name in graph}

    @cache
    def height(name: str) -> int:
        return 1 + max((height(other) for other in reached[name] if name not in reached[other]), default=0)

    return max(map(height, graph))


def circles_of(graph: dict[str, set[str]]) -> int:
    """How many modules import each other, at once or by others; also for type checkers alone."""
    return sum(name in reached_from(graph, name) for name in graph)


def grain_of(modules: dict[str, ast.Module], code: int) -> dict[str, int]:
    """What functions and names of the library are like; its forms for TensorFlow and for JAX count as one module."""
    functions = [node for tree in modules.values() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    sizes = sorted(node.end_lineno - node.lineno + 1 for node in functions)
    homes: dict[str, set[str]] = {}
    first_lines = []
    for name, tree in modules.items():
        for node in tree.body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
                home = re.sub(r"[._](tensorflow|jax)\w*", "", name)
                homes.setdefault(node.name, set()).add(home)
                first_lines.append((ast.get_docstring(node) or "").split("\n")[0])
    return {
        "functions for 1,000 lines of code": 1000 * len(functions) // code,
        "of them private": 1000
        * sum(node.name.startswith("_") and node.name[-2:] != "__" for node in functions)
        // code,
        "lines of the longest tenth of functions, at least": sizes[len(sizes) * 9 // 10],
        "public functions and classes that several modules name alike": sum(
            len(places) > 1 for places in homes.values()
        ),
        "first lines of their docstrings with more than ten words": sum(len(line.split()) > 10 for line in first_lines),
    }


def taken_by_planner(modules: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """The names that the planner imports from the rest of the library but the ground, each with its module."""
    nodes = [node for name, tree in modules.items() if name.startswith(PLANNER) for node in ast.walk(tree)]
    found = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras_mp")]
    names = {(node.module, alias.name) for node in found for alias in node.names}
    return {(of, name) for of, name in names if not f"{of}.{name}".startswith((*PLANNER, *GROUND))}


def public_names(module: ast.Module) -> set[str]:
    """The names without an underscore that a module defines at its top."""
    names = {getattr(node, "name", "_") for node in module.body}
    targets = [target for node in module.body for target in getattr(node, "targets", [getattr(node, "target", None)])]
    names |= {node.id for target in targets if target for node in ast.walk(target) if isinstance(node, ast.Name)}
    return {name for name in names if not name.startswith("_")}


@cache
def attributes_of_keras() -> frozenset[str]:
    """The methods of Keras's classes, and what these assign to `self`."""
    spec = find_spec("keras")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("Keras is not installed, whose sources say which attributes are its own")
    paths = [Path(spec.origin).parent / "src" / owner for owner in OWNERS.split()]
    trees = [ast.parse(f.read_text()) for path in paths for f in (path.rglob("*.py") if path.is_dir() else [path])]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = {node.name for cls in classes for node in cls.body if isinstance(node, FUNCTIONS)}
    stored = [node for cls in classes for node in ast.walk(cls) if isinstance(getattr(node, "ctx", None), ast.Store)]
    names |= {node.attr for node in stored if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}
    return frozenset(name for name in names if not name.startswith("__"))


def changes_of(root: Path) -> dict[tuple[str, str], str]:
    """Where a live object of Keras is changed: the line, by file and by function with what is around it."""
    changes: dict[tuple[str, str], str] = {}

    def search(node: ast.AST, inside: list[ast.AST], file: str, top: set[str]) -> None:
        for child in ast.iter_child_nodes(node):
            changed, functions = _changed(child), [scope for scope in inside if isinstance(scope, FUNCTIONS)]
            if changed and functions and _is_keras(*changed, functions, top):
                name = ".".join(scope.name for scope in inside)
                changes.setdefault((file, name), f"line {child.lineno}: {ast.unparse(child)}")
            search(child, [*inside, child] if isinstance(child, (*FUNCTIONS, ast.ClassDef)) else inside, file, top)

    for name, module in modules_of(root).items():
        search(module, [], file_of(root, name), {getattr(node, "name", "") for node in module.body})
    return changes


def _changed(node: ast.AST) -> tuple[str, str | None] | None:
    """The object whose attribute a node changes, and the attribute, None where it is computed."""
    stored = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
    if stored and isinstance(node, ast.Attribute):
        return ast.unparse(node.value), node.attr
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if stored and isinstance(node, ast.Subscript):
        called = f"{ast.unparse(node.value)}.update"
    if of := re.fullmatch(r"(?:vars\((.+)\)|(.+)\.__dict__)\.(?:pop|update|setdefault)", called):
        return of[1] or of[2], "__dict__"
    if re.fullmatch(r"(set|del)attr|object\.__(set|del)attr__", called):
        return ast.unparse(node.args[0]), node.args[1].value if isinstance(node.args[1], ast.Constant) else None
    return None


def _is_keras(holder: str, attribute: object, functions: list[ast.AST], top: set[str]) -> bool:
    """Whether an object may be one of Keras's, by the attribute and by what is known of the name."""
    if attribute == "__class__" or (attribute == "__dict__" and holder != "self"):
        return True
    name = re.split(r"\W", holder)[0]
    if holder in ("self", "cls") or name in top or not (attribute is None or attribute in attributes_of_keras()):
        return False
    nodes = [node for function in functions for node in ast.walk(function)]
    types = [getattr(node, "annotation", None) for node in nodes if getattr(node, "arg", "") == name]
    if any(types):
        return bool(re.search(r"\bkeras\.|\bAny\b|\b(Layer|Model)$", ast.unparse(next(filter(None, types)))))
    made = [ast.unparse(node) for node in nodes if isinstance(node, ast.Assign)]  # by a class, whose name is capital
    return not any(re.match(rf"{re.escape(name)} = ([\w.]+\.)?(_?[A-Z]\w*|copy)\(", text) for text in made)


def listed(root: Path) -> set[tuple[str, str]]:
    """The files and functions in the columns "in" and "by" of docs/maintainers/changes-of-keras.md."""
    text = page.read_text() if (page := root / "docs" / "maintainers" / "changes-of-keras.md").exists() else ""
    return {(f"keras_mp/{file}", name) for file, name in re.findall(r"\| `(\w+/.*)` \| `(\w+)` \|\n", text)}


def not_listed(root: Path) -> dict[tuple[str, str], str]:
    """Those of `changes_of` that the list lacks."""
    return {at: how for at, how in changes_of(root).items() if (at[0], at[1].split(".")[-1]) not in listed(root)}


class Code:
    """The functions and classes of a checkout, by the names that modules give them."""

    def __init__(self, root: Path) -> None:
        self._modules = modules_of(root)
        self._own: dict[str, dict[str, ast.AST]] = {}
        self._from: dict[str, dict[str, tuple[str, str]]] = {}
        self._class: dict[ast.AST, ast.ClassDef] = {}
        self.callers: dict[str, set[tuple[str, str]]] = {}  # of a module that was visited: functions of others
        for module, tree in self._modules.items():
            defined = [node for node in tree.body if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
            self._own[module] = {node.name: node for node in defined}
            self._class |= {part: cls for cls in defined if isinstance(cls, ast.ClassDef) for part in cls.body}
            imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            names = [(part.asname or part.name, (node.module, part.name)) for node in imports for part in node.names]
            names += engines_of(module, self._modules, BACKENDS[0])
            self._from[module] = {name: source for name, source in reversed(names) if source[0] in self._modules}

    def member(self, module: str, name: str) -> tuple[str, ast.AST | None] | None:
        """What a module has under a name: where it is defined, and its definition, None of a module."""
        if name in self._own[module]:
            return module, self._own[module][name]
        source = self._from[module].get(name) or (self._from[module].get("*", ("", ""))[0], name)
        if source[0] and (target := self.member(*source)):
            return target
        submodule = f"{module}.{name}"
        return (submodule, None) if submodule in self._modules else None

    def method(self, module: str, cls: ast.AST, name: str, own: bool = True) -> tuple[str, ast.AST] | None:
        """The method of a class, or of the classes that it extends."""
        for node in getattr(cls, "body", ()) if own else ():
            if isinstance(node, FUNCTIONS) and node.name == name:
                return module, node
        bases = (self.resolve(module, base, None) for base in getattr(cls, "bases", ()))
        return next((method for base in bases if base and (method := self.method(*base, name))), None)

    def resolve(self, module: str, node: ast.AST, cls: ast.AST | None) -> tuple[str, ast.AST | None] | None:
        """What an expression of names and attributes is, within a class."""
        if not isinstance(node, ast.Attribute):
            return self.member(module, node.id) if isinstance(node, ast.Name) else None
        if (of := ast.unparse(node.value)) in ("self", "cls", "super()"):
            return self.method(module, cls, node.attr, own=of != "super()") if cls else None
        if holder := self.resolve(module, node.value, cls):
            return self.method(*holder, node.attr) if holder[1] else self.member(holder[0], node.attr)
        return None

    def visits(self, start: str) -> dict[str, list[str]]:
        """The functions that are reached from `module:function` or `module:Class.method`, by module, in order."""
        module, _, path = start.partition(":")
        target = self.resolve(module, ast.parse(path, mode="eval").body, None) if module in self._own else None
        if target is None or target[1] is None:
            raise SystemExit(f"there is no function {start}")
        visited: dict[str, list[str]] = {}
        self._visit(*target, visited)
        return visited

    def _visit(self, module: str, node: ast.AST, visited: dict[str, list[str]]) -> None:
        cls = self._class.get(node)
        name = f"{cls.name}.{node.name}" if cls else node.name
        if name in visited.setdefault(module, []):
            return
        visited[module].append(name)
        if isinstance(node, ast.ClassDef):
            if made := self.method(module, node, "__init__"):
                self._visit(*made, visited)
            return
        below = [part for statement in node.body for part in ast.walk(statement) if hasattr(part, "lineno")]
        parts = sorted(below, key=lambda part: (part.lineno, part.col_offset))
        own = {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        own |= {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
        for part in parts:
            of = part.func if isinstance(part, ast.Call) else part
            target = None if getattr(of, "id", "") in own else self.resolve(module, of, cls)
            if target and (isinstance(target[1], FUNCTIONS) or (target[1] and of is not part)):
                if target[0] != module:
                    self.callers.setdefault(target[0], set()).add((module, name))
                self._visit(*target, visited)


def measures_of(root: Path) -> dict[str, int]:
    """What is counted, by name."""
    measures = {}
    for title, folder in (("library", "keras_mp"), ("tests", "tests")):
        texts = [file.read_text() for file in root.glob(f"{folder}/**/*.py")]
        measures[f"{title}: files"] = len(texts)
        lines = sum(map(lines_of, texts), Counter())
        measures |= {f"{title}: {kind}": lines[kind] for kind in ("code", "docstrings", "comments", "blank lines")}
    modules = modules_of(root)
    files = [root / file_of(root, name) for name in modules if name.startswith(PLANNER)]
    measures["planner: files"] = len(files)
    measures["planner: lines"] = sum(len(file.read_text().splitlines()) for file in files)
    measures["planner: names that it takes from the kit"] = len(taken_by_planner(modules))
    package = modules.pop("keras_mp")
    if (stub := root / "keras_mp" / "__init__.pyi").exists():  # names every public module
        package.body += ast.parse(stub.read_text()).body
    measures |= grain_of(modules, measures["library: code"])
    importers = Counter(name for others in graph_of(modules | {"keras_mp": package}).values() for name in others)
    once = [name for name in modules if importers[name] == 1 and not file_of(root, name).endswith("__init__.py")]
    rooms, changes = rooms_of(graph_of(modules)), changes_of(root)
    below = reached_from(graph_of(modules), top) | {top} if (top := "keras_mp.fp8.convert") in modules else set()
    return measures | {
        "lines under convert, by imports": sum(len((root / file_of(root, n)).read_text().splitlines()) for n in below),
        "rooms: folders, and files on the root": len(rooms),
        "floors: the longest chain of imports, of rooms": floors_of(rooms),
        "modules in a circle of imports": circles_of(graph_of(modules)),
        "modules with exactly one importer": len(once),
        "public names at the top of modules": sum(len(public_names(module)) for module in modules.values()),
        "functions that change a live object of Keras": len(changes),
        "of them named in docs/maintainers/changes-of-keras.md": len(changes) - len(not_listed(root)),
    }


def main() -> None:
    """Prints the table, of one or more checkouts side by side, and the changes that the list does not name."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[Path(__file__).resolve().parents[1]])
    parser.add_argument("--visits", metavar="MODULE:FUNCTION", help="print the files that a value visits from there")
    parser.add_argument("--files", action="store_true", help="print a row for each file, as in architecture.md")
    options = parser.parse_args()
    folders = [folder.resolve() for folder in options.folders]
    if options.files:
        print(*(row for folder in folders for row in file_rows(folder)), sep="\n")
        return
    if options.visits:
        for folder in folders:
            visited = (code := Code(folder)).visits(options.visits)
            print(f"{folder.name}: {len(visited)} files, {sum(map(len, visited.values()))} functions")
            for module, names in visited.items():
                callers = len(code.callers.get(module, ()))
                print(f"{file_of(folder, module)}, from {callers} functions: {', '.join(names)}")
        return
    columns = [measures_of(folder) for folder in folders]
    print(f"| measure | {' | '.join(folder.name for folder in folders)} |\n| --- |{' ---: |' * len(folders)}")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(f'{column[name]:,}' for column in columns)} |")
    for folder in folders:
        for (file, function), how in not_listed(folder).items():
            print(f"{folder.name}, not in docs/maintainers/changes-of-keras.md: {file}, {function}, {how}")


if __name__ == "__main__":
    main()
