"""A name in quotes stands for an attribute that exists: a renamed one would be asked for, and never found."""

import ast
import dataclasses
import importlib.util
import pkgutil
import re
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "keras_mp"
FUNCTIONS = {"hasattr", "getattr", "setattr", "delattr", "__setattr__"}
# Attributes that users may give their callbacks and training recipes, each with a class that has it.
OF_USERS = {
    "supports_multiprocess": "keras_mp.loss_scaling.monitor:PrecisionMonitor",
    "interrupted": "recipes.common.fit:Training",
    "hosts": "recipes.common.config:TrainingConfig",
    "host_index": "recipes.common.config:TrainingConfig",
}
# Attributes of protobuf's messages, of named tuples, of `os` on Linux, of JAX's config in C++, and of Keras 3.13.
OF_LIBRARIES = {"ListFields", "_fields", "O_DIRECTORY", "sched_getaffinity", "jax_traceback_in_locations_limit"}
OF_LIBRARIES |= {"_verify_dataset"}


def literals(tree):
    """The attributes that a module names in quotes, in `getattr` and its like and in `vars(x)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if function in FUNCTIONS and len(node.args) > 1:
                yield node.args[1]
            elif function in ("get", "pop", "setdefault") and holds_attributes(node.func.value):
                yield node.args[0]
        elif isinstance(node, ast.Subscript) and holds_attributes(node.value):
            yield node.slice


def holds_attributes(node):
    is_dict = isinstance(node, ast.Attribute) and node.attr == "__dict__"
    return is_dict or isinstance(node, ast.Call) and getattr(node.func, "id", "") == "vars"


def defined(tree):
    """The attributes that a module defines itself: methods, fields, names of a class, and what it assigns."""
    writers = ("setattr", "__setattr__", "setdefault")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield from (
                s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
            )
            names = [name for s in node.body if isinstance(s, ast.Assign) for name in s.targets]
            yield from (name.id for name in names if isinstance(name, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and holds_attributes(node.value):
            yield getattr(node.slice, "value", "")
        elif isinstance(node, ast.Call) and (getattr(node.func, "attr", "") or getattr(node.func, "id", "")) in writers:
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def test_each_name_exists_in_the_module_itself_or_in_a_library():
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        tree, module = ast.parse(path.read_text()), str(path.relative_to(PACKAGE.parent))
        named = [node for node in literals(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        own = set(defined(tree))
        for node in named:
            if node.value not in own and not node.value.startswith("__"):
                places[node.value].append(f"{module}:{node.lineno}")
    unknown = set(places) - set(OF_USERS) - OF_LIBRARIES
    for library in ("keras", "keras_hub", "jax"):
        spec = importlib.util.find_spec(library)
        for source in Path(spec.origin).parent.rglob("*.py") if spec else ():
            if unknown and not source.name.endswith("_test.py"):
                text = source.read_text(encoding="utf-8")
                unknown -= {name for name in unknown if name in text and is_attribute(name, text)}
    assert not unknown, {name: places[name] for name in sorted(unknown)}


def is_attribute(name, text):
    return re.search(rf"\.{name}\b|\bdef {name}\b|^\s+{name}\s*[:=]|\['?\"{name}\"", text, re.MULTILINE) is not None


def test_what_users_define_has_the_names_that_the_examples_give_it():
    for name, where in OF_USERS.items():
        cls = pkgutil.resolve_name(where)
        fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
        assert name in fields or hasattr(cls, name), (name, where)
