"""Every attribute of Keras and JAX that the kit replaces, and the one way to do it: for a scope, and then put back."""

from __future__ import annotations

import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras

Make = Callable[[Any], Any]
"""Makes the replacement, given what it replaces."""


@dataclass(frozen=True)
class Patch:
    """An attribute of Keras, or of JAX, that is replaced for a while.

    Attributes:
        owner: the module, or `module:class`, that has it.
        attribute: the name of the attribute.
        backends: the backends whose steps need it.
        versions: the versions of Keras, the first and the last, that it was tried with.
        reason: the fault of Keras that it mends, or what Keras has no public way for.
    """

    owner: str
    attribute: str
    backends: tuple[str, ...]
    versions: tuple[str, str]
    reason: str

    @property
    def name(self) -> str:
        """The attribute with its owner, such as "keras.Variable._maybe_autocast"."""
        return f"{self.owner.replace(':', '.')}.{self.attribute}"


_VERSIONS = ("3.13", "3.15")
PATCHES: tuple[Patch, ...] = (
    Patch(
        "keras:Variable",
        "_initialize_with_initializer",
        ("jax",),
        _VERSIONS,
        "A model is built from shapes alone. In keras.StatelessScope(initialize_variables=False) no optimizer can be "
        "made: it reads the value of its learning rate. On several devices a weight is made whole on one of them and "
        "then divided; where it is not, it is compiled anew for each weight.",
    ),
    Patch(
        "keras:Variable",
        "assign",
        ("jax",),
        _VERSIONS,
        "A loaded array is copied whole to one device and then divided; with several processes JAX also sends all of "
        "it to each of them, to compare it, which takes ten times its memory (keras#21634).",
    ),
    Patch(
        "keras.src.saving.saving_lib:H5IOStore",
        "__getitem__",
        ("jax",),
        _VERSIONS,
        "Each process reads every array of a weights file whole, of which it keeps the parts of its devices.",
    ),
    Patch(
        "keras:Variable",
        "_deferred_initialize",
        ("jax",),
        _VERSIONS,
        "It forgets the initializer of a variable that was made in a symbolic call, without which a variable that has "
        "no value cannot be read in the next.",
    ),
    Patch(
        "keras:Variable",
        "_maybe_autocast",
        ("jax",),
        _VERSIONS,
        "Each reading of a variable passes through it: there a device's part is gathered, so that a block that is "
        "recomputed gathers anew. A stateless scope would hand out, and remat keep, the whole.",
    ),
    Patch(
        "keras:StatelessScope",
        "__init__",
        ("jax",),
        _VERSIONS,
        "It refuses a value of another shape than its variable's, as a device's part is.",
    ),
    Patch(
        "keras.random:SeedGenerator",
        "next",
        ("tensorflow", "jax"),
        _VERSIONS,
        "Every replica draws the same dropout mask: the seed is the same on all.",
    ),
    Patch(
        "keras:Model",
        "compute_loss_and_updates",
        ("jax",),
        _VERSIONS,
        "There is no hook between the loss of a step and its gradients, which the compiler sums in float32, whole.",
    ),
    Patch(
        "keras.src.backend.jax.distribution_lib",
        "distribute_data_input",
        ("jax",),
        _VERSIONS,
        "A last batch that the devices cannot divide is laid out as the batches before it, which fails.",
    ),
    Patch(
        "keras.src.backend.jax.trainer",
        "jit",
        ("jax",),
        _VERSIONS,
        "A model cannot be given options of XLA's compiler, with which it multiplies faster on a CPU.",
    ),
    Patch(
        "keras:Model",
        "_make_function",
        ("tensorflow",),
        _VERSIONS,
        "steps_per_execution above 1 fails on several replicas, even with plain SGD (keras#19246).",
    ),
)
PATCHES += (
    Patch(
        "keras.src.backend:nn",
        "dot_product_attention",
        ("jax",),
        _VERSIONS,
        "On a TPU it attends causally where there is no mask, and with scores that are not scaled.",
    ),
    Patch(
        "keras.src.backend:numpy",
        "add",
        ("tensorflow",),
        _VERSIONS,
        "A bias is added by an operation whose gradient TensorFlow's kernel for CPUs sums in bfloat16.",
    ),
    Patch(
        "keras.src.backend:numpy",
        "take",
        ("jax",),
        _VERSIONS,
        "The gradient of an embedding begins with zeros that XLA for GPUs makes before the backward pass, and keeps.",
    ),
)
PATCHES += tuple(
    Patch(
        "keras.src.backend:nn",
        name,
        ("tensorflow",),
        _VERSIONS,
        "In a step on a CPU it is many kernels, and a model may call it anywhere, not only in layers.",
    )
    for name in ("conv", "gelu", "silu")
)
PATCHES += tuple(
    Patch(
        "keras.src.backend.tensorflow.optimizer:TFOptimizer",
        name,
        ("tensorflow",),
        _VERSIONS,
        "An update asks the distribution strategy for each variable, which it does not answer within a jitted program.",
    )
    for name in ("_backend_update_step", "_apply_weight_decay")
)
PATCHES += tuple(
    Patch(
        "keras.src.ops",
        name,
        ("tensorflow", "jax"),
        _VERSIONS,
        "quantize() makes codes and scales with NumPy, on the host, and a step that trains with them is a program.",
    )
    for name in ("convert_to_numpy", "convert_to_tensor")
)
_ABSENT = "A step is lowered for a chip that is not there, and Keras and KerasHub ask the runtime which chips it has."
PATCHES += tuple(Patch("jax", name, ("jax",), _VERSIONS, _ABSENT) for name in ("devices", "default_backend"))
PATCHES += tuple(
    Patch(
        "jax._src.cudnn.fused_attention_stablehlo",
        name,
        ("jax",),
        _VERSIONS,
        "A step is lowered for a GPU that is not there: JAX asks for its capability and cuDNN before it takes cuDNN's "
        "attention, of which XLA needs neither.",
    )
    for name in ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")
)
PATCHES += (
    Patch(
        "jax._src.dispatch",
        "jaxpr_has_prim_requiring_devices",
        ("jax",),
        _VERSIONS,
        "JAX does not lower cuDNN's attention for several devices that are not there, though each device's own part of "
        "a step asks for none.",
    ),
    Patch(
        "jax._src.distributed:_jax",
        "get_distributed_runtime_service",
        ("jax",),
        _VERSIONS,
        "JAX has no argument for the time that its coordination service waits for all processes of a training.",
    ),
    Patch("keras.src.backend.tensorflow.nn", "_cpu_only", ("tensorflow",), _VERSIONS, _ABSENT),
    Patch(
        "keras.src.backend.tensorflow.rnn",
        "_is_gpu_available",
        ("tensorflow",),
        _VERSIONS,
        "Where there is a GPU, it is given cuDNN's recurrent layers, which XLA does not compile.",
    ),
)
_BY_NAME = {patch.name: patch for patch in PATCHES}
_INHERITED = object()
_lock = threading.RLock()
_replaced: dict[str, _Replaced] = {}


