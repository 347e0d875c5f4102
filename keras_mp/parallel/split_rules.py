"""Which axes of weights tensor parallelism splits.

A model's rules stand with the model: they hold for the names that it gives its layers, which mean nothing elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import keras

from keras_mp.parallel.plan import AXES, Plan, Rules
from keras_mp.rebuild.state import RULES
from keras_mp.rebuild.walk import layers_by_path

Build = TypeVar("Build", bound=Callable[..., Any])
LayoutMapOf = Callable[..., keras.distribution.LayoutMap]
"""`get_layout_map` of a KerasHub backbone."""

_scopes: list[Plan] = []


def tensor_rules(rules: Rules) -> Callable[[Build], Build]:
    """Names the weights that `distribute("tensor")` splits.

    It decorates the function that builds the model.

    ```
    @keras_mp.parallel.tensor_rules(((r"hidden[/_]kernel", (None, "model")), (r"logits[/_]kernel", ("model", None))))
    def build(): ...
    ```

    Within the scope of `distribute("tensor")` they hold from the call of the function to the end of the scope, so also
    for what `stabilize` and `convert` make of the model, and for the optimizer. The model has them as its attribute
    `tensor_rules`, and so have the models that are made of it: there `inspect(..., strategy="tensor")` reads them. A
    model that is loaded from a file has none.

    Args:
        rules: pairs of a regular expression, which is searched in the path of a weight and of its slots in an
            optimizer (where the path has `_` for `/`), and for each dimension "model", to split it over the devices
            that share a weight, "batch", to split it over those that share a batch, or None.

    Returns:
        A decorator.

    Raises:
        ValueError: If a rule is no such pair.
    """
    check_rules(rules)
    rules = tuple((pattern, axes) for pattern, axes in rules)  # as given, a list is not hashable

    def decorate(build: Build) -> Build:
        @functools.wraps(build)
        def built(*args: Any, **kwargs: Any) -> Any:
            if _scopes:
                _scopes[-1].declared.extend(rule for rule in rules if rule not in _scopes[-1].declared)
            model = build(*args, **kwargs)
            if isinstance(model, keras.Model):
                model.tensor_rules = rules
            return model

        return built  # type: ignore[return-value]

    return decorate


@contextmanager
def takes_rules(plan: Plan) -> Iterator[None]:
    """Scope in which a plan takes new models' rules."""
    _scopes.append(plan)
    try:
        yield
    finally:
        _scopes.pop()


def with_rules_of(plan: Plan, model: keras.Model) -> Plan:
    """Gives a plan without rules those of a built model.

    Raises:
        ValueError: no weight of the model would be split.
    """
    if plan.strategy != "tensor":
        return plan
    if plan.rules is None:
        layers = [model, *layers_by_path(model).values()]
        rules = dict.fromkeys(rule for layer in layers for rule in getattr(layer, RULES, ()))
        plan = dataclasses.replace(plan, rules=tuple(rules))
    plan.check_matched(any(any(plan.axes_of(v.path, tuple(v.shape), str(v.dtype))) for v in model.variables))
    return plan


def check_rules(rules: Rules) -> None:
    """Raises a ValueError that names the rule which is none."""
    for rule in rules:
        try:
            pattern, axes = rule
            right = bool(re.compile(pattern)) and isinstance(axes, tuple) and set(axes) <= {None, *AXES}
        except (TypeError, ValueError, re.error):
            right = False
        if not right:
            raise ValueError(
                f"rules holds {rule!r}, which must be a regular expression and, for each dimension of a weight, "
                "'model', 'batch' or None: (r\"hidden[/_]kernel\", (None, 'model'))"
            )


def rules_of_layout_map(layout_map_of: LayoutMapOf, plan: Plan) -> Rules:
    """Makes rules of the layout map of a KerasHub backbone.

    Raises:
        ValueError: `layout_map_of` returns something else.
    """
    mesh = keras.distribution.DeviceMesh(plan.shape, list(plan.axes), list(plan.devices))
    batch, model = AXES
    layout_map = layout_map_of(mesh, model_parallel_dim_name=model, data_parallel_dim_name=batch)
    if not isinstance(layout_map, keras.distribution.LayoutMap):
        raise ValueError(
            f"rules={layout_map_of!r} returned {layout_map!r}, and must return a keras.distribution.LayoutMap, as "
            "keras_hub.models.GemmaBackbone.get_layout_map does"
        )
    rules = tuple((path.replace("/", "[/_]"), tuple(layout.axes)) for path, layout in layout_map.items())
    check_rules(rules)
    return rules
