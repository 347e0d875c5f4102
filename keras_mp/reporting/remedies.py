"""Lines of code that mend findings, in reports and pages.

`inspect` and `advise` print them, `audit` and `find_nonfinite` name them in their sentences, and docs/nan.md lists
those for values that are not finite. Braces stand for what a report fills in.
"""

POLICY = 'keras_mp.set_global_policy("{precision}")'
PRECISION_OF_MODEL = 'model = keras_mp.export.in_precision(model, "{precision}")'
AUDIT = "report = keras_mp.audit(model, batches)  # says which layers fit 16 bits"
FLOAT32_LAYER = "dtype='float32'"
STABILIZE = "model = keras_mp.stabilize(model)"
SCALE_LOSS = "optimizer = keras_mp.loss_scaling.wrap_optimizer(optimizer, model)"
KEEP_STATISTICS = "keras_mp.loss_scaling.atomic_skip(model)"
NARROW_FROZEN = "model = keras_mp.lean.narrow_frozen(model)"
LEAN = "model = keras_mp.lean.make_lean(model)"
RECOMPUTE = "model = keras_mp.lean.make_lean(model, remat=True)"
MICRO_BATCHES = "model = keras_mp.loss_scaling.change_optimizer(model, accumulate={steps})"
STATES = 'model = keras_mp.loss_scaling.change_optimizer(model, state_dtype="{dtype}")'
RELEASED = 'model = keras_mp.loss_scaling.change_optimizer(model, state_dtype="{dtype}", release_gradients=True)'
ON_HOST = (
    'model = keras_mp.loss_scaling.change_optimizer(model, state_dtype="{dtype}", state_memory="host", '
    "release_gradients=True)"
)
DEVICES = 'with keras_mp.parallel.distribute("{strategy}", devices={devices}):'
FP8 = 'model = keras_mp.convert(model, "{scaling}")'
NO_FP8 = 'model = keras_mp.revert(model, "convert")'
