"""All matrix products of a training recipe in FP8."""

from typing import Any

from keras_mp.training import PolicyChoice


def every_product(choice: PolicyChoice, scaling: str) -> dict[str, Any] | bool:
    """Which products run in FP8, as `keras_mp.prepare` takes it.

    At a training recipe's sizes FP8 gains no speed, so none would be chosen by size: the purpose is to
    see what FP8 does to the training.

    Args:
        choice: the result of `keras_mp.set_global_policy`.
        scaling: the name of one of the kit's scalings.

    Returns:
        For the policy "fp8" all of them, else False.
    """
    return {"scaling": scaling, "select": lambda path, layer: True} if choice.policy == "fp8" else False
