"""Every attribute of Keras and JAX that the kit replaces.

It is replaced for a scope, and then put back; so are methods of live layers, and the global policy.
"""

from __future__ import annotations

import pkgutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import keras

Make = Callable[[Any], Any]
"""Makes the replacement, given what it replaces."""


class Patch(NamedTuple):
    """Attribute of Keras or JAX that is replaced at times."""

    place: str  # the attribute with its owner, before it a colon if that is a class or another attribute of a module
    backends: tuple[str, ...]  # the backends whose steps need it
    reason: str  # the fault of Keras that it mends, or what Keras has no public way for

    @property
    def name(self) -> str:
        """The place in dots, such as "keras.Variable.assign"."""
        return self.place.replace(":", ".")


VERSIONS = ("3.13", "3.15")
"""The versions of Keras, the first and the last, that the patches were tried with."""
# Each attribute, and the reason for its replacement, by the backends that need it.
_ON_BOTH = {
    "keras.random:SeedGenerator.next": "Every replica draws the same dropout mask: the seed is the same on all.",
    **dict.fromkeys(
        ("keras.src.ops.convert_to_numpy", "keras.src.ops.convert_to_tensor"),
        "quantize() makes codes and scales with NumPy, on the host, and a step that trains with them is a program.",
    ),
}
_ON_TENSORFLOW = {
    "keras:Model._make_function": (
        "steps_per_execution above 1 fails on several replicas, even with plain SGD (keras#19246)."
    ),
    "keras.src.backend:numpy.add": (
        "A bias is added by an operation whose gradient TensorFlow's kernel for CPUs sums in bfloat16."
    ),
    **dict.fromkeys(
        ("keras.src.backend:nn.conv", "keras.src.backend:nn.gelu", "keras.src.backend:nn.silu"),
        "In a step on a CPU it is many kernels, and a model may call it anywhere, not only in layers.",
    ),
    **dict.fromkeys(
        (
            "keras.src.backend.tensorflow.optimizer:TFOptimizer._backend_update_step",
            "keras.src.backend.tensorflow.optimizer:TFOptimizer._apply_weight_decay",
        ),
        "An update asks the distribution strategy for each variable, which it does not answer within a jitted program.",
    ),
    "keras.src.backend.tensorflow.nn._cpu_only": (
        "A step is lowered for a chip that is not there, and Keras and KerasHub ask the runtime which chips it has."
    ),
    "keras.src.backend.tensorflow.rnn._is_gpu_available": (
        "Where there is a GPU, it is given cuDNN's recurrent layers, which XLA does not compile."
    ),
}
_ON_JAX = {
    "keras:Variable._initialize_with_initializer": (
        "A model is built from shapes alone. In keras.StatelessScope(initialize_variables=False) no optimizer can be "
        "made: it reads the value of its learning rate. On several devices a weight is made whole on one of them and "
        "then divided; where it is not, it is compiled anew for each weight."
    ),
    "keras:Variable.assign": (
        "A loaded array is copied whole to one device and then divided; with several processes JAX also sends all of "
        "it to each of them, to compare it, which takes ten times its memory (keras#21634)."
    ),
    "keras.src.saving.saving_lib:H5IOStore.__getitem__": (
        "Each process reads every array of a weights file whole, of which it keeps the parts of its devices."
    ),
    "keras:Variable._deferred_initialize": (
        "It forgets the initializer of a variable that was made in a symbolic call, without which a variable that has "
        "no value cannot be read in the next."
    ),
    "keras:Variable._maybe_autocast": (
        "Each reading of a variable passes through it: there a device's part is gathered, so that a block that is "
        "recomputed gathers anew. A stateless scope would hand out, and remat keep, the whole."
    ),
    "keras:StatelessScope.__init__": "It refuses a value of another shape than its variable's, as a device's part is.",
    "keras:Model.compute_loss_and_updates": (
        "There is no hook between the loss of a step and its gradients, which the compiler sums in float32, whole."
    ),
    "keras.src.backend.jax.distribution_lib.distribute_data_input": (
        "A last batch that the devices cannot divide is laid out as the batches before it, which fails."
    ),
    "keras.src.backend.jax.trainer.jit": (
        "A model cannot be given options of XLA's compiler, with which it multiplies faster on a CPU."
    ),
    "keras.src.backend:nn.dot_product_attention": (
        "On a TPU it attends causally where there is no mask, and with scores that are not scaled."
    ),
    "keras.src.backend:numpy.take": (
        "The gradient of an embedding begins with zeros that XLA for GPUs makes before the backward pass, and keeps."
    ),
    **dict.fromkeys(
        ("jax.devices", "jax.default_backend"),
        "A step is lowered for a chip that is not there, and Keras and KerasHub ask the runtime which chips it has.",
    ),
    **dict.fromkeys(
        (
            "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version",
            "jax._src.cudnn.fused_attention_stablehlo.check_compute_capability",
            "jax._src.cudnn.fused_attention_stablehlo.is_cuda_compute_capability_equal",
        ),
        "A step is lowered for a GPU that is not there: JAX asks for its capability and cuDNN before it takes cuDNN's "
        "attention, of which XLA needs neither.",
    ),
    "jax._src.dispatch.jaxpr_has_prim_requiring_devices": (
        "JAX does not lower cuDNN's attention for several devices that are not there, though each device's own part of "
        "a step asks for none."
    ),
    "jax._src.distributed:_jax.get_distributed_runtime_service": (
        "JAX has no argument for the time that its coordination service waits for all processes of a training."
    ),
}
PATCHES = tuple(
    Patch(place, backends, reason)
    for backends, reasons in (
        (("tensorflow", "jax"), _ON_BOTH),
        (("tensorflow",), _ON_TENSORFLOW),
        (("jax",), _ON_JAX),
    )
    for place, reason in reasons.items()
)
_BY_NAME = {patch.name: patch for patch in PATCHES}
_INHERITED = object()
_lock = threading.RLock()
_replaced: dict[str, _Replaced] = {}


