"""Builds a Keras optimizer whose slots are float32 or stored in fewer bits, and that sums no gradients of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from keras_mp.loss_scaling.inner_optimizer import leaves
from keras_mp.loss_scaling.state_creation import creating, has_slots, state_dtype_of
from keras_mp.loss_scaling.state_files import load_with_dtypes
from keras_mp.loss_scaling.wide_weight import is_narrow


def check_state_dtype_of_built(optimizer: keras.optimizers.Optimizer, state_dtype: str) -> None:
    """Checks that the slots of an optimizer that is built are stored in a dtype.

    Raises:
        ValueError: If they are stored in another.
    """
    for leaf in leaves(optimizer):
        stored = state_dtype_of(leaf)
        if leaf.built and stored != state_dtype:
            raise ValueError(
                f"state_dtype={state_dtype!r} needs an optimizer that is not built, and {leaf.name!r} has its slots in "
                f"{stored} already: make a new one, for instance by type(optimizer).from_config("
                f"optimizer.get_config()), or pass state_dtype={stored!r}"
            )


def _check_slots(optimizer: keras.optimizers.Optimizer) -> None:
    for built in leaves(optimizer):
        narrow = next((variable for variable in built.variables if is_narrow(variable)), None)
        if built.built and narrow is not None and not has_slots(built):
            raise ValueError(
                f"optimizer {built.name!r} is built already, with {narrow.path!r} in bfloat16 as Keras makes it, whose "
                "changes would be lost: make a new one, for instance by type(optimizer).from_config("
                "optimizer.get_config())"
            )


def build(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable], state_dtype: str = "float32") -> None:
    """Builds an optimizer without its own sums of gradients: ours are float32, and one for each replica.

    Args:
        optimizer: the optimizer.
        variables: the model's trainable variables.
        state_dtype: what its slots are stored in: "float32", "bfloat16" or "float8".

    Raises:
        ValueError: If it is built already, with slots in another dtype.
    """
    check_state_dtype_of_built(optimizer, state_dtype)
    _check_slots(optimizer)
    # The weights come first: they may be rounded with words of their own.
    numbers = itertools.count(len(variables))
    with ExitStack() as stack:
        entered = set()

        def enter(leaf: keras.optimizers.Optimizer) -> None:
            if id(leaf) not in entered:
                entered.add(id(leaf))
                stack.enter_context(_building(leaf, state_dtype, numbers))

        for leaf in leaves(optimizer):
            enter(leaf)
        stack.enter_context(_telling_of_leaves(optimizer, enter))
        optimizer.build(variables)
    for saved in (optimizer, *leaves(optimizer)) if state_dtype != "float32" else ():
        load_with_dtypes(saved)


@contextmanager
def _building(leaf: keras.optimizers.Optimizer, state_dtype: str, numbers: Iterator[int]) -> Iterator[None]:
    steps, leaf.gradient_accumulation_steps = leaf.gradient_accumulation_steps, None
    try:
        with creating(leaf, state_dtype, numbers):
            yield
    finally:
        leaf.gradient_accumulation_steps = steps


@contextmanager
def _telling_of_leaves(optimizer: keras.optimizers.Optimizer, enter: Callable[[Any], None]) -> Iterator[None]:
    """Tells of the optimizers that a MultiOptimizer learns of while it is built, from a function of each variable."""
    # Private: Keras asks the function again for no variable, and it may give a new optimizer each time.
    choose = vars(optimizer).get("_optimizer_map")

    def choosing(variable: keras.Variable) -> keras.optimizers.Optimizer:
        leaf = choose(variable)
        if isinstance(leaf, keras.optimizers.Optimizer):
            enter(leaf)
        return leaf

    if choose is None:
        yield
        return
    vars(optimizer)["_optimizer_map"] = choosing
    try:
        yield
    finally:
        vars(optimizer)["_optimizer_map"] = choose
