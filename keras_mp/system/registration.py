"""Registers the classes that saved models name with Keras."""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_ROOMS_WITH_CLASSES = (
    "conversion.to_float32",
    "fp8.convert",
    "qat.quantization_aware",
    "lean.chunked_loss",
    "lean.gelu",
    "lean.lean_model",
    "lean.recompute",
    "lean.training_step",
    "loss_scaling.undone_step",
    "loss_scaling.optimizer",
    "stability.stabilized",
    "training.prepare",
    "training.revert",
)


def register_classes() -> None:
    """Imports the classes that saved models name."""
    for name in _ROOMS_WITH_CLASSES:
        import_module(f"keras_mp.{name}")


def register_with_keras() -> None:
    """Registers the classes once Keras is imported."""
    if "keras" in sys.modules:
        register_classes()
    elif not any(isinstance(finder, _AfterKeras) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterKeras())


class _AfterKeras(MetaPathFinder):
    """Finds Keras once, and registers the classes after its import."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != "keras":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                # A room that imports Keras is not whole yet: then the first use of a public name registers them.
                if all(name.startswith("keras_mp.system") for name in sys.modules if name.startswith("keras_mp.")):
                    register_classes()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