@contextmanager
def patched(replacements: Mapping[str, Make]) -> Iterator[None]:
    """Scope in which attributes are replaced, in every thread.

    A scope within another, or one of another thread, replaces what is there by then. Scopes may end in any order: each
    takes its own replacement away, and with the last the attribute is Keras's again, also after an exception. Where two
    scopes give the same function, it is applied once.

    Args:
        replacements: a function for each patch, by its name, from what is replaced to the replacement. It is called
            again when a scope that was entered earlier ends first.

    Raises:
        ValueError: a name is not in `PATCHES`.
        AttributeError: this version of Keras does not have the attribute; nothing is replaced.
    """
    places = [(_place(name), make) for name, make in replacements.items()]
    entered: list[tuple[_Replaced, Make]] = []
    try:
        for place, make in places:
            place.add(make)
            entered.append((place, make))
        yield
    finally:
        for place, make in reversed(entered):
            place.remove(make)


class _Replaced:
    """Attribute, and what takes its place at the moment."""

    def __init__(self, patch: Patch) -> None:
        owner, _, self._attribute = patch.place.rpartition(".")
        self._makes: list[Make] = []
        try:
            # The colon matters: `keras.src.backend.numpy` is a module, too, and `backend.tensorflow.rnn` a function.
            self._owner = pkgutil.resolve_name(owner)
            self._keras_own = getattr(self._owner, self._attribute)
        except (ImportError, AttributeError) as error:
            raise AttributeError(
                f"With Keras {keras.__version__} there is no {patch.name}, which keras_mp replaces: {patch.reason} It "
                f"was tried with Keras {' to '.join(VERSIONS)}: install one of these"
            ) from error

    def add(self, make: Make) -> None:
        """Replaces what is there by what `make` makes of it."""
        with _lock:
            if not self._makes:
                self._before = vars(self._owner).get(self._attribute, _INHERITED)
                self._keras_own = getattr(self._owner, self._attribute)
            self._put([*self._makes, make])

    def remove(self, make: Make) -> None:
        """Takes the newest replacement of `make` away; others stay."""
        with _lock:
            last = max(index for index, other in enumerate(self._makes) if other is make)
            self._put([other for index, other in enumerate(self._makes) if index != last])

    def _put(self, makes: list[Make]) -> None:
        value = self._keras_own
        for make in dict.fromkeys(makes):  # the same in two threads counts once
            value = make(value)
        self._makes = makes
        if makes:
            setattr(self._owner, self._attribute, value)
        elif self._before is _INHERITED:
            delattr(self._owner, self._attribute)
        else:
            setattr(self._owner, self._attribute, self._before)


def _place(name: str) -> _Replaced:
    if name not in _BY_NAME:
        raise ValueError(f"{name!r} is no patch of Keras: add it to PATCHES, with its reason, beside {list(_BY_NAME)}")
    with _lock:
        if name not in _replaced:
            _replaced[name] = _Replaced(_BY_NAME[name])
        return _replaced[name]


# Makes the name scope of a layer's next call, while a step is lowered.
scopes: ContextVar[Callable[[Any], AbstractContextManager] | None] = ContextVar("scopes", default=None)


@contextmanager
def wrapped_methods(
    layers: Iterable[tuple[str, Any]], names: Iterable[str], wrap: Callable[..., Callable[..., Any]]
) -> Iterator[None]:
    """Scope in which methods of layers are replaced.

    Args:
        layers: (path, layer) pairs; operations that are no layers are welcome.
        names: the names of the methods; a layer that has none of a name is left alone.
        wrap: `wrap(path, layer, name, function)` returns the function to call instead.
    """
    layers, names = list(layers), list(names)
    methods = [(path, layer, name) for path, layer in layers for name in names if callable(getattr(layer, name, None))]
    # The instance's own dict, because Keras's __setattr__ tracks what it is given.
    hidden = [(layer, name, vars(layer).get(name)) for _, layer, name in methods]
    try:
        for path, layer, name in methods:
            vars(layer)[name] = wrap(path, layer, name, getattr(layer, name))
        yield
    finally:
        for layer, name, before in hidden:
            vars(layer).pop(name, None)
            if before is not None:
                vars(layer)[name] = before


def call_scope(layer: Any) -> AbstractContextManager:
    """Scope in which operations count as a layer's call."""
    # Where no step is lowered that has the layer, it does nothing.
    scope = scopes.get()
    return nullcontext() if scope is None else scope(layer)


@contextmanager
def restored_policy(policy: Any = None) -> Iterator[None]:
    """Puts the global policy back; sets one within, if given."""
    previous = keras.mixed_precision.dtype_policy()
    try:
        if policy is not None:
            keras.mixed_precision.set_global_policy(policy)
        yield
    finally:
        keras.mixed_precision.set_global_policy(previous)
