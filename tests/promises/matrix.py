"""What the kit promises of a changed model, for each kind of model and each change: the rows, columns and reasons.

    PYTHONPATH=tests python tests/promises/matrix.py

writes the table to docs/tables/works-with.md. A cell is one model, changed, trained for two steps, saved, loaded,
exported and reverted; `test_matrix.py` runs them.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import random_seed
import zoo
from keras import ops

import keras_mp
from keras_mp.conversion.to_float32 import OWN_POLICY, merged_float32
from keras_mp.rebuild.walk import Walk, layers_by_path, notes_of
from keras_mp.stability.sensitive import sensitive_layers
from keras_mp.stability.stabilized import STABILIZED
from keras_mp.treatment.treated import INSIDE

PAGE = Path(__file__).parents[2] / "docs/tables/works-with.md"
TENSORFLOW = keras.backend.backend() == "tensorflow"
# However a step of so small a model takes the least time.
HOW = {"run_eagerly": True} if TENSORFLOW else {"jit_compile": True}
STEPS = 2
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# What a row is trained with, where it is not "mse".
COMPILED = {
    **dict.fromkeys(("gpt", "experts", "lora", "int4_lora"), {"loss": LOGITS}),
    "translator": {"loss": "sparse_categorical_crossentropy"},
    "distilled": {"hard_loss": LOGITS, "temperature": 3.0},
}


def convert(scaling):
    return lambda model: keras_mp.convert(model, scaling, select=lambda path, layer: True)


def in_turn(*changes):
    return lambda model: functools.reduce(lambda model, change: change(model), changes, model)


class Column(NamedTuple):
    """A change.

    Attributes:
        change: the function that makes it; None for `prepare`, which compiles as well.
        policy: the policy that the model is built under.
        near: the largest distances of outputs, losses and updates from plain Keras in float32, by their lengths.
    """

    change: Any
    policy: str
    near: tuple[float, float, float]


EXACT, BFLOAT16, FLOAT16 = (1e-5, 1e-5, 1e-4), (0.03, 0.02, 0.15), (0.005, 0.005, 0.02)
# E4M3 rounds an operand by 2^-4 at most, E5M2 a gradient by 2^-3; int8 and int4 by a 254th and a 14th of the largest.
FP8, INT8, INT4 = (0.15, 0.1, 0.5), (0.06, 0.06, 0.3), (0.3, 0.3, 0.8)
stabilize, lean = keras_mp.stabilize, keras_mp.lean.make_lean
COLUMNS = {
    "stabilize": Column(stabilize, "mixed_bfloat16", BFLOAT16),
    "stabilize, FP8": Column(in_turn(stabilize, convert("delayed")), "mixed_bfloat16", FP8),
    "stabilize, INT8": Column(in_turn(stabilize, convert("int8")), "mixed_bfloat16", INT8),
    "stabilize, qat_int4": Column(in_turn(stabilize, convert("qat_int4")), "mixed_bfloat16", INT4),
    "stabilize, narrow_frozen": Column(in_turn(stabilize, keras_mp.lean.narrow_frozen), "mixed_bfloat16", BFLOAT16),
    "make_lean": Column(lean, "float32", EXACT),
    "make_lean, remat": Column(lambda model: lean(model, remat=("block*",)), "float32", EXACT),
    "make_lean, FP8, stabilize": Column(in_turn(lean, convert("current"), stabilize), "mixed_bfloat16", FP8),
    "prepare, float32": Column(None, "float32", EXACT),
    "prepare, float16": Column(None, "mixed_float16", FLOAT16),
}
PROMISES = {
    "step": "outputs, losses and updates of two steps are those of plain Keras in float32, but for the rounding",
    "file": "saved and loaded it computes the same, bit for bit",
    "nonfinite": "find_nonfinite blames nothing in a finite step, of what `prepare` makes",
    "export": "the model that an export writes is float32, and computes what plain Keras does with these weights",
    "revert": "revert gives the model that was there before, which computes what plain Keras does with these weights",
}


def others(*rows):
    return tuple(row for row in zoo.MODELS if row not in rows)


UNSAVED = ("own_code", "graph_in_init", "distilled", "nested_and_shared", "custom_layers")
UNBUILT = ("own_code", "graph_in_init", "distilled")
ATTENTION = ("attention", "gpt", "experts", "lora", "int4_lora")
GELU = ("images", "subclassed", "subclass_inside_functional")
SMALL = "its outputs are small differences of large numbers, of which few bits leave little"
# What is not run: rows, columns, promises and the reason; "" stands for all.
NOT_RUN = [
    (("adapted_text",) * (not TENSORFLOW), "", "", "Keras has strings on TensorFlow alone"),
    (ATTENTION * (not TENSORFLOW), "float16", "", "JAX has no attention in float16 on a CPU"),
    (others("lora", "int4_lora", "distilled"), "narrow_frozen", "", "nothing is frozen"),
    (others("gpt"), "remat", "", "no layer of it is a block: tests/lean has blocks of every kind"),
    (others(*ATTENTION, *GELU), "lean", "", "it has no attention, GELU or vocabulary"),
    (("images",), "qat_int4", "", "it has no layer that Keras quantizes"),
    (("int4_lora",), "qat_int4", "", "it is quantized"),
    (("int4_lora",), "narrow_frozen", "", "its frozen weights are integers"),
    (("subclass_inside_functional", "custom_layers"), "FP8", "step", SMALL),
    (("subclass_inside_functional",), "INT8", "step", SMALL),
    (("subclass_inside_functional",), "qat_int4", "step", SMALL),
    (("own_step",), "float16", "", "its step does not scale its loss, and is told so"),
    (UNSAVED, "", "file", "plain Keras cannot load what it saves"),
    (UNBUILT, "", "export", "no config says what it was made with: exports refuse it"),
    (("nested_and_shared",), "", "export", "it casts to bfloat16 itself, which an export leaves out"),
    (("lora", "int4_lora"), "", "file", "Keras merges LoRA into what it saves"),
    (("lora", "int4_lora"), "", "export", "LoRA is merged: tests/export/test_merged_export.py"),
    ((), "qat_int4", "export", "it holds the quantized weights: tests/qat"),
    ((), "narrow_frozen", "revert", "weights are float32 again, without their low bits: tests/lean/test_frozen.py"),
]


def reason(row, column, promise=""):
    """Why a cell, or a promise of it, is not run; "" where it is."""
    for rows, columns, promises, why in NOT_RUN:
        everywhere = rows == () and promises != ""
        if (everywhere or row in rows) and columns in column and promises in ("", promise):
            return why
    return ""


class Twin(NamedTuple):
    """A row in plain Keras and float32, trained."""

    weights: list
    x: object
    y: object
    outputs: np.ndarray
    losses: np.ndarray
    moved: np.ndarray


def flat(values):
    values = [ops.convert_to_numpy(ops.cast(value, "float32")) for value in keras.tree.flatten(values)]
    return np.concatenate([np.ravel(value).astype("float64") for value in values])


def outputs(model, x):
    return flat(model(x, training=False))


def off(actual, expected):
    """How far an array is from another, in parts of its length."""
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def built(row, policy, weights=None):
    """The row under a policy; dropout draws nothing, as Keras draws other masks in 16 bits."""
    keras.config.set_dtype_policy(policy)
    model, x = zoo.build(row, policy)
    for layer in model._flatten_layers():
        for name in ("rate", "_dropout"):
            if isinstance(getattr(layer, name, None), float):
                setattr(layer, name, 0.0)
        if isinstance(layer, keras.layers.RandomFlip):
            layer.mode = "none"
    if weights is not None:
        model.set_weights(weights)
    for layer in model.layers:
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()  # which computes with other numbers than its weights
    return model, x


def compiled_with(row):
    return {**COMPILED.get(row, {"loss": "mse"}), **HOW}


def own(weights):
    """Those that plain Keras has, too."""
    return [weight for weight in weights if "amax_history" not in weight.path]


def trained(model, x, y):
    """The losses of two steps, and how the weights that train have moved."""
    before = flat(own(model.trainable_variables))
    losses = [np.ravel(model.train_on_batch(x, y))[0] for _ in range(STEPS)]
    return np.array(losses, "float64"), flat(own(model.trainable_variables)) - before


@functools.cache
def twin(row):
    random_seed.start(row)  # the same for each of its cells, also alone
    model, x = built(row, "float32")
    for weight in model.weights:  # of both signs: of one sign alone, gradients are small differences of large numbers
        if weight.name in ("kernel", "recurrent_kernel", "embeddings", "lora_kernel_a", "lora_kernel_b"):
            if keras.backend.is_float_dtype(weight.dtype):
                weight.assign(ops.convert_to_numpy(weight) - 0.125)
    weights = model.get_weights()
    results = model(x, training=False)
    random = np.random.default_rng()
    if row in COMPILED:
        y = random.integers(0, results.shape[-1], results.shape[:-1])
    else:
        y = keras.tree.map_structure(lambda result: random.normal(size=result.shape).astype("float32"), results)
    model.compile(optimizer=keras.optimizers.SGD(0.005), **compiled_with(row))
    return Twin(weights, x, y, flat(results), *trained(model, x, y))


def said(model):
    """All that a model says of itself: classes, dtypes, weights, tensors of its graphs, treatments, config."""
    parts = [*layers_by_path(model).values(), *Walk(model).operations]
    tensors = [keras.tree.map_structure(lambda tensor: tensor.dtype, part.output) for part in Walk(model).operations]
    classes = [(type(part), getattr(part, "compute_dtype", None), getattr(part, "autocast", None)) for part in parts]
    return classes, [(w.path, w.dtype) for w in model.weights], tensors, [notes_of(part) for part in parts]


def treatments(model):
    """The names of the treatments of each layer and operation that has some."""
    parts = [*layers_by_path(model).values(), *Walk(model).operations]
    return [sorted(each) for each in (getattr(notes_of(part), "treatments", None) for part in parts) if each]


class Cell:
    """A model on its way; each promise is a method that raises where it is not kept."""

    def __init__(self, row, column):
        self.row, self.column, self.twin = row, COLUMNS[column], twin(row)
        self.model, _ = built(row, self.column.policy, self.twin.weights)
        self.x, self.y, self.before = self.twin.x, self.twin.y, said(self.model)
        optimizer = keras.optimizers.SGD(0.005)
        if self.column.policy == "mixed_float16":  # from a scale at which no step is skipped
            optimizer = keras_mp.LossScaleOptimizer(optimizer, keras_mp.LossScale.static(64.0))
        if self.column.change is None:
            assert keras_mp.prepare(self.model, optimizer, **compiled_with(row)) is self.model
        else:
            assert self.column.change(self.model) is self.model
            self.model.compile(optimizer=optimizer, **compiled_with(row))
        of_model = getattr(notes_of(self.model), "treatments", None)
        assert treatments(self.model) or of_model or column.startswith("prepare"), "nothing was changed"

    def step(self):
        """Outputs, losses and updates are those of plain Keras in float32."""
        near = self.column.near
        assert not sensitive_layers(self.model) or self.column.policy == "float32"
        distances = [off(outputs(self.model, self.x), self.twin.outputs)]
        losses, moved = trained(self.model, self.x, self.y)
        distances += [off(losses, self.twin.losses), off(moved, self.twin.moved)]
        assert all(d <= most for d, most in zip(distances, near, strict=True)), (distances, near)
        return distances

    def file(self, folder):
        """Saved and loaded it is the same, bit for bit."""
        self.model.save(folder / "model.keras")
        loaded = keras.saving.load_model(folder / "model.keras", vars(zoo), compile=False, safe_mode=False)
        np.testing.assert_array_equal(outputs(loaded, self.x), outputs(self.model, self.x))
        assert treatments(loaded) == treatments(self.model)

    def nonfinite(self):
        """A clean step is not blamed."""
        assert keras_mp.numerics.find_nonfinite(self.model, (self.x, self.y)) is None

    def export(self):
        """The model that exports write is float32, and plain Keras with these weights."""
        weights = [ops.convert_to_numpy(ops.cast(weight, "float32")) for weight in own(self.model.weights)]
        plain, _ = built(self.row, "float32", weights)
        exported = merged_float32(self.model)
        assert {layer.compute_dtype for layer in layers_by_path(exported).values()} <= {"float32", "string"}
        left = {name for names in treatments(exported) for name in names}
        assert left <= {*STABILIZED, INSIDE, OWN_POLICY}  # which change nothing in float32
        assert off(outputs(exported, self.x), outputs(plain, self.x)) < 1e-5

    def revert(self):
        """What was there before comes back, and computes what plain Keras does with these weights."""
        assert keras_mp.revert(self.model) is self.model
        assert said(self.model) == self.before
        plain, _ = built(self.row, self.column.policy, self.model.get_weights())
        np.testing.assert_array_equal(outputs(self.model, self.x), outputs(plain, self.x))


def cells():
    """The cells that are run, and the promises of each."""
    for row in zoo.MODELS:
        for column in COLUMNS:
            if not reason(row, column):
                asked = [promise for promise in PROMISES if promise != "nonfinite" or "prepare" in column]
                yield row, column, [promise for promise in asked if not reason(row, column, promise)]


def page():
    """The table, with a note for each reason."""
    notes = list(dict.fromkeys(why for *_, why in NOT_RUN))
    run = {(row, column): promises for row, column, promises in cells()}

    def number(row, column, promise=""):
        return f"[{notes.index(reason(row, column, promise)) + 1}](#notes)"

    def cell(row, column):
        if (row, column) not in run:
            return number(row, column)
        kept = run[row, column]
        return " ".join([*kept, *(number(row, column, p) for p in PROMISES if reason(row, column, p))])

    lines = [
        "# What works with what",
        "",
        "Each row is a small model, each column a change that the kit makes to it. A cell names the promises that",
        "`tests/promises` checks on TensorFlow, and of each change some on JAX; a number stands for the reason why one",
        "is not checked.",
        "",
        *(f"- `{promise}`: {words}" for promise, words in PROMISES.items()),
        "",
        "| model | " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * (len(COLUMNS) + 1),
        *(f"| {row}: {model.__doc__.partition('.')[0]} | " + " | ".join(cell(row, c) for c in COLUMNS) + " |"
          for row, model in zoo.MODELS.items()),
        "",
        "## Notes",
        "",
        *(f"{place}. {why}" for place, why in enumerate(notes, 1)),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
