"""How operands of products are brought into few bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras

from keras_mp.precision.formats import E2M1, E4M3, E5M2, INT8, SCALED_FORMATS, Format, format_named
from keras_mp.system.argument_checks import did_you_mean, one_of, whole_number

ROLES = ("input", "kernel", "gradient")
PRODUCTS = {
    "forward": ("input", "kernel"),
    "input_gradient": ("gradient", "kernel"),
    "kernel_gradient": ("input", "gradient"),
}
"""The three products of a layer, and the roles of the two operands of each."""

CHOICES = {
    "granularity": ("tensor", "row", "block", "tile"),
    "scale": ("float32", "power_of_two", "E8M0", "E8M0_floor", "E4M3"),
    "source": ("current", "delayed", "static"),
    "rounding": ("nearest", "stochastic"),
    "transform": ("none", "hadamard"),
}
BLOCK_SIZES = {"E8M0": 32, "E8M0_floor": 32, "E4M3": 16}
"""How many numbers share a scale of blocks, by the format of the scale."""


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Scaling and rounding of one operand of a product.

        amax  = max |x|                                     of the tensor, or along the axes that a product sums over
        scale = min(max of the format / (2^margin . amax), 2^126)       1 where amax is 0, infinite or NaN
        scale = 2^floor(log2 scale)                         with the scale "power_of_two"
        codes = cast(x . scale)                             x = codes / scale; what exceeds the format saturates

    Where x is not finite the result stays so: FP8 has a NaN; of INT8 the scale is NaN, of the tensor or the row; and of
    blocks the block's scale.

    The source of the amax:

        "current"   the tensor itself
        "delayed"   the largest of the `history` updates before, over their calls, micro-batches and replicas; the
                    tensor itself where that is 0, as in the first step. The tensor is read once, not twice
        "static"    the largest so far in the first `history` updates, this step's included; then fixed

    A step of which nothing is applied leaves what is known as it is; it is saved with the layer. A layer that is not
    trainable keeps nothing, and scales by the tensor itself. Where a loss is scaled, gradients are those of the scaled
    loss: when it doubles, delayed scales saturate until the next step, unless the margin is 1 or more, and static ones
    from then on.

    Blocks are 32 numbers along the axes that a product sums over, of which batch and positions count as one, and their
    scale is a power of two of 8 bits ("E8M0"):

        scale = 2^ceil(log2(amax / max of the format))      "E8M0": no number saturates
              = 2^(floor(log2 amax) - floor(log2 max))      "E8M0_floor": the largest of a block may saturate
        codes = cast(x / scale)                             scale is at least 2^-127

    or 16 numbers of E2M1, whose scale is one of E4M3, below a float32 one of the tensor:

        s     = min(6 . 448 / amax of the tensor, 2^110)    1 where that is 0, infinite or NaN
        scale = max(cast(amax . (s . 1/6), E4M3), 2^-9)     of a block, or of a tile of 16 x 16
        codes = cast(x . (s / scale))                       x = codes . scale / s

    With the transform "hadamard" each 16 numbers along the summed axes are multiplied by an orthogonal matrix first:
    random signs, then the Hadamard matrix of 16 over 4. A product of two operands so transformed is that of the two as
    they were, and outliers are spread.

    Stochastic rounding goes to one of the two neighbours, so that the mean is x. Its words are a hash of seed, layer,
    update and place: a run that goes on after a restart rounds as one that was not stopped, and shards as the whole.
    The layer counts by its path, which Keras numbers where a model is built twice without names.

    Formulas: Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv:2209.05433), section 3; delayed scales
    as in Transformer Engine and flax's fp8_ops; OCP Microscaling Formats (MX) Specification v1.0, sections 5.2 and 6.3
    ("E8M0_floor"); Mishra et al., "Recipes for Pre-training LLMs with MXFP8", 2025 (arXiv:2506.08027), section 3.1
    ("E8M0"); NVIDIA, "Pretraining Large Language Models with NVFP4", 2025 (arXiv:2509.25149), sections 2 and 4 and
    appendix C, where a scale that rounds to 0 is the smallest number of E4M3 here.

    Args:
        format: the format of the codes: "E4M3", "E5M2", "INT8" or "E2M1", or a `Format`.
        granularity: the numbers that share a scale: "tensor"; "row", a scale for each row of the inputs and column of
            the kernel, and so for each product a copy of its own; "block"; or "tile", for the kernel in E2M1: both
            directions read the same codes.
        scale: the kind of scale: "float32" or "power_of_two" of a tensor or a row; "E8M0", "E8M0_floor" or "E4M3" of
            blocks.
        source: the source of the amax: "current", "delayed" or "static".
        history: the number of updates whose amaxes are kept, of "delayed" and "static"; 16 by default.
        margin: the number of powers of two that the amax stays below the top of the format: of a tensor or a row.
        rounding: the direction of rounding: "nearest", ties to even, or "stochastic".
        transform: the transform before rounding: "none" or "hadamard", of blocks of 16.
        seed: the seed of the words of stochastic rounding, and of the transform's signs.

    Raises:
        ValueError: If an argument is none of these, or if there is no such product: the message says which there is.
    """

    format: Format = E4M3
    granularity: str = "tensor"
    scale: str = "float32"
    source: str = "current"
    history: int | None = None
    margin: int = 0
    rounding: str = "nearest"
    transform: str = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", format_named(self.format, SCALED_FORMATS))
        for name, known in CHOICES.items():
            one_of(name, getattr(self, name), known)
        for name in ("margin", "seed"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 0))
        if self.source == "current" and self.history:
            raise ValueError(f"history={self.history!r} with source='current', which keeps none: leave it out")
        history = 16 if self.history is None else self.history
        kept = 0 if self.source == "current" else whole_number("history", history)
        object.__setattr__(self, "history", kept)
        wrong = self._problem()
        if wrong:
            raise ValueError(wrong)

    def _problem(self) -> str:
        """Says why there is no such scaling, or ""."""
        if self.in_blocks != (self.scale in BLOCK_SIZES):
            scales = "'E8M0', 'E8M0_floor' or 'E4M3'" if self.in_blocks else "'float32' or 'power_of_two'"
            return f"granularity={self.granularity!r} has the scale {scales}, not {self.scale!r}"
        if (self.scale == "E4M3") != (self.format == E2M1) or (self.in_blocks and self.format == INT8):
            return (
                f"format={self.format.name!r} with scale={self.scale!r}: blocks of E4M3 and E5M2 have the scale 'E8M0' "
                "or 'E8M0_floor', those of E2M1 the scale 'E4M3', and INT8 has none"
            )
        if self.granularity == "tile" and self.scale != "E4M3":
            return f"granularity='tile' is for E2M1, with scale='E4M3', not {self.scale!r}: use 'block'"
        if self.granularity != "tensor" and self.source != "current":
            return f"granularity={self.granularity!r} has the source 'current': others are for 'tensor'"
        if self.in_blocks and self.margin:
            return f"margin={self.margin} is for the granularities 'tensor' and 'row': blocks scale to the top"
        if self.transform != "none" and (self.granularity, self.scale) != ("block", "E4M3"):
            return f"transform={self.transform!r} is for blocks of 16: granularity='block', scale='E4M3'"
        if self.granularity == "tile" and self.rounding == "stochastic":
            return "rounding='stochastic' is not for granularity='tile', a kernel's: it is for gradients"
        return ""

    @property
    def in_blocks(self) -> bool:
        """Whether blocks share a scale."""
        return self.granularity in ("block", "tile")

    @property
    def kept(self) -> int:
        """How many amaxes of its role a layer keeps."""
        # A static amax stands in the second place: the first is added up where calls meet in one slot.
        return 2 if self.source == "static" else int(self.history or 0)

    @property
    def counts(self) -> bool:
        """Whether it needs the number of updates so far."""
        return self.source == "static" or self.rounding == "stochastic"

    @property
    def title(self) -> str:
        """The format for messages: "FP8", "INT8", "MXFP8" or "NVFP4"."""
        if self.in_blocks:
            return "NVFP4" if self.format == E2M1 else "MXFP8"
        return "INT8" if self.format == INT8 else "FP8"

    def __repr__(self) -> str:
        """The call that makes an equal one, without defaults."""
        plain = Scaling(source=self.source)
        different = {
            name: value
            for name, value in vars(self).items()
            if name in ("format", "source") or value != getattr(plain, name)
        }
        written = [f"{name}={_written(value)}" for name, value in different.items() if value != "current"]
        return f"Scaling({', '.join(written)})"

    def get_config(self) -> dict[str, Any]:
        """Arguments that make an equal one, as they are saved."""
        return vars(self) | {"format": self.format.name}


