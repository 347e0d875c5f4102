"""Mixed-precision training for Keras 3 on TensorFlow and JAX, with every claim checked.

The public names below are imported when they are first used, so that `import keras_mp` itself costs nothing and
imports neither TensorFlow nor JAX.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from keras_mp.conversion.registration import register_classes

if TYPE_CHECKING:
    from keras_mp import backend as backend
    from keras_mp import fp8 as fp8
    from keras_mp.bench.benchmark import benchmark as benchmark
    from keras_mp.bench.report import BenchmarkReport as BenchmarkReport
    from keras_mp.export.litert import export_litert as export_litert
    from keras_mp.export.onnx import export_onnx as export_onnx
    from keras_mp.export.saved_model import export_float32 as export_float32
    from keras_mp.lean.cross_entropy import chunked_cross_entropy as chunked_cross_entropy
    from keras_mp.lean.gelu import Gelu as Gelu
    from keras_mp.lean.language_model import ChunkedCrossEntropy as ChunkedCrossEntropy
    from keras_mp.lean.language_model import LanguageModel as LanguageModel
    from keras_mp.lean.remat import remat as remat
    from keras_mp.lean.self_attention import SelfAttention as SelfAttention
    from keras_mp.loss_scaling.atomic_skip import atomic_skip as atomic_skip
    from keras_mp.loss_scaling.loss_scale import LossScale as LossScale
    from keras_mp.loss_scaling.loss_scale import NoLossScale as NoLossScale
    from keras_mp.loss_scaling.loss_scale import StaticLossScale as StaticLossScale
    from keras_mp.loss_scaling.monitor import PrecisionMonitor as PrecisionMonitor
    from keras_mp.loss_scaling.optimizer import LossScaleOptimizer as LossScaleOptimizer
    from keras_mp.loss_scaling.wrap_optimizer import wrap_optimizer as wrap_optimizer
    from keras_mp.numerics.audit import audit as audit
    from keras_mp.numerics.audit_report import AuditReport as AuditReport
    from keras_mp.numerics.compare_training import ParityReport as ParityReport
    from keras_mp.numerics.compare_training import compare_training as compare_training
    from keras_mp.numerics.nonfinite import NonFinite as NonFinite
    from keras_mp.numerics.nonfinite import find_nonfinite as find_nonfinite
    from keras_mp.numerics.nonfinite_callback import NonFiniteFinder as NonFiniteFinder
    from keras_mp.numerics.search import PolicySearch as PolicySearch
    from keras_mp.numerics.search import search_policy as search_policy
    from keras_mp.parallel.distribute import distribute as distribute
    from keras_mp.parallel.tensor_rules import tensor_rules as tensor_rules
    from keras_mp.precision import chips as chips
    from keras_mp.precision import hardware as hardware
    from keras_mp.precision.policy import choose_policy as choose_policy
    from keras_mp.precision.policy import policy_scope as policy_scope
    from keras_mp.precision.policy import set_global_policy as set_global_policy
    from keras_mp.stability.sensitive import sensitive_layers as sensitive_layers
    from keras_mp.stability.stabilized import stabilize as stabilize
    from keras_mp.training.batches import Batches as Batches
    from keras_mp.training.batches import ShuffledBatches as ShuffledBatches
    from keras_mp.training.checkpoint import TrainingCheckpoint as TrainingCheckpoint
    from keras_mp.training.prepare import prepare as prepare
    from keras_mp.xla.inspect import inspect as inspect
    from keras_mp.xla.report import CompileReport as CompileReport

_HOME = {
    "AuditReport": "keras_mp.numerics.audit_report",
    "Batches": "keras_mp.training.batches",
    "BenchmarkReport": "keras_mp.bench.report",
    "ChunkedCrossEntropy": "keras_mp.lean.language_model",
    "CompileReport": "keras_mp.xla.report",
    "Gelu": "keras_mp.lean.gelu",
    "LanguageModel": "keras_mp.lean.language_model",
    "LossScale": "keras_mp.loss_scaling.loss_scale",
    "LossScaleOptimizer": "keras_mp.loss_scaling.optimizer",
    "NoLossScale": "keras_mp.loss_scaling.loss_scale",
    "NonFinite": "keras_mp.numerics.nonfinite",
    "NonFiniteFinder": "keras_mp.numerics.nonfinite_callback",
    "ParityReport": "keras_mp.numerics.compare_training",
    "PolicySearch": "keras_mp.numerics.search",
    "PrecisionMonitor": "keras_mp.loss_scaling.monitor",
    "SelfAttention": "keras_mp.lean.self_attention",
    "ShuffledBatches": "keras_mp.training.batches",
    "StaticLossScale": "keras_mp.loss_scaling.loss_scale",
    "TrainingCheckpoint": "keras_mp.training.checkpoint",
    "atomic_skip": "keras_mp.loss_scaling.atomic_skip",
    "audit": "keras_mp.numerics.audit",
    "benchmark": "keras_mp.bench.benchmark",
    "choose_policy": "keras_mp.precision.policy",
    "chunked_cross_entropy": "keras_mp.lean.cross_entropy",
    "compare_training": "keras_mp.numerics.compare_training",
    "distribute": "keras_mp.parallel.distribute",
    "export_float32": "keras_mp.export.saved_model",
    "export_litert": "keras_mp.export.litert",
    "export_onnx": "keras_mp.export.onnx",
    "find_nonfinite": "keras_mp.numerics.nonfinite",
    "inspect": "keras_mp.xla.inspect",
    "policy_scope": "keras_mp.precision.policy",
    "prepare": "keras_mp.training.prepare",
    "remat": "keras_mp.lean.remat",
    "search_policy": "keras_mp.numerics.search",
    "sensitive_layers": "keras_mp.stability.sensitive",
    "set_global_policy": "keras_mp.precision.policy",
    "stabilize": "keras_mp.stability.stabilized",
    "tensor_rules": "keras_mp.parallel.tensor_rules",
    "wrap_optimizer": "keras_mp.loss_scaling.wrap_optimizer",
}
_MODULES = ("backend", "chips", "fp8", "hardware")

__all__ = [*_HOME, *_MODULES]


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
