"""A LossScaleOptimizer that is right on several replicas, with accumulation, and at the ends of the scale."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import keras
from keras import ops

from keras_mp import backend
from keras_mp.loss_scale import AnyLossScale, LossScale, LossScaleState, NoLossScale, StaticLossScale
from keras_mp.rebuild import layers_by_path

_SETTINGS = tuple(LossScale().get_config())
_SMALLEST_NORMAL_FLOAT16 = 2.0**-14  # IEEE 754 binary16


@keras.saving.register_keras_serializable("keras_mp")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Scales the loss, and skips a step on all replicas when the gradients of one are not finite.

    ```
    a step:  gradients = gradients * (1 / scale), in float32
             finite = every gradient value is finite, on every replica
             scale = loss_scale.next_state(scale, finite)
             if finite:
                 window += gradients
                 if the window holds gradient_accumulation_steps of them:
                     gradients = sum over the replicas of (window / gradient_accumulation_steps)
                     clip once, decay weights, update, average weights
                     window = 0
    ```

    Learning rate, clipping, weight decay, moving averages and accumulation are settings of the inner optimizer. A
    micro-batch that overflows leaves no trace in the window, and `iterations` advances only on applied steps.

    Args:
        inner_optimizer: the Keras optimizer that makes the update.
        loss_scale: `LossScale`, `StaticLossScale` or `NoLossScale`; `LossScale(**settings)` by default.
        name: the optimizer's name.
        **settings: the arguments of `LossScale`; `dynamic_growth_steps` is Keras's name for `growth_interval`.

    Raises:
        TypeError: If inner_optimizer is not an optimizer, or loss_scale is none of the three.
        ValueError: If inner_optimizer scales the loss already, or a setting is unknown, out of range or given twice.
    """

    def __init__(
        self, inner_optimizer: Any, loss_scale: AnyLossScale | None = None, *, name: str | None = None, **settings: Any
    ) -> None:
        _check_unscaled("inner_optimizer", inner_optimizer)
        loss_scale, unknown = _loss_scale_from(loss_scale, settings)
        start = loss_scale.initial_state()
        growth_interval = getattr(loss_scale, "growth_interval", 0)
        # Keras refuses what it does not know, and explains what belongs to the inner optimizer.
        super().__init__(inner_optimizer, float(start.scale), growth_interval, name=name, **unknown)
        self.loss_scale = loss_scale
        self.measures_gradients = False
        with keras.name_scope(self.name):
            self.dynamic_scale = _scalar("dynamic_scale", start.scale, "float32")
            self.step_counter = _scalar("step_counter", start.clean_steps, "int")
            self._hysteresis_left = _scalar("hysteresis_left", start.hysteresis_left, "int")
            self._consecutive_skips = _scalar("consecutive_skips", start.consecutive_skips, "int")
            self._skipped_steps = _scalar("skipped_steps", start.skipped_steps, "int")
            self._gradient_norm = _scalar("gradient_norm", 0.0, "float32")
            self._gradient_underflow = _scalar("gradient_underflow", 0.0, "float32")
        if keras.config.dtype_policy().compute_dtype == "bfloat16":
            warn_if_needless("the global dtype policy", loss_scale)

    def build(self, variables: list[Any]) -> None:
        """Creates the sums of a window and the inner optimizer's variables.

        Args:
            variables: the model's trainable variables.

        Raises:
            ValueError: If several inner optimizers accumulate over different numbers of steps.
        """
        if self.built:
            return
        with _accumulating_nothing(self._leaves):
            self.inner_optimizer.build(variables)
        with keras.name_scope(self.name):
            self._sums = [_sum_of_gradients(variable) for variable in variables] if self._window > 1 else []
        # Not Keras's LossScaleOptimizer.build, which would make the state once more.
        keras.optimizers.Optimizer.build(self, variables)

    @property
    def skipped_steps(self) -> Any:
        """How many steps were skipped in all: an int variable of shape ()."""
        return self._skipped_steps

    @property
    def consecutive_skips(self) -> Any:
        """How many steps were skipped in a row, up to now: an int variable; 0 says that the last step was finite."""
        return self._consecutive_skips

    @property
    def gradient_norm(self) -> Any:
        """L2 norm of the last applied gradient, unscaled and unclipped; measured where `measures_gradients` is set."""
        return self._gradient_norm

    @property
    def gradient_underflow(self) -> Any:
        """Share of the nonzero gradient values that, scaled, lie below 2**-14, where float16 begins to lose bits.

        Of the last step, on the first replica; measured where `measures_gradients` is set. What float16 has already
        made zero cannot be told from a true zero, and is not counted.
        """
        return self._gradient_underflow

    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss by the scale.

        Args:
            loss: a float tensor of any shape.

        Returns:
            The scaled loss, in float32 if the loss is 16-bit.
        """
        if isinstance(self.loss_scale, NoLossScale):
            return loss
        return ops.multiply(loss, ops.convert_to_tensor(self.dynamic_scale))

    def unscale(self, grads: list[Any], trainable_variables: list[Any] | None = None) -> list[Any]:
        """Divides the gradients of a scaled loss by the scale.

        Args:
            grads: a tensor for each variable, or None.
            trainable_variables: the variables, those that the optimizer was built with by default.

        Returns:
            The gradients of the loss, 16-bit ones in float32. Those of variables that are marked
            `overwrite_with_gradient` are left as they are.
        """
        variables = self._variables_for(grads, trainable_variables)
        inverse = None
        if not isinstance(self.loss_scale, NoLossScale):
            inverse = 1.0 / ops.convert_to_tensor(self.dynamic_scale)
        return [
            gradient
            if gradient is None or _is_overwritten(variable)
            else backend.map_values(partial(_unscale_values, inverse), gradient)
            for gradient, variable in zip(grads, variables, strict=True)
        ]

    def apply(self, grads: list[Any], trainable_variables: list[Any] | None = None) -> None:
        """Makes a step with the gradients of a scaled loss, or skips it, and moves the scale.

        Args:
            grads: a tensor for each variable, or None.
            trainable_variables: the variables, those that the optimizer was built with by default.

        Raises:
            ValueError: If every gradient is None, a variable is unknown, or there are none and the optimizer is not
                built.
        """
        if not len(grads):
            return
        variables = self._variables_for(grads, trainable_variables)
        grads = _sum_repeated_rows(grads)
        unscaled = self.unscale(grads, variables)
        # The gradients are in memory already, and what unscaling makes of them is not: checking them is cheaper. A
        # scale below 1 makes them larger, though.
        lowest = float(getattr(self.loss_scale, "min_scale", self.initial_scale))  # type: ignore[arg-type]
        self._step(unscaled, self.check_finite(unscaled if lowest < 1 else grads), variables)

    def apply_unscaled(self, grads: list[Any], trainable_variables: list[Any] | None = None) -> None:
        """Makes a step with gradients that `unscale` has divided already, or skips it, and moves the scale.

        Args:
            grads: a tensor for each variable, or None.
            trainable_variables: the variables, those that the optimizer was built with by default.

        Raises:
            ValueError: As `apply`.
        """
        variables = self._variables_for(grads, trainable_variables)
        grads = _sum_repeated_rows(grads)
        self._step(grads, self.check_finite(grads), variables)

    def check_finite(self, grads: list[Any]) -> Any:
        """Tells whether every value is finite, on this replica.

        Args:
            grads: tensors, or None.

        Returns:
            A boolean tensor of shape ().
        """
        values = [backend.values_of(gradient) for gradient in grads if gradient is not None]
        if not values:
            return ops.convert_to_tensor(True)
        # One cheap pass: a value that is not finite makes the sum so. Finite ones can too, if they are huge, and only
        # then are they looked at one by one.
        sums = ops.stack(
            [ops.cast(ops.sum(ops.cast(each, _at_least_float32(each.dtype))), "float32") for each in values]
        )
        return ops.cond(
            ops.all(ops.isfinite(sums)),
            lambda: ops.convert_to_tensor(True),
            lambda: ops.all(ops.stack([ops.all(ops.isfinite(each)) for each in values])),
        )

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Makes a step as `apply` does, from values to values; for JAX.

        Args:
            optimizer_variables: a value for each of `variables`.
            grads: a tensor for each trainable variable, or None.
            trainable_variables: a value for each trainable variable.

        Returns:
            The new values: (trainable variables, optimizer variables).
        """
        # Not Keras's LossScaleOptimizer.stateless_apply, which makes the step by itself.
        return keras.optimizers.Optimizer.stateless_apply(self, optimizer_variables, grads, trainable_variables)

    def set_weights(self, weights: list[Any]) -> None:
        """Sets the optimizer's variables, the inner optimizer's among them.

        Args:
            weights: an array for each of `variables`, in their order.

        Raises:
            ValueError: If the optimizer is not built, or a number or a shape does not agree.
        """
        variables = self.variables
        if not self.built:
            raise ValueError(f"optimizer {self.name!r} has no variables yet: call build(trainable_variables) first")
        if len(weights) != len(variables):
            raise ValueError(
                f"weights has {len(weights)} arrays, and optimizer {self.name!r} {len(variables)} variables"
            )
        for variable, weight in zip(variables, weights, strict=True):
            if tuple(variable.shape) != tuple(weight.shape):
                raise ValueError(f"weights: {variable.path!r} has shape {variable.shape}, its array {weight.shape}")
        for variable, weight in zip(variables, weights, strict=True):
            variable.assign(weight)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables from the inner optimizer's weight decay; call it before the optimizer is built.

        Args:
            var_list: the variables to exclude.
            var_names: strings; variables whose name contains one are excluded.
        """
        for leaf in self._leaves:
            leaf.exclude_from_weight_decay(var_list, var_names)

    def get_config(self) -> dict[str, Any]:
        """Returns Keras's config, and of the other settings those that are not the default."""
        config = {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
        }
        if not isinstance(self.loss_scale, LossScale):
            return {**config, "loss_scale": keras.saving.serialize_keras_object(self.loss_scale)}
        settings, defaults = self.loss_scale.get_config(), LossScale().get_config()
        initial_scale, growth_interval = settings.pop("initial_scale"), settings.pop("growth_interval")
        other = {name: value for name, value in settings.items() if value != defaults[name]}
        return {**config, "initial_scale": initial_scale, "dynamic_growth_steps": growth_interval, **other}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> LossScaleOptimizer:
        """Makes an optimizer from its config."""
        config = {
            key: keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)
            if key in ("inner_optimizer", "loss_scale")
            else value
            for key, value in config.items()
        }
        return cls(**config)

    @property
    def _leaves(self) -> list[Any]:
        """The optimizers that hold the settings: the inner one, or those inside Keras's MultiOptimizer."""
        return list(getattr(self.inner_optimizer, "optimizers", [self.inner_optimizer]))

    @property
    def _window(self) -> int:
        """How many finite micro-batches make a step."""
        windows = {leaf.gradient_accumulation_steps or 1 for leaf in self._leaves if leaf.built}
        if len(windows) > 1:
            raise ValueError(
                f"gradient_accumulation_steps is {sorted(windows)} in the optimizers inside "
                f"{self.inner_optimizer.name!r}: under one loss scale it must be the same in all"
            )
        return windows.pop() if windows else 1

    def _variables_for(self, grads: list[Any], trainable_variables: list[Any] | None) -> list[Any]:
        if trainable_variables is None and not self.built:
            raise ValueError(
                f"optimizer {self.name!r} is not built, so it does not know the variables of these gradients: pass "
                "them, or call build(trainable_variables) first"
            )
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if not self.built:
            self.build(variables)
        self._check_variables_are_known(variables)
        if len(grads) != len(variables):
            raise ValueError(f"grads has {len(grads)} gradients for {len(variables)} variables: one for each is needed")
        return variables

    def _step(self, grads: list[Any], finite: Any, variables: list[Any]) -> None:
        if all(gradient is None for gradient in grads):
            raise ValueError(
                f"no gradient for any of the {len(variables)} trainable variables: the loss does not depend on them, "
                "or a custom gradient returned None"
            )
        finite = ops.logical_not(backend.any_replica(ops.logical_not(finite)))
        if self.measures_gradients:
            self._gradient_underflow.assign(_share_below(_SMALLEST_NORMAL_FLOAT16 / self.dynamic_scale, grads))
        self._move_scale(finite)
        self._if(finite, partial(self._take, variables=variables), grads)

    def _state(self) -> LossScaleState:
        variables = (
            self.dynamic_scale,
            self.step_counter,
            self._hysteresis_left,
            self._consecutive_skips,
            self._skipped_steps,
        )
        return LossScaleState(*variables)

    def _move_scale(self, finite: Any) -> None:
        before = LossScaleState(*map(ops.convert_to_tensor, self._state()))
        after = self.loss_scale.next_state(before, finite)
        for variable, old, new in zip(self._state(), before, after, strict=True):
            if new is not old:
                variable.assign(new)

    def _if(self, condition: Any, then: Any, grads: Any, otherwise: Any = lambda grads: None) -> None:
        backend.conditional(condition, then, otherwise, grads, self.variables + self._trainable_variables)

    def _take(self, grads: list[Any], variables: list[Any]) -> None:
        if self._window == 1:
            self._update(grads, variables)
            return
        place = self._leaves[0]._iterations % self._window
        grads = [gradient if gradient is None else backend.dense(gradient) for gradient in grads]
        self._if(
            ops.equal(place, self._window - 1),
            partial(self._close_window, variables=variables),
            grads,
            partial(self._add_to_window, variables=variables),
        )

    def _add_to_window(self, grads: list[Any], variables: list[Any]) -> None:
        for total, new in zip(self._sums_of(variables), self._with_window(grads, variables), strict=True):
            if new is not None:
                total.assign(new)
        for optimizer in {id(each): each for each in (self.inner_optimizer, *self._leaves)}.values():
            optimizer._iterations.assign_add(1)

    def _close_window(self, grads: list[Any], variables: list[Any]) -> None:
        totals = self._with_window(grads, variables)
        means = [
            total if total is None or _is_overwritten(variable) else total / self._window
            for total, variable in zip(totals, variables, strict=True)
        ]
        for total in self._sums_of(variables):
            total.assign(ops.zeros(total.shape, total.dtype))
        self._update(means, variables)

    def _sums_of(self, variables: list[Any]) -> list[Any]:
        return [self._sums[self._get_variable_index(variable)] for variable in variables]

    def _with_window(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """Adds the gradients to the window's; values that overwrite a variable are combined by max, as Keras does."""
        return [
            None if new is None else (ops.maximum if _is_overwritten(variable) else ops.add)(new, total)
            for new, total, variable in zip(grads, self._sums_of(variables), variables, strict=True)
        ]

    def _update(self, grads: list[Any], variables: list[Any]) -> None:
        summed = iter(
            backend.sum_over_replicas(
                [g for g, v in zip(grads, variables, strict=True) if g is not None and not _is_overwritten(v)]
            )
        )
        grads = [
            None if g is None else backend.max_over_replicas(g) if _is_overwritten(v) else next(summed)
            for g, v in zip(grads, variables, strict=True)
        ]
        if self.measures_gradients:
            self._gradient_norm.assign(
                _norm([g for g, v in zip(grads, variables, strict=True) if g is not None and not _is_overwritten(v)])
            )
        with self._applying_once():
            self.inner_optimizer.apply(grads, variables)

    @contextlib.contextmanager
    def _applying_once(self) -> Iterator[None]:
        """Makes the inner optimizers clip, decay, update and average, and nothing else: the rest is done.

        Their own way adds up replicas and windows after clipping, in branches that a distribution strategy refuses.
        """
        # Replicas run in threads that take turns, so the last one out takes the replacements away.
        self._applying = getattr(self, "_applying", 0) + 1
        for leaf in self._leaves:
            vars(leaf).update(
                _backend_apply_gradients=partial(self._apply_once, leaf),
                _overwrite_variables_directly_with_gradients=_overwrite_with_gradients,
                _all_reduce_sum_gradients=lambda grads_and_vars: grads_and_vars,
            )
        try:
            yield
        finally:
            self._applying -= 1
            for leaf in self._leaves if self._applying == 0 else []:
                for name in (
                    "_backend_apply_gradients",
                    "_overwrite_variables_directly_with_gradients",
                    "_all_reduce_sum_gradients",
                ):
                    del vars(leaf)[name]

    def _apply_once(self, leaf: Any, grads: list[Any], variables: list[Any]) -> None:
        grads = leaf._clip_gradients(grads)
        leaf._apply_weight_decay(variables)
        leaf._backend_update_step(grads, variables, leaf.learning_rate)
        if not leaf.use_ema:
            return
        leaf._update_model_variables_moving_average(leaf._trainable_variables)
        if leaf.ema_overwrite_frequency:
            is_due = ops.equal((leaf.iterations + 1) % leaf.ema_overwrite_frequency, 0)
            self._if(is_due, lambda _: _overwrite_with_averages(leaf), [])


def wrap_optimizer(optimizer: Any, model: Any) -> Any:
    """Wraps an optimizer in the loss scaling that a model needs.

    Args:
        optimizer: a Keras optimizer that does not scale the loss yet.
        model: the model it is to train.

    Returns:
        `LossScaleOptimizer(optimizer)` if a layer computes in float16, whatever the name of the model's policy or of
        the global one; with `NoLossScale()` if none does and there are several replicas; else the optimizer itself.

    Raises:
        TypeError: If optimizer is not a Keras optimizer.
        ValueError: If optimizer scales the loss already.
    """
    _check_unscaled("optimizer", optimizer)
    if "float16" in compute_dtypes(model):
        return LossScaleOptimizer(optimizer)
    return LossScaleOptimizer(optimizer, NoLossScale()) if backend.replica_count() > 1 else optimizer


def compute_dtypes(model: Any) -> set[str]:
    """Returns the dtypes that the layers of a model, and the model itself, compute in."""
    return {layer.compute_dtype for layer in [model, *layers_by_path(model).values()]}


def warn_if_needless(what: str, loss_scale: AnyLossScale) -> None:
    """Warns that something which computes in bfloat16 needs no scaling, if there is any."""
    if not isinstance(loss_scale, NoLossScale):
        warnings.warn(
            f"{what} computes in bfloat16, which has the range of float32: scaling the loss gains nothing. Use "
            "loss_scale=keras_mp.NoLossScale(), which still checks and skips, or no LossScaleOptimizer",
            stacklevel=3,
        )


def _check_unscaled(name: str, optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"{name}={optimizer!r} must be a Keras optimizer, such as keras.optimizers.Adam()")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{name}={optimizer.name!r} is a {type(optimizer).__name__} already, and the loss must be scaled once: use "
            "it as it is, or pass its inner_optimizer"
        )


