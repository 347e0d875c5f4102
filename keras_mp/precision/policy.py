"""Chooses the dtype policy for this hardware, and sets it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras

from keras_mp.backend import bfloat16_options
from keras_mp.backend.common.keras_patches import restored_policy
from keras_mp.precision.hardware import Device, Support, choose_jit, current_device, support
from keras_mp.system.argument_checks import one_of
from keras_mp.system.host import unseen_accelerators

PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16", "fp8")
# Keras's policy of weights in bfloat16, with no float32 master copy.
PURE_BFLOAT16 = "bfloat16"

# Inputs and outputs of a product from which on bfloat16 pays on a CPU, by docs/results/product-sizes.json: a step of
# Dense layers took 0.70 to 0.93 of float32's time from there on, and 0.87 to 1.28 below.
GAINS_FROM = 256

COMPUTES_IN = {
    "float32": "float32",
    "mixed_float16": "float16",
    "mixed_bfloat16": "bfloat16",
    "fp8": "fp8",
    PURE_BFLOAT16: "bfloat16",
}
"""What the products of each policy are in."""

CHOICES = ("mixed_bfloat16", "mixed_float16", "float32")
"""Of which the first that pays is chosen."""

_asked_about: ContextVar[str] = ContextVar("policy that is asked about, which auto then is", default="")


@dataclasses.dataclass(frozen=True)
class PolicyChoice:
    """A dtype policy, the jit that it needs, and why.

    The end of a `with` block puts back the policy before it.

    Attributes:
        policy: The name of the policy: "float32", "mixed_float16", "mixed_bfloat16", "fp8" or "bfloat16".
        jit_compile: The value to pass to `model.compile(jit_compile=...)`.
        reason: The reasons for this policy, and for jit or against it, in full sentences.
    """

    policy: str
    jit_compile: bool
    reason: str
    _before: Any = dataclasses.field(default=None, repr=False, compare=False)

    def __enter__(self) -> PolicyChoice:
        return self

    def __exit__(self, *exception: object) -> None:
        keras.mixed_precision.set_global_policy(self._before)


def choose_policy(device: Device | None = None) -> PolicyChoice:
    """Chooses as `set_global_policy("auto")`, also for another device."""
    if device is None and (policy := _asked_about.get()):
        jit = choose_jit(policy, current_device())
        return PolicyChoice(policy, jit.ok, f"The step is to be compiled in {policy}. {jit.reason}")
    unseen = unseen_accelerators(keras.backend.backend(), current_device().kind) if device is None else []
    device = device or current_device()
    for policy in CHOICES:
        served = pays(policy, device)
        if served.ok:
            break
    reason = served.reason
    if policy == "float32":
        reason = f"{pays('mixed_bfloat16', device).reason} So the choice is float32."
    jit = choose_jit(device=device)
    return PolicyChoice(policy, jit.ok, " ".join([reason, jit.reason, *unseen]))


def set_global_policy(name: str = "auto") -> PolicyChoice:
    """Sets Keras's global dtype policy.

    In a `with` block it is set for the block.

        keras_mp.set_global_policy("auto")  # from here on
        with keras_mp.set_global_policy("mixed_bfloat16") as choice:  # for the layers that are made in the block
            model = build()

    "fp8" sets Keras's policy "mixed_bfloat16", in which all runs but the layers that `keras_mp.convert` selects:
    call it on the model that you build under the policy.

    "bfloat16" keeps the weights in bfloat16, too, with no float32 master copy: half their memory. Train such a model
    with an optimizer that `wrap_optimizer` or `prepare` has wrapped, which rounds each update stochastically. Keras's
    own rounds to nearest, and loses every update below 1/512 to 1/256 of its weight. Even so the weights are noisier
    than float32's, and some runs converge badly: "mixed_bfloat16" remains the default.

    Args:
        name: The name of the policy: "auto", "float32", "mixed_float16", "mixed_bfloat16", "fp8" or "bfloat16". "auto"
            sets bfloat16 if the hardware supports it, else float16, else float32; on a CPU with bfloat16 instructions
            mixed_bfloat16, without jit on TensorFlow, and on JAX from jax 0.12 on.

    Returns:
        The `PolicyChoice` that was set: the policy, whether to jit, and the reasons for both.

    Raises:
        ValueError: If the name is none of the six.

    Warns:
        UserWarning: If this hardware does not support the policy, the message says which one to use; if the machine has
            the driver of a GPU that the backend does not see, what to install; on a TPU, that the attention of plain
            Keras is another there, and what to call.

    Examples:
        >>> import keras, keras_mp
        >>> choice = keras_mp.set_global_policy("mixed_bfloat16")
        >>> keras.layers.Dense(4).compute_dtype
        'bfloat16'
        >>> with keras_mp.set_global_policy("float32"):
        ...     keras.layers.Dense(4).compute_dtype
        'float32'
        >>> keras.mixed_precision.dtype_policy().name
        'mixed_bfloat16'
    """
    _check(name)
    device = current_device()
    for sentence in unseen_accelerators(keras.backend.backend(), device.kind):
        warnings.warn(sentence, UserWarning, stacklevel=2)
    if spoiled := attention_fault(device):
        warnings.warn(spoiled, UserWarning, stacklevel=2)
    choice = choose_policy()
    if name != "auto":
        served = pays(name, device)
        if not served.ok and not _asked_about.get():
            warnings.warn(f"{name}: {served.reason} Use {choice.policy!r} here.", UserWarning, stacklevel=2)
        jit = choose_jit(name, device)
        choice = PolicyChoice(name, jit.ok, f"{served.reason} {jit.reason}")
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_global_policy("mixed_bfloat16" if choice.policy == "fp8" else choice.policy)
    return dataclasses.replace(choice, _before=before)


@contextmanager
def asked_about(policy: str) -> Iterator[None]:
    """Sets the policy in which a function builds its model."""
    token = _asked_about.set(policy)
    try:
        with restored_policy(policy):
            yield
    finally:
        _asked_about.reset(token)


def attention_fault(device: Device) -> str:
    """Says how plain Keras attends wrongly on a TPU."""
    if device.kind != "tpu" or keras.backend.backend() != "jax":
        return ""
    return (
        "On a TPU the attention of plain Keras, 3.13 to 3.15, is causal where no mask is given, and its scores are not "
        "divided by the square root of the features, in any precision. Call keras_mp.prepare(model, ...) or "
        "keras_mp.stabilize(model), which corrects both."
    )


# What other frameworks call them; the nearest in spelling, 'bfloat16', trains with weights in bfloat16.
_ELSEWHERE = {
    **dict.fromkeys(("fp16", "half", "amp", "16-mixed", "fp16-mixed"), "mixed_float16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "mixed_bfloat16"),
    **dict.fromkeys(("fp32", "32", "32-true"), "float32"),
}


def _check(name: str) -> None:
    policies = ("auto", *PRECISIONS, PURE_BFLOAT16)
    if name == "float16":
        raise ValueError(
            "name='float16' would keep the weights in float16 too, whose smallest step is 6e-8: small updates would be "
            f"lost or mostly noise. Use 'mixed_float16', or 'bfloat16'. Known: {', '.join(policies)}."
        )
    if isinstance(name, str) and name.lower() in _ELSEWHERE:
        right = _ELSEWHERE[name.lower()]
        raise ValueError(f"name={name!r} is no policy. Did you mean {right!r}? Known: {', '.join(policies)}.")
    one_of("name", name, policies)


def pays(policy: str, device: Device | None = None) -> Support:
    """Tells whether training under a policy pays, as measured.

    Args:
        policy: "float32", "mixed_float16", "mixed_bfloat16", "fp8" or "bfloat16".
        device: The device; by default the one that Keras computes on.
    """
    device = device or current_device()
    served = support(COMPUTES_IN[policy], device)
    if device.kind != "cpu" or COMPUTES_IN[policy] != "bfloat16" or not served.ok:
        return served
    if keras.backend.backend() == "jax":
        if not bfloat16_options():
            needed = "jax 0.12 and Python 3.12 are the first to multiply it fast"
            reason = f"{served.reason} But here bfloat16 measured no faster than float32 with JAX: {needed}."
            return Support(False, reason)
        # docs/which-precision.md, and Dense layers of width 64 to 512: 1.0 to 1.2 times.
        measured = "In a model that prepare made, steps measured 1.4 to 1.9 times as fast as float32's."
        return Support(True, f"{served.reason} {measured}")
    # Also docs/results/peers-*.json, "Keras, TensorFlow, no jit, float32" beside keras_mp: 1.2 to 1.4 times.
    measured = (
        f"As measured, models with Dense layers of {GAINS_FROM} units or more train 1.1 to 1.4 times as fast as in "
        "float32, without jit; smaller ones gain nothing."
    )
    return Support(True, f"{served.reason} {measured}")
