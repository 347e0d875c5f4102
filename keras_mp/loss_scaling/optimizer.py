"""A LossScaleOptimizer that is right on several replicas, with accumulation, and at the ends of the scale."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import keras
from keras import ops

from keras_mp import backend
from keras_mp.loss_scaling.loss_scale import (
    AnyLossScale,
    LossScale,
    LossScaleState,
    NoLossScale,
    StaticLossScale,
    warn_if_needless,
)
from keras_mp.optimizer import gradients, inner_build
from keras_mp.optimizer import inner_optimizer as inner
from keras_mp.rebuild.optimizers import leaves
from keras_mp.system.argument_checks import whole_number

engine = backend.engine_of(__package__)
updates = backend.engine_of("keras_mp.optimizer")

_SETTINGS = tuple(LossScale().get_config())
_DEFAULTS = {"state_dtype": "float32", "state_memory": "device", "rounding_seed": 0, "release_gradients": False}
_SMALLEST_NORMAL_FLOAT16 = 2.0**-14  # IEEE 754 binary16


@keras.saving.register_keras_serializable("keras_mp")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Optimizer that scales the loss and skips overflows.

    A step is skipped on all replicas when the gradients of one are not finite.

    ```
    a step:  finite = every gradient value is finite, on every replica
             scale = loss_scale.next_state(scale, finite)
             if finite:
                 accumulated = 0 before the first of gradient_accumulation_steps micro-batches
                 accumulated += gradients * (1 / old scale), in float32
                 if this is the last micro-batch:
                     gradients = sum over the replicas of (accumulated / gradient_accumulation_steps)
                     clip once, decay weights, update, average weights
    ```

    With `release_gradients` no weight waits for the gradients of others, and XLA frees each gradient after its use:

    ```
    a step:  for each weight, as soon as its gradient, summed over the replicas, is there:
                 if it is finite: clip it, decay the weight, update
    ```

    Where the gradient of a weight is not finite, this weight and its slots then stay as they were, the others move, and
    `skipped_steps` counts the step.

    Learning rate, clipping, weight decay, moving averages and accumulation are settings of the inner optimizer. A
    micro-batch that overflows leaves no trace in the accumulated gradients, and `iterations` advances only on applied
    steps.

    Args:
        inner_optimizer: the Keras optimizer that makes the update.
        loss_scale: `LossScale`, `LossScale.static` or `LossScale.none`; `LossScale(**settings)` by default.
        name: the name of the optimizer.
        state_dtype: the dtype that the inner optimizer's slots, such as Adam's moments, are stored in: "float32";
            "bfloat16"; or "float8", E4M3 with a float32 scale for each row. They are computed in float32, and rounded
            stochastically once a step. Slots of fewer than 4,096 values or of one axis stay float32.
        state_memory: the place of those slots: "device"; or, on JAX, "host": in pinned memory of the host, from where
            the slots of a weight are fetched when its gradient is there, and written back. Needs release_gradients.
            Slots of fewer values stay on the device.
        rounding_seed: the seed of the stochastic rounding, of slots and of weights in bfloat16, an int.
        release_gradients: Whether no weight waits for the gradients of others, which needs `LossScale.none()`. They are
            then not accumulated, and clipped by `clipvalue` or `clipnorm`, which need one gradient at a time.
        **settings: the arguments of `LossScale`; `dynamic_growth_steps` is Keras's name for `growth_interval`.

    Attributes:
        skipped_steps: the number of skipped steps, an int variable of shape ().
        consecutive_skips: the number of steps skipped in a row, an int variable.
        gradient_norm: the L2 norm of the last applied gradient, unscaled and before clipping, a variable; measured
            where `measures_gradients` is set.
        gradient_underflow: the share of nonzero gradient values of the last step, on the first replica, that, scaled,
            lie below 2**-14, where float16 loses bits; measured where `measures_gradients` is set. What float16 has
            already made zero cannot be told from a true zero, and is not counted.
        since_reset: the outcome of the steps since the metrics' reset, an int variable, which `atomic_skip` counts. 1:
            one or more were made; -1: all were skipped; 0: there was none.

    Raises:
        TypeError: If inner_optimizer is not an optimizer, or loss_scale is none of the three.
        ValueError: If inner_optimizer scales the loss already; if a setting is unknown, out of range or given twice;
            if state_dtype is unknown, or inner_optimizer is built with slots in another; if state_memory is unknown,
            or the host's memory cannot be used, with the reason; if gradients are to be released and cannot be.

    Examples:
        >>> import keras, keras_mp, numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype="mixed_float16")])
        >>> optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.Adam(1e-3), initial_scale=2.0**12)
        >>> model.compile(optimizer, "mse")
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
        >>> int(optimizer.skipped_steps)
        0
        >>> half = keras_mp.LossScaleOptimizer(keras.optimizers.Adam(1e-3), state_dtype="bfloat16")  # of Adam's moments
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        loss_scale: AnyLossScale | None = None,
        *,
        name: str | None = None,
        state_dtype: str = "float32",
        state_memory: str = "device",
        rounding_seed: int = 0,
        release_gradients: bool = False,
        **settings: Any,
    ) -> None:
        inner.check_unscaled("inner_optimizer", inner_optimizer)
        inner.check_states(state_dtype, state_memory, release_gradients)
        inner.check_built(inner_optimizer, state_dtype, state_memory)
        loss_scale, unknown = _loss_scale_from(loss_scale, settings)
        _check_releases(loss_scale, release_gradients)
        if release_gradients:
            inner.check_can_release(inner_optimizer)
        start = loss_scale.initial_state()
        growth_interval = loss_scale.growth_interval if isinstance(loss_scale, LossScale) else 0
        # Keras refuses what it does not know, and explains what belongs to the inner optimizer.
        super().__init__(inner_optimizer, float(start.scale), growth_interval, name=name, **unknown)
        self.loss_scale = loss_scale
        self.measures_gradients = False
        self.state_dtype, self.state_memory = state_dtype, state_memory
        self.release_gradients = release_gradients
        self.rounding_seed = whole_number("rounding_seed", rounding_seed, 0)
        with keras.name_scope(self.name):
            self.dynamic_scale = _scalar("dynamic_scale", start.scale, "float32")
            self.step_counter = _scalar("step_counter", start.clean_steps, "int")
            self._hysteresis_left = _scalar("hysteresis_left", start.hysteresis_left, "int")
            self.consecutive_skips = _scalar("consecutive_skips", start.consecutive_skips, "int")
            self.skipped_steps = _scalar("skipped_steps", start.skipped_steps, "int")
            self.gradient_norm = _scalar("gradient_norm", 0.0, "float32")
            self.gradient_underflow = _scalar("gradient_underflow", 0.0, "float32")
            # Past Keras's tracking of attributes, so that it is the last of `variables`, and in no file.
            object.__setattr__(self, "since_reset", _scalar("since_reset", 0, "int"))
        self._is_asked_to_scale = False
        if keras.config.dtype_policy().compute_dtype == "bfloat16":
            warn_if_needless("the global dtype policy", loss_scale)

    def build(self, variables: list[keras.Variable]) -> None:
        """Creates the optimizer's variables for trainable ones.

        Raises:
            ValueError: If several inner optimizers accumulate over different numbers of steps; if a weight is float16.
        """
        if self.built:
            return
        inner.check_weights(variables)
        inner.check_built(self.inner_optimizer, self.state_dtype, self.state_memory)
        inner_build.build_inner(self.inner_optimizer, variables, self.state_dtype, self.state_memory)
        if self.release_gradients:  # also of those that a MultiOptimizer has made now
            inner.check_can_release(self.inner_optimizer)
        with keras.name_scope(self.name):
            self._sums = gradients.empty_sums(variables) if self._accumulation_steps > 1 else []
        # Not Keras's LossScaleOptimizer.build, which would make the state once more.
        keras.optimizers.Optimizer.build(self, variables)

    @property
    def variables(self) -> list[Any]:
        """All variables of the optimizer, the inner optimizer's among them."""
        return [*super().variables, self.since_reset]

    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss by the loss scale.

        In a batch that replicas cannot divide, the loss is weighed by this replica's rows, too.

        Args:
            loss: a float tensor of any shape.

        Returns:
            The scaled loss, in float32 if the loss is 16-bit.
        """
        self._is_asked_to_scale = True
        loss = self.inner_optimizer.scale_loss(loss)  # by its loss_scale_factor, by which it divides gradients
        share = engine.share_of_batch()
        if share is not None:
            loss = ops.multiply(loss, share)
        if isinstance(self.loss_scale, NoLossScale):
            return loss
        return ops.multiply(loss, ops.convert_to_tensor(self.dynamic_scale))

    def unscale(self, grads: list[Any], trainable_variables: list[Any] | None = None) -> list[Any]:
        """Divides the gradients of a scaled loss by the scale.

        Args:
            grads: a tensor for each variable, or None.
            trainable_variables: the variables, those that the optimizer was built with by default.

        Returns:
            The gradients of the loss, 16-bit ones in float32; values that overwrite a variable as they are.
        """
        variables = self._variables_for(grads, trainable_variables)
        return gradients.multiply((grads, self._inverse_scale()), variables)

    def apply(self, grads: list[Any], trainable_variables: list[Any] | None = None) -> None:
        """Makes a step with the gradients of a scaled loss.

        It skips the step where a gradient is not finite, and moves the scale.

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
        grads = gradients.sum_repeated_rows(grads)
        # The gradients are in memory already, and what unscaling makes of them is not: checking them is cheaper. A
        # scale below 1 makes them larger, though.
        scale = self.loss_scale
        lowest = float(scale.min_scale if isinstance(scale, LossScale) else self.initial_scale)
        if lowest < 1:
            self._step(self.unscale(grads, variables), variables, scaled=False)
        else:
            self._step(grads, variables, scaled=True)

    def apply_unscaled(self, grads: list[Any], trainable_variables: list[Any] | None = None) -> None:
        """Makes a step, as `apply`, with gradients of `unscale`."""
        variables = self._variables_for(grads, trainable_variables)
        self._step(gradients.sum_repeated_rows(grads), variables, scaled=False)

    def check_finite(self, grads: list[Any]) -> Any:
        """Tells whether all gradients are finite, on this replica."""
        return gradients.all_finite(grads)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Makes a step from values to values, as in Keras."""
        # Not Keras's LossScaleOptimizer.stateless_apply, which makes the step by itself.
        return keras.optimizers.Optimizer.stateless_apply(self, optimizer_variables, grads, trainable_variables)

    def set_weights(self, weights: list[Any]) -> None:
        """Sets all `variables`, those of the inner optimizer, too.

        Raises:
            ValueError: If the optimizer is not built, or a number or a shape does not agree.
        """
        variables = self.variables
        if [tuple(variable.shape) for variable in variables] != [tuple(weight.shape) for weight in weights]:
            built = "" if self.built else ", which is not built: call build(trainable_variables) first"
            raise ValueError(
                f"weights has {len(weights)} arrays, which are not of the shapes of the {len(variables)} variables of "
                f"optimizer {self.name!r}{built}"
            )
        for variable, weight in zip(variables, weights, strict=True):
            variable.assign(weight)

    def save_own_variables(self, store: Any) -> None:
        """Writes all variables but `since_reset`, which belongs to one epoch."""
        for number, variable in enumerate(self.variables[:-1]):
            store[str(number)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Sets the variables from a file of Keras's."""
        *saved, since_reset = self.variables
        arrays = inner_build.with_dtypes(store, saved)
        super().load_own_variables({**arrays, str(len(arrays)): since_reset.numpy()})

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables from the inner optimizer's weight decay."""
        for leaf in leaves(self.inner_optimizer):
            leaf.exclude_from_weight_decay(var_list, var_names)

    def finalize_variable_values(self, var_list: list[Any]) -> None:
        """Sets variables to their moving averages, as in Keras."""
        inner.finalize(self.inner_optimizer, var_list)

    def get_config(self) -> dict[str, Any]:
        """Keras's config, and settings that are not the default."""
        config = {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
        }
        for name, default in _DEFAULTS.items():
            if getattr(self, name) != default:
                config[name] = getattr(self, name)
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
    def _accumulation_steps(self) -> int:
        return inner.accumulation_steps(self.inner_optimizer)

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

    def _warn_of_a_loss_that_is_not_scaled(self) -> None:
        if self._is_asked_to_scale or self.initial_scale <= 1:
            return
        self._is_asked_to_scale = True  # said once
        warnings.warn(
            f"{self.name} divides gradients by its scale, {self.initial_scale:g} at first, and never multiplied a loss "
            "by it: updates are as small as the scale is large. In a train_step or loop of your own, take the "
            "gradients of optimizer.scale_loss(loss)",
            stacklevel=4,
        )

    def _step(self, grads: list[Any], variables: list[keras.Variable], *, scaled: bool) -> None:
        self._warn_of_a_loss_that_is_not_scaled()
        if all(gradient is None for gradient in grads):
            raise ValueError(
                f"no gradient for any of the {len(variables)} trainable variables: the loss does not depend on them, "
                "or a custom gradient returned None"
            )
        if self.release_gradients:
            self._release(grads, variables)
            return
        finite = ops.logical_not(updates.any_replica(ops.logical_not(self.check_finite(grads))))
        if self.measures_gradients:
            threshold = _SMALLEST_NORMAL_FLOAT16 if scaled else _SMALLEST_NORMAL_FLOAT16 / self.dynamic_scale
            self.gradient_underflow.assign(gradients.share_below(threshold, grads, variables))

        inverse = self._inverse_scale() if scaled else None
        self._move_scale(finite)
        unscale = partial(gradients.multiply, variables=variables)
        if self._accumulation_steps == 1:
            update = partial(self._update, variables=variables)
            updates.update_if(finite, update, (grads, inverse), self._changing, unscale)
        else:  # most micro-batches are only accumulated, and must not read and write the slots for it
            add = partial(self._accumulate_or_update, variables=variables)
            self._if(finite, add, None, (grads, inverse), unscale)

    def _release(self, grads: list[Any], variables: list[keras.Variable]) -> None:
        """Makes a step in which no weight waits for others."""
        grads = gradients.sum_over_replicas(gradients.multiply((grads, None), variables), variables)
        finite = [gradients.is_finite(gradient) for gradient in grads if gradient is not None]
        self._move_scale(ops.all(ops.stack(finite)))
        if self.measures_gradients:
            self.gradient_underflow.assign(gradients.share_below(_SMALLEST_NORMAL_FLOAT16, grads, variables))
            norm = gradients.finite_norm(grads, variables)
            # The sum of the squares of finite gradients may be infinite.
            self.gradient_norm.assign(ops.where(ops.isfinite(norm), norm, ops.convert_to_tensor(self.gradient_norm)))
        how = inner.Update(self.rounding_seed, releases=True)
        inner.apply(self.inner_optimizer, grads, variables, self._changing, how)

    def _inverse_scale(self) -> Any:
        """Returns 1 / scale, or None where that is 1."""
        if isinstance(self.loss_scale, NoLossScale):
            return None
        return 1.0 / ops.convert_to_tensor(self.dynamic_scale)

    def _if(self, condition: Any, then: Any, otherwise: Any, argument: Any, prepare: Any = None) -> None:
        updates.conditional(condition, then, otherwise, argument, self._changing, prepare)

    @property
    def _changing(self) -> list[Any]:
        return self.variables + self._trainable_variables

    @property
    def state(self) -> LossScaleState:
        """Variables of the loss scale, moved by skipped steps, too."""
        left = self._hysteresis_left
        return LossScaleState(self.dynamic_scale, self.step_counter, left, self.consecutive_skips, self.skipped_steps)

    def _move_scale(self, finite: Any) -> None:
        before = LossScaleState(*map(ops.convert_to_tensor, self.state))
        after = self.loss_scale.next_state(before, finite)
        for variable, old, new in zip(self.state, before, after, strict=True):
            if new is not old:
                variable.assign(new)

    def _accumulate_or_update(self, grads: list[Any], variables: list[keras.Variable]) -> None:
        micro_batch = leaves(self.inner_optimizer)[0]._iterations % self._accumulation_steps
        grads = [gradient if gradient is None else backend.dense(gradient) for gradient in grads]
        sums = [self._sums[self._get_variable_index(variable)] for variable in variables]
        gradients.add_to_sums(grads, sums, variables, ops.equal(micro_batch, 0))
        self._if(
            ops.equal(micro_batch, self._accumulation_steps - 1),
            lambda grads: self._update(gradients.means_of(sums, grads, variables, self._accumulation_steps), variables),
            lambda _: inner.count_step(self.inner_optimizer),
            grads,
        )

    def _update(self, grads: list[Any], variables: list[keras.Variable]) -> None:
        grads = gradients.sum_over_replicas(grads, variables)
        if self.measures_gradients:
            self.gradient_norm.assign(gradients.norm(grads, variables))
        how = inner.Update(self.rounding_seed)
        inner.apply(self.inner_optimizer, grads, variables, self._changing, how)


def _check_releases(loss_scale: AnyLossScale, release_gradients: Any) -> None:
    if not isinstance(release_gradients, bool):
        raise ValueError(f"release_gradients={release_gradients!r} must be True or False")
    if release_gradients and not isinstance(loss_scale, NoLossScale):
        raise ValueError(
            f"release_gradients=True needs loss_scale=LossScale.none(), and loss_scale={loss_scale!r} scales the loss: "
            "an overflow in one gradient must skip the step of all"
        )


def _loss_scale_from(loss_scale: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Separates the loss scale from settings that are not its."""
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
            f"loss_scale={loss_scale!r} must be LossScale(), LossScale.static(scale) or LossScale.none(); a first "
            "scale alone is initial_scale="
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