Pair = tuple[Scaling, Scaling] | None


@keras.saving.register_keras_serializable("keras_mp")
@dataclasses.dataclass(frozen=True, repr=False)
class Scalings:
    """Scalings of a layer's products.

    They are those of the two operands of each, or None, where it runs in 16 bits.

    It is a value: two that are equal do the same, and it is saved with the layer. The kit's own have names:

        current         FP8, E4M3 and for gradients E5M2, whose range is wider; a scale a tensor, from the tensor
        delayed         the same, from the amaxes of 16 updates before
        static          the same, calibrated in the first 16 updates, with 4 powers of two above
        rowwise         E4M3, a scale a row (torchao's recipe of that name)
        mxfp8           E4M3 in blocks of 32 (arXiv:2506.08027: gradients need no E5M2 then)
        int8            INT8, delayed; gradients are rounded stochastically, and the kernel's gradient is in 16 bits, as
                        in Google's Qwix and torchao
        int8_current    INT8, a scale a row
        nvfp4           E2M1 in blocks of 16, the kernel in tiles; gradients are rounded stochastically, and both
                        operands of the kernel's gradient transformed (arXiv:2509.25149)

    `named` changes them: `Scalings.named("delayed", history=1024)`, `Scalings.named("int8", kernel_gradient=True)`,
    `Scalings.named("nvfp4", forward=False)`. Another is written out:

        narrow, wide = Scaling("E4M3"), Scaling("E5M2", margin=1)
        Scalings(forward=(narrow, narrow), input_gradient=(wide, narrow), kernel_gradient=None)

    Args:
        forward: the scalings of inputs and kernel in the forward product; None leaves it in 16 bits.
        input_gradient: the scalings of the result's gradient and of the kernel, in the product that makes the inputs'
            gradient.
        kernel_gradient: the scalings of inputs and of the result's gradient, in the product that makes the kernel's
            gradient.

    Raises:
        TypeError: If the value of a product is neither None nor two `Scaling`.
        ValueError: If the operands of a product do not go together, or if no product has any.

    Examples:
        >>> import keras_mp
        >>> keras_mp.fp8.Scalings.named("delayed", history=1024)
        Scalings.named('delayed', history=1024)
        >>> keras_mp.fp8.Scalings.names()
        ('current', 'delayed', ...)
    """

    forward: Pair = None
    input_gradient: Pair = None
    kernel_gradient: Pair = None
    _call: str = dataclasses.field(default="", init=False, compare=False)

    def __post_init__(self) -> None:
        for product, roles in PRODUCTS.items():
            pair = getattr(self, product)
            if pair is None:
                continue
            if len(pair) != 2 or not all(isinstance(scaling, Scaling) for scaling in pair):
                raise TypeError(f"{product}={pair!r} must be two Scaling, of {' and '.join(roles)}, or None")
            object.__setattr__(self, product, tuple(pair))
            wrong = _mismatch(roles, *pair)
            if wrong:
                raise ValueError(f"{product}: {wrong}")
        if not self.all:
            raise ValueError("no product has scalings: leave the layer as it is, or give one of the three")
        for role in ROLES:
            keeping = {(s.source, s.history) for s in self.of(role) if s.kept}
            if len(keeping) > 1:
                raise ValueError(
                    f"{role} keeps amaxes for {' and '.join(f'{source} scales of {n}' for source, n in keeping)}: a "
                    "role has one history, so give its two products the same source and history"
                )

    @classmethod
    def of_roles(cls, input: Scaling, kernel: Scaling, gradient: Scaling) -> Scalings:
        """Scalings of three products, by the operands' roles alone."""
        by_role = dict(zip(ROLES, (input, kernel, gradient), strict=True))
        return cls(*[(by_role[left], by_role[right]) for left, right in PRODUCTS.values()])

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names of the kit's scalings, which `named` takes."""
        return tuple(PRESETS)

    @classmethod
    def named(cls, name: str, **settings: Any) -> Scalings:
        """The kit's scalings of a name, changed.

        Args:
            name: the name of one of the kit's scalings, such as "delayed".
            **settings: arguments of `Scaling`, for all operands; `format` may be a dict from role to format. Of
                `forward`, `input_gradient` and `kernel_gradient`, False leaves the product in 16 bits, True does not.

        Returns:
            The scalings.

        Raises:
            ValueError: If there is no such name or setting, and where `Scaling` raises it.
        """
        if name not in PRESETS:
            raise _unknown(name)
        known = {field.name for field in dataclasses.fields(Scaling)} | PRODUCTS.keys()
        unknown = [setting for setting in settings if setting not in known]
        if unknown:
            raise ValueError(f"{unknown[0]}={settings[unknown[0]]!r} is no setting: use {_listed(sorted(known))}")
        written = [f"{setting}={_written(value)}" for setting, value in settings.items()]
        full, narrow = PRESETS[name]
        chosen = {product: settings.pop(product, product not in narrow) for product in PRODUCTS}
        formats = settings.pop("format", {})
        if isinstance(formats, Mapping):
            wrong = [role for role in formats if role not in ROLES]
            if wrong:
                raise ValueError(f"format has the role {wrong[0]!r}, which is not one of {_listed(ROLES)}")
        else:
            formats = dict.fromkeys(ROLES, formats)

        def changed(role: str, scaling: Scaling) -> Scaling:
            own = settings | ({"format": formats[role]} if role in formats else {})
            if "source" in own and "history" not in own:
                own["history"] = None
            return dataclasses.replace(scaling, **own)

        pairs = [
            (changed(left, scalings[0]), changed(right, scalings[1])) if chosen[product] else None
            for product, (left, right) in PRODUCTS.items()
            for scalings in [getattr(full, product)]
        ]
        made = cls(*pairs)
        object.__setattr__(made, "_call", f"Scalings.named({', '.join([repr(name), *written])})")
        return made

    @property
    def all(self) -> list[Scaling]:
        """The scalings of all operands."""
        return [scaling for product in PRODUCTS for scaling in getattr(self, product) or ()]

    def of(self, role: str) -> list[Scaling]:
        """Scalings of a role, in the order of products."""
        pairs = [(roles, getattr(self, product)) for product, roles in PRODUCTS.items()]
        return [pair[roles.index(role)] for roles, pair in pairs if pair and role in roles]

    @property
    def kept(self) -> int:
        """How many amaxes of each role a layer keeps."""
        return max(scaling.kept for scaling in self.all)

    @property
    def counts(self) -> bool:
        """Whether a layer counts its updates."""
        return any(scaling.counts for scaling in self.all)

    @property
    def columns(self) -> int:
        """Columns that a layer keeps: amaxes, and updates if counted."""
        return self.kept + self.counts

    @property
    def is_static(self) -> bool:
        """Whether scales stay as they are after the first updates."""
        return any(scaling.source == "static" for scaling in self.all)

    @property
    def takes_parts(self) -> bool:
        """Whether parts of a kernel scale as the whole."""
        return not any(s.in_blocks or s.rounding != "nearest" for s in self.of("kernel"))

    @property
    def title(self) -> str:
        """The name of the format, for messages."""
        return self.all[0].title

    def __repr__(self) -> str:
        """The shortest call that makes an equal one."""
        named = [f"Scalings.named({name!r})" for name in PRESETS if Scalings.named(name) == self]
        written = ", ".join(f"{product}={getattr(self, product)}" for product in PRODUCTS)
        return self._call or (named[0] if named else f"Scalings({written})")

    def get_config(self) -> dict[str, Any]:
        """Arguments that make an equal one, as they are saved."""
        pairs = {product: getattr(self, product) for product in PRODUCTS}
        return {product: pair and [scaling.get_config() for scaling in pair] for product, pair in pairs.items()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Scalings:
        """The scalings of a config."""
        return cls(**{name: pair and tuple(Scaling(**scaling) for scaling in pair) for name, pair in config.items()})


def _mismatch(roles: tuple[str, str], left: Scaling, right: Scaling) -> str:
    """Says why two operands are not multiplied."""
    if left.format == right.format == E5M2:
        return (
            f"format gives E5M2 to {roles[0]} and {roles[1]}, and no GPU multiplies E5M2 with E5M2 (NVIDIA, cuBLAS "
            "documentation, cublasLtMatmul, supported FP8 types): give it to one role at most, as the gradient"
        )
    if left.title != right.title:
        return f"{roles[0]} is in {left.title} and {roles[1]} in {right.title}: there is no such product"
    if not left.in_blocks and left.granularity != right.granularity:
        return f"{roles[0]} has a scale a {left.granularity} and {roles[1]} a {right.granularity}: give both the same"
    for role, scaling in zip(roles, (left, right), strict=True):
        if scaling.granularity == "tile" and role != "kernel":
            return f"{role} has granularity='tile', which is for the kernel: use 'block'"
    if (left.transform, left.seed) != (right.transform, right.seed) and "hadamard" in (left.transform, right.transform):
        return "the transform of one operand alone is another product: give both the same transform and seed"
    return ""


def problem(equation: str) -> str:
    """Says why an equation is no matrix product, or "".

    It is one where each label stands in exactly two of the three terms.
    """
    operands, arrow, result = equation.replace(" ", "").replace("...", "").partition("->")
    terms = [*operands.split(","), result]
    if not arrow or len(terms) != 3:
        return f"the equation {equation!r} is not of the form 'input,kernel->result'"
    if "..." in equation.partition(",")[2].partition("->")[0]:
        return f"the equation {equation!r} has an ellipsis in the kernel"
    for label in sorted(set("".join(terms))):
        count = [term.count(label) for term in terms]
        if max(count) > 1:
            return f"the equation {equation!r} has the label {label!r} twice in one term"
        if sum(count) != 2:
            return f"the equation {equation!r} has the label {label!r} in {sum(count)} of its 3 terms; 2 make a product"
    return ""


def _listed(names: Any) -> str:
    *first, last = map(repr, names)
    return f"{', '.join(first)} or {last}"


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_written(item)}' for key, item in value.items())}}}"
    return repr(value.name if isinstance(value, Format) else value)