def _loss_scale_from(loss_scale: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the loss scale, and the settings that are not its own."""
    settings = dict(settings)
    if "dynamic_growth_steps" in settings:
        if "growth_interval" in settings:
            raise ValueError(
                f"growth_interval={settings['growth_interval']!r} and dynamic_growth_steps="
                f"{settings['dynamic_growth_steps']!r} are two names of one setting: give one"
            )
        settings["growth_interval"] = settings.pop("dynamic_growth_steps")
    own = {name: settings.pop(name) for name in _SETTINGS if name in settings}
    if loss_scale is None:
        return LossScale(**own), settings
    if not isinstance(loss_scale, (LossScale, StaticLossScale, NoLossScale)):
        raise TypeError(
            f"loss_scale={loss_scale!r} must be a LossScale, a StaticLossScale or NoLossScale(); a first scale alone "
            "is initial_scale="
        )
    if own:
        raise ValueError(
            f"loss_scale={loss_scale!r} comes with {own}: pass such settings to {type(loss_scale).__name__}"
        )
    return loss_scale, settings


def _scalar(name: str, value: Any, dtype: str) -> Any:
    # Autocast would read a counter or a scale in 16 bits inside a layer's call; bfloat16 cannot count past 256.
    return keras.Variable(
        keras.initializers.Constant(value),
        shape=(),
        dtype=dtype,
        trainable=False,
        autocast=False,
        aggregation="only_first_replica",
        name=name,
    )


def _sum_of_gradients(variable: Any) -> Any:
    # "on_read": each replica has a sum of its own, and a checkpoint holds that of all.
    return keras.Variable(
        "zeros",
        shape=variable.shape,
        dtype=_at_least_float32(variable.dtype),
        trainable=False,
        autocast=False,
        aggregation="sum",
        synchronization="on_read",
        layout=getattr(variable, "_layout", None),
        name=f"{variable.path.replace('/', '_')}_gradient_sum",
    )


def _at_least_float32(dtype: Any) -> str:
    dtype = keras.backend.standardize_dtype(dtype)
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def _unscale_values(inverse: Any, values: Any) -> Any:
    values = ops.cast(values, _at_least_float32(values.dtype))
    return values if inverse is None else values * ops.cast(inverse, values.dtype)


def _sum_repeated_rows(grads: list[Any]) -> list[Any]:
    return [gradient if gradient is None else backend.sum_repeated_rows(gradient) for gradient in grads]


def _is_overwritten(variable: Any) -> bool:
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _overwrite_with_gradients(grads: list[Any], variables: list[Any]) -> tuple[list[Any], list[Any]]:
    pairs = list(zip(grads, variables, strict=True))
    for gradient, variable in pairs:
        if _is_overwritten(variable):
            variable.assign(gradient)
    rest = [(gradient, variable) for gradient, variable in pairs if not _is_overwritten(variable)]
    return [gradient for gradient, _ in rest], [variable for _, variable in rest]


def _overwrite_with_averages(optimizer: Any) -> None:
    pairs = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
    averaged = [(variable, average) for variable, average in pairs if average is not None]
    backend.overwrite([variable for variable, _ in averaged], [average for _, average in averaged])


@contextlib.contextmanager
def _accumulating_nothing(optimizers: list[Any]) -> Iterator[None]:
    """Keeps optimizers from creating sums of gradients: ours are float32, and one for each replica."""
    windows = [optimizer.gradient_accumulation_steps for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.gradient_accumulation_steps = None
    try:
        yield
    finally:
        for optimizer, window in zip(optimizers, windows, strict=True):
            optimizer.gradient_accumulation_steps = window


def _norm(grads: list[Any]) -> Any:
    values = [ops.cast(backend.values_of(gradient), "float32") for gradient in grads]
    return ops.sqrt(sum(ops.sum(ops.square(each)) for each in values))


def _share_below(threshold: Any, grads: list[Any]) -> Any:
    magnitudes = [ops.abs(ops.cast(backend.values_of(g), "float32")) for g in grads if g is not None]
    nonzero = sum(ops.sum(ops.cast(each > 0, "float32")) for each in magnitudes)
    below = sum(ops.sum(ops.cast(ops.logical_and(each > 0, each < threshold), "float32")) for each in magnitudes)
    return below / ops.maximum(nonzero, 1.0)
