"""The classes that saved models name, for whoever loads one."""

from importlib import import_module

_ROOMS_WITH_CLASSES = (
    "conversion.own_policy",
    "fp8.convert",
    "lean.chunked_head",
    "lean.chunked_loss",
    "lean.gelu",
    "lean.lean_model",
    "lean.recompute",
    "lean.self_attention",
    "lean.training_step",
    "loss_scaling.undone_step",
    "loss_scaling.optimizer",
    "stability.stabilized",
)


def register_classes() -> None:
    """Imports the classes that saved models name: Keras finds only classes registered by then."""
    for name in _ROOMS_WITH_CLASSES:
        import_module(f"keras_mp.{name}")
