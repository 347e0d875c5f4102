"""The jitted programs inside a graph of TensorFlow, and scopes in which it is traced with them and without."""

from contextlib import nullcontext

from keras_mp import backend
from keras_mp.lean.gelu import gelu

engine = backend.engine_of("keras_mp.lean")


def with_islands(wanted):
    """A scope in which what is traced has islands where it can, or none."""
    return nullcontext() if wanted else backend.without_islands()


def step_scope():
    """The scope in which a prepared model traces a step on a batch of known sizes."""
    return engine.step_scopes(gelu)(())


def jitted(function):
    """The names of the jitted programs that a traced function, or a concrete one, calls."""
    concrete = function.get_concrete_function() if hasattr(function, "get_concrete_function") else function
    library = concrete.graph.as_graph_def().library.function
    return [called.signature.name for called in library if called.attr["_XlaMustCompile"].b]


def jitted_in_step(model, *batch):
    """The same of a model's training step, traced for batches of any size."""
    import tensorflow as tf

    step = tf.function(lambda *batch: model.train_step(batch), autograph=False)
    return jitted(step.get_concrete_function(*(tf.TensorSpec((None, *part.shape[1:]), part.dtype) for part in batch)))