@contextmanager
def patched(replacements: Mapping[str, Make]) -> Iterator[None]:
    """A scope in which attributes of Keras are replaced, in every thread.

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
    """An attribute of Keras, and what takes its place at the moment.

    Raises:
        AttributeError: Keras does not have it.
    """

    def __init__(self, patch: Patch) -> None:
        self._patch = patch
        self._makes: list[Make] = []
        try:
            self._owner = pkgutil.resolve_name(patch.owner)
            self._keras_own = getattr(self._owner, patch.attribute)
        except (ImportError, AttributeError) as error:
            raise AttributeError(
                f"With Keras {keras.__version__} there is no {patch.name}, which keras_mp replaces: {patch.reason} It "
                f"was tried with Keras {' to '.join(patch.versions)}: install one of these"
            ) from error

    def add(self, make: Make) -> None:
        """Replaces what is there by what `make` makes of it."""
        with _lock:
            if not self._makes:
                self._before = vars(self._owner).get(self._patch.attribute, _INHERITED)
                self._keras_own = getattr(self._owner, self._patch.attribute)
            self._put([*self._makes, make])

    def remove(self, make: Make) -> None:
        """Takes the replacement away that `make` made, the newest of them; others stay."""
        with _lock:
            last = max(index for index, other in enumerate(self._makes) if other is make)
            self._put([other for index, other in enumerate(self._makes) if index != last])

    def _put(self, makes: list[Make]) -> None:
        value = self._keras_own
        for make in dict.fromkeys(makes):  # the same in two threads counts once
            value = make(value)
        self._makes = makes
        if makes:
            setattr(self._owner, self._patch.attribute, value)
        elif self._before is _INHERITED:
            delattr(self._owner, self._patch.attribute)
        else:
            setattr(self._owner, self._patch.attribute, self._before)


def _place(name: str) -> _Replaced:
    if name not in _BY_NAME:
        raise ValueError(f"{name!r} is no patch of Keras: add it to PATCHES, with its reason, beside {list(_BY_NAME)}")
    with _lock:
        if name not in _replaced:
            _replaced[name] = _Replaced(_BY_NAME[name])
        return _replaced[name]
