"""Steps with planted trouble for shared layers, and delayed and static scaling once more, in NumPy: FP8 and INT8.

    y = layer(a) + layer(b),  loss = mean over the batch of sum(c . y)

so that the gradient of y is c / batch size, exactly, and every amax of every step is known beforehand. A model has such
a layer and such a loss for each of several recipes, which are compiled at once. Two are called twice, the others on a.
"""

import functools

import keras
import numpy as np
from int8_reference import TOP, integers
from reference import MAX, cast, compiled, quantized_by, tensors, to_numpy

import keras_mp
from keras_mp.fp8 import Scalings
from keras_mp.fp8.scaling import ROLES
from keras_mp.layers import Float8Dense

ROWS, WIDTH = 8, 16
BAD = (np.inf, -np.inf, np.nan)
KERNEL = 3


def steps(count, bad=BAD):
    """Inputs a and b, the gradient c, and a kernel for each step: zeros, jumps, and what is not finite, among them.

    A kernel that is not finite spoils no gradient here, so its step is not skipped; and whether a NaN hides the other
    values from a maximum depends on the compiler: so no kernel has one.
    """
    rng = np.random.default_rng()

    def tensor(*shape):
        magnitude = rng.choice([1.0, 1.0, 1.0, 2.0**12, 2.0**-20])
        return (rng.normal(size=shape) * magnitude).astype("float32")

    plan = [[tensor(ROWS, WIDTH), tensor(ROWS, WIDTH), tensor(ROWS, WIDTH), tensor(WIDTH, WIDTH)] for _ in range(count)]
    for index in rng.choice(np.arange(1, count), count // 3, replace=False):
        place = rng.integers(4)
        target = plan[index][place]
        if rng.random() < 0.5:
            target[:] = 0
        else:
            kinds = bad if place != KERNEL else bad[:2]
            target[rng.integers(len(target)), rng.integers(WIDTH)] = rng.choice(kinds)
    # Each kind at least once, in the first step as well.
    plan[0][0][:] = 0
    plan[0][2][3, 5] = bad[-1]
    plan[1][1][2, 2] = bad[0]
    plan[2][2][:] = 0
    plan[3][KERNEL][1, 1] = bad[0]
    return plan


class Reference:
    """The amaxes of the steps before, and the scales that they make."""

    def __init__(self, recipe, accumulate=1):
        self.recipe, self.accumulate, self.is_int8 = recipe, accumulate, recipe.title == "INT8"
        self.history = np.zeros((3, recipe.kept), "float32")
        self.pending, self.held, self.updates = np.zeros(3, "float32"), 0, 0

    def columns(self):
        """The history as the layer reads it, with the number of updates where it is counted."""
        return np.concatenate([self.history, np.full((3, int(self.recipe.counts)), self.updates, "float32")], axis=1)

    def calibrating(self):
        return self.updates < self.recipe.all[0].history

    def amax(self, role, x):
        """What x is scaled by: static scales stay after the calibration."""
        row = self.history[ROLES.index(role)]
        if not self.recipe.is_static:
            return np.max(row) or _amax(x)
        return row[1] if row[1] > 0 and not self.calibrating() else max(row[1], _amax(x))

    def rounded(self, scaled, role):
        """To the format; to integers, or NaN for the whole tensor that is not finite."""
        if not self.is_int8:
            return cast(scaled, self.recipe.of(role)[0].format.name).astype("float64")
        return integers(scaled, np.float32(1)) * 1.0 if np.isfinite(scaled).all() else np.full(scaled.shape, np.nan)

    def scale(self, role, x):
        """What x is multiplied by."""
        amax, scaling = self.amax(role, x), self.recipe.of(role)[0]
        top = (TOP if self.is_int8 else MAX[scaling.format.name]) * 2.0**-scaling.margin
        if amax == 0:
            return np.float32(1)
        with np.errstate(over="ignore"):
            scale = min(np.float32(top) / np.float32(amax), np.float32(2.0**126))
        return np.float32(2.0 ** np.floor(np.log2(np.float64(scale)))) if scaling.scale == "power_of_two" else scale

    def loss(self, a, b, c, kernel):
        """Of one step, quantized as the layer does it and added up in float64; and the sum of its terms' magnitudes."""

        def q(x, role):
            scale = self.scale(role, x)
            with np.errstate(over="ignore", invalid="ignore"):
                return self.rounded(x * scale, role) / np.float64(scale)

        with np.errstate(invalid="ignore"):
            a8, b8, kernel8 = q(a, "input"), q(b, "input"), q(kernel, "kernel")
            terms = np.abs(c) * ((np.abs(a8) + np.abs(b8)) @ np.abs(kernel8))
            return np.sum(c * (a8 @ kernel8 + b8 @ kernel8)) / ROWS, np.sum(terms) / ROWS

    def step(self, a, b, c, kernel):
        """Moves on by a micro-batch."""
        amaxes = [max(_amax(a), _amax(b)), _amax(kernel), _amax(c / np.float32(ROWS))]
        self.pending = np.maximum(self.pending, np.array(amaxes, "float32"))
        self.held += 1
        if self.held == self.accumulate:
            if not self.recipe.is_static:
                self.history = np.concatenate([self.pending[:, None], self.history[:, :-1]], axis=1)
            elif self.calibrating():
                self.history[:, 1] = np.maximum(self.history[:, 1], self.pending)
            self.updates += 1
            self.pending, self.held = np.zeros(3, "float32"), 0


def references_of(recipes, accumulate=1):
    """By name."""
    return {name: Reference(recipe, accumulate) for name, recipe in recipes.items()}


def _amax(x):
    amax = np.max(np.abs(x), initial=0).astype("float32")
    return amax if np.isfinite(amax) else np.float32(0)


@functools.cache
def scales_of(*recipes):
    """A function of a tensor and of histories: what each recipe multiplies the tensor by as a gradient.

    Other scales make the loss.
    """

    def scales(x, *histories):
        return [quantized_by(r, x, "gradient", row=h[2]).scale for r, h in zip(recipes, histories, strict=True)]

    return compiled(scales)


def build(recipes, accumulate=1, checks=True, **compile_arguments):
    """The model of a shared layer for each recipe, compiled with an optimizer that changes no weight."""
    inputs = keras.Input((WIDTH,)), keras.Input((WIDTH,))
    results = []
    for name, recipe in recipes.items():
        layer = Float8Dense(WIDTH, use_bias=False, scaling=recipe, name=name)
        result = layer(inputs[0]) + layer(inputs[1]) if name in CALLED_TWICE else layer(inputs[0])
        results.append(keras.layers.Identity(name=f"{name}_sum")(result))
    model = keras.Model(inputs, results)
    optimizer = keras.optimizers.SGD(0.0, gradient_accumulation_steps=accumulate if accumulate > 1 else None)
    if checks:
        optimizer = keras_mp.LossScaleOptimizer(optimizer, keras_mp.LossScale.none())
    model.compile(optimizer, [dot_loss] * len(results), **compile_arguments)
    return model


@keras.saving.register_keras_serializable("tests")
def dot_loss(c, y):
    return keras.ops.sum(c * y, axis=-1)


def saved_history(layer):
    """What a layer's history saves: "0" are the amaxes, "1" the number of steps."""
    store = {}
    layer.amax_history.save_own_variables(store)
    return {key: to_numpy(value) for key, value in store.items()}


def assert_same_state(model, references):
    """The histories, and the scales that the recipes make of them, are the references', exactly."""
    for name, reference in references.items():
        saved = saved_history(model.get_layer(name))
        np.testing.assert_array_equal(saved["0"], reference.history)
        if reference.recipe.counts:
            np.testing.assert_array_equal(saved["1"], np.full((3, 1), reference.updates))
    probe = np.random.default_rng().normal(size=(4, 4)).astype("float32")
    scales = scales_of(*[reference.recipe for reference in references.values()])
    found = scales(*tensors(probe, *[reference.columns() for reference in references.values()]))
    expected = [reference.scale("gradient", probe) for reference in references.values()]
    np.testing.assert_array_equal([to_numpy(each) for each in found], expected)


def follow(references, a, b, c, kernel, checks=True):
    """Moves references on; checks says whether the optimizer skips what is not finite."""
    if not checks or all(np.isfinite(each).all() for each in (a, b, c)):
        for name, reference in references.items():
            reference.step(a, b if name in CALLED_TWICE else np.zeros_like(b), c, kernel)


def run(model, references, plan, checks=True):
    """Trains on the steps, and compares the losses, the histories and the scales at each."""
    for a, b, c, kernel in plan:
        for name in references:
            # As a step does it: where a user assigns other magnitudes, the history starts over.
            keras.Variable.assign(model.get_layer(name).kernel, kernel)
        # On several devices Keras 3.13 fails without weights.
        weights = [np.ones(len(c), "float32")] * len(references)
        results = model.train_on_batch([a, b], [c] * len(references), weights, return_dict=True)
        model.reset_metrics()
        for name, reference in references.items():
            expected, terms = reference.loss(a, b if name in CALLED_TWICE else np.zeros_like(b), c, kernel)
            loss = float(results[f"{name}_sum_loss" if len(references) > 1 else "loss"])
            if np.isfinite(expected):
                assert abs(loss - expected) <= 1e-5 * terms, name
            else:
                assert not np.isfinite(loss), name
        follow(references, a, b, c, kernel, checks)
        assert_same_state(model, references)


RECIPES = {
    "margin": Scalings.named("delayed", margin=2, history=3),
    "most_recent": Scalings.named("delayed", history=1, format="E4M3", scale="power_of_two"),
    "static": Scalings.named("static", history=7),
    "int8_delayed": Scalings.named("int8", history=3, margin=1, kernel_gradient=True),
    "int8_static": Scalings.named("int8", source="static", history=7),
}
# Those that are a model of their own, too: only a layer that reads b sees what is not finite in b.
CALLED_TWICE = ("margin", "int8_delayed")


def only(name):
    """One of the recipes."""
    return {name: RECIPES[name]}
