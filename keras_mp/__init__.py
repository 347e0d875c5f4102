"""Mixed-precision training for Keras 3 that you can prove.

The public names below are imported when they are first used, so that `import keras_mp` itself costs nothing and
imports neither TensorFlow nor JAX.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_mp import fp8 as fp8
    from keras_mp.batches import Batches as Batches
    from keras_mp.batches import ShuffledBatches as ShuffledBatches
    from keras_mp.bench.benchmark import benchmark as benchmark
    from keras_mp.bench.report import BenchmarkReport as BenchmarkReport
    from keras_mp.checkpoint import TrainingCheckpoint as TrainingCheckpoint
    from keras_mp.cross_entropy import chunked_cross_entropy as chunked_cross_entropy
    from keras_mp.deploy.litert import export_litert as export_litert
    from keras_mp.deploy.onnx import export_onnx as export_onnx
    from keras_mp.export import export_float32 as export_float32
    from keras_mp.gelu import Gelu as Gelu
    from keras_mp.language_model import ChunkedCrossEntropy as ChunkedCrossEntropy
    from keras_mp.language_model import LanguageModel as LanguageModel
    from keras_mp.loss_scale import LossScale as LossScale
    from keras_mp.loss_scale import NoLossScale as NoLossScale
    from keras_mp.loss_scale import StaticLossScale as StaticLossScale
    from keras_mp.monitor import PrecisionMonitor as PrecisionMonitor
    from keras_mp.numerics.audit import AuditReport as AuditReport
    from keras_mp.numerics.audit import audit as audit
    from keras_mp.numerics.blame import NonFinite as NonFinite
    from keras_mp.numerics.blame import find_nonfinite as find_nonfinite
    from keras_mp.numerics.finder import NonFiniteFinder as NonFiniteFinder
    from keras_mp.numerics.parity import ParityReport as ParityReport
    from keras_mp.numerics.parity import compare_training as compare_training
    from keras_mp.numerics.search import PolicySearch as PolicySearch
    from keras_mp.numerics.search import search_policy as search_policy
    from keras_mp.optimizer import LossScaleOptimizer as LossScaleOptimizer
    from keras_mp.parallel.distribute import distribute as distribute
    from keras_mp.policy import choose_policy as choose_policy
    from keras_mp.policy import policy_scope as policy_scope
    from keras_mp.policy import set_global_policy as set_global_policy
    from keras_mp.recompute import remat as remat
    from keras_mp.self_attention import SelfAttention as SelfAttention
    from keras_mp.sensitive import sensitive_layers as sensitive_layers
    from keras_mp.skip import atomic_skip as atomic_skip
    from keras_mp.stabilized import stabilize as stabilize
    from keras_mp.wrap import wrap_optimizer as wrap_optimizer
    from keras_mp.xla.report import CompileReport as CompileReport
    from keras_mp.xla.report import inspect as inspect

_HOME = {
    "AuditReport": "keras_mp.numerics.audit",
    "Batches": "keras_mp.batches",
    "BenchmarkReport": "keras_mp.bench.report",
    "ChunkedCrossEntropy": "keras_mp.language_model",
    "CompileReport": "keras_mp.xla.report",
    "Gelu": "keras_mp.gelu",
    "LanguageModel": "keras_mp.language_model",
    "LossScale": "keras_mp.loss_scale",
    "LossScaleOptimizer": "keras_mp.optimizer",
    "NoLossScale": "keras_mp.loss_scale",
    "NonFinite": "keras_mp.numerics.blame",
    "NonFiniteFinder": "keras_mp.numerics.finder",
    "ParityReport": "keras_mp.numerics.parity",
    "PolicySearch": "keras_mp.numerics.search",
    "PrecisionMonitor": "keras_mp.monitor",
    "SelfAttention": "keras_mp.self_attention",
    "ShuffledBatches": "keras_mp.batches",
    "StaticLossScale": "keras_mp.loss_scale",
    "TrainingCheckpoint": "keras_mp.checkpoint",
    "atomic_skip": "keras_mp.skip",
    "audit": "keras_mp.numerics.audit",
    "benchmark": "keras_mp.bench.benchmark",
    "choose_policy": "keras_mp.policy",
    "chunked_cross_entropy": "keras_mp.cross_entropy",
    "compare_training": "keras_mp.numerics.parity",
    "distribute": "keras_mp.parallel.distribute",
    "export_float32": "keras_mp.export",
    "export_litert": "keras_mp.deploy.litert",
    "export_onnx": "keras_mp.deploy.onnx",
    "find_nonfinite": "keras_mp.numerics.blame",
    "inspect": "keras_mp.xla.report",
    "policy_scope": "keras_mp.policy",
    "remat": "keras_mp.recompute",
    "search_policy": "keras_mp.numerics.search",
    "sensitive_layers": "keras_mp.sensitive",
    "set_global_policy": "keras_mp.policy",
    "stabilize": "keras_mp.stabilized",
    "wrap_optimizer": "keras_mp.wrap",
}
_MODULES = ("backend", "chips", "fp8", "hardware")

__all__ = [*_HOME, *_MODULES]


def register_classes() -> None:
    """Imports the classes that saved models name: Keras finds only what has been registered by then."""
    for name in ("stabilized", "optimizer", "fp8", "gelu", "language_model", "recompute", "self_attention"):
        import_module(f"keras_mp.{name}")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        register_classes()
        value = getattr(import_module(_HOME[name]), name)
    elif name in _MODULES:
        if name == "fp8":
            register_classes()
        value = import_module(f"keras_mp.{name}")
    else:
        raise AttributeError(f"module 'keras_mp' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Where Keras is not there yet, the first use of a public name registers them.
if "keras" in sys.modules:
    register_classes()
