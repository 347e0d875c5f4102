"""The kit, and plain Keras: training steps of the same model, as workloads of a benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
from keras import layers
from peer_workloads import WORKLOADS, PeerModel, batch_of, details_of

import keras_mp
from benchmarks.plain_models import plain_gpt, plain_vit
from keras_mp.bench.keras_step import check_can_run, of_model
from keras_mp.bench.workloads import Workload
from models.gpt import gpt
from models.llama import LlamaSize, llama
from models.resnet import resnet_imagenet
from models.transformer import Size
from models.vit import vit
from recipes.common.fp8 import every_product


def kit(workload: str, precision: str, fp8: str = "current", islands: bool = True) -> Workload:
    """The kit's model, in a precision and compiled as its training recipes are; its step has islands or none."""
    check_can_run(precision)
    made = _workload(kit_compiled(workload, precision, fp8), WORKLOADS[workload], precision)

    def run(steps: int) -> float:
        with keras_mp.backend.without_islands():  # in the first step, which is traced
            return made.run(steps)

    return made if islands else made._replace(run=run)


def kit_compiled(workload: str, precision: str, fp8: str = "current") -> keras.Model:
    """The model of that step."""
    chosen = WORKLOADS[workload]
    keras.utils.set_random_seed(0)
    choice = keras_mp.set_global_policy(precision)
    loss = keras_mp.lean.ChunkedCrossEntropy() if chosen.reads_text else cross_entropy()
    fp8_of_all = every_product(choice, fp8)
    return keras_mp.prepare(kit_model(chosen), optimizer(), loss, fp8=fp8_of_all)


def plain(workload: str, policy: str, jit: bool | str = "auto", float8: bool = False) -> Workload:
    """The same model of Keras's layers alone, under a policy of Keras's; on request with Keras's own float8 layers."""
    chosen = WORKLOADS[workload]
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = plain_model(chosen)
    if float8:
        for layer in model._flatten_layers():
            if isinstance(layer, (layers.Dense, layers.EinsumDense)):
                layer.quantize("float8")
    model.compile(optimizer(), cross_entropy(), jit_compile=jit)
    return _workload(model, chosen, policy)


def kit_model(sizes: PeerModel) -> keras.Model:
    """The model of `models/`."""
    if sizes.kind == "gpt":
        *size, vocabulary, length = sizes.sizes
        return gpt(Size(*size), vocabulary, length)
    if sizes.kind == "llama":
        *size, length = sizes.sizes
        return llama(LlamaSize(*size, tied=True, theta=500000.0), length)
    if sizes.kind == "vit":
        *size, classes, side, patch = sizes.sizes
        return vit(Size(*size), classes, (side, side, 3), patch)
    return _resnet(*sizes.sizes)


def plain_model(sizes: PeerModel) -> keras.Model:
    """The model as it is written without the kit."""
    if sizes.kind == "gpt":
        return plain_gpt(*sizes.sizes)
    if sizes.kind == "vit":
        return plain_vit(*sizes.sizes)
    return _resnet(*sizes.sizes)  # has nothing of the kit


def _resnet(depth: int, classes: int, side: int) -> keras.Model:
    return resnet_imagenet(depth, classes, (side, side, 3), stem="small" if side < 64 else "large")


def optimizer() -> keras.optimizers.Optimizer:
    """The optimizer of all."""
    return keras.optimizers.AdamW(1e-4, weight_decay=0.01)


def cross_entropy() -> keras.losses.Loss:
    """The loss of all but the lean GPT."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _workload(model: keras.Model, sizes: PeerModel, precision: str) -> Workload:
    workload = of_model(model, batch_of(sizes), precision)
    return workload._replace(details=workload.details | details_of(sizes))