def _by_role(format: Format, gradient: Format | None = None, rounding: str = "nearest", **settings: Any) -> Scalings:
    own = Scaling(format, **settings)
    return Scalings.of_roles(own, own, Scaling(gradient or format, rounding=rounding, **settings))


def _nvfp4() -> Scalings:
    plain = Scaling(E2M1, "block", "E4M3")
    mixed = dataclasses.replace(plain, transform="hadamard")
    gradient, mixed_gradient = (dataclasses.replace(s, rounding="stochastic") for s in (plain, mixed))
    kernel = Scaling(E2M1, "tile", "E4M3")
    return Scalings((plain, kernel), (gradient, kernel), (mixed, mixed_gradient))


PRESETS: dict[str, tuple[Scalings, tuple[str, ...]]] = {
    "current": (_by_role(E4M3, E5M2), ()),
    "delayed": (_by_role(E4M3, E5M2, source="delayed"), ()),
    "static": (_by_role(E4M3, E5M2, source="static", margin=4), ()),
    "rowwise": (_by_role(E4M3, granularity="row"), ()),
    "mxfp8": (_by_role(E4M3, granularity="block", scale="E8M0"), ()),
    "int8": (_by_role(INT8, rounding="stochastic", source="delayed"), ("kernel_gradient",)),
    "int8_current": (_by_role(INT8, rounding="stochastic", granularity="row"), ("kernel_gradient",)),
    "nvfp4": (_nvfp4(), ()),
}
"""The kit's scalings by name, of all three products, and the products that are in 16 bits all the same."""


def get_scalings(scaling: Any = None) -> Scalings:
    """Finds scalings, by what `convert` takes or their config.

    Raises:
        ValueError: it is none of these.
    """
    if scaling is None:
        return Scalings.named("current")
    if isinstance(scaling, dict):
        scaling = keras.saving.deserialize_keras_object(scaling)
    if isinstance(scaling, Scaling):
        return Scalings.of_roles(scaling, scaling, scaling)
    if isinstance(scaling, Scalings):
        return scaling
    if isinstance(scaling, str):
        return Scalings.named(scaling)
    raise _unknown(scaling)


def _unknown(scaling: Any) -> ValueError:
    near = did_you_mean(scaling, PRESETS)
    return ValueError(f"scaling={scaling!r} is unknown: use {_listed(PRESETS)}, or a Scalings of your own.{near}")
