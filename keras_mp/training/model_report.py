"""The report of a model: what of it is stable, in 8 bits, and lean, what could be, and why the rest cannot."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
from rich.console import RenderableType

from keras_mp.fp8.convert import decisions, trains_quantized
from keras_mp.fp8.layers import Float8Layer
from keras_mp.fp8.scaling import Scaling, Scalings, get_scalings
from keras_mp.fp8.selection import Decision, gains_from
from keras_mp.lean.lean_model import lean_parts
from keras_mp.qat.quantization_aware import decisions as quantization_decisions
from keras_mp.qat.quantization_aware import mode_of
from keras_mp.rebuild.quantized_banks import quantized_banks
from keras_mp.rebuild.walk import Walk, check_is_model, treatments_of
from keras_mp.reporting import remedies
from keras_mp.reporting.answer import Sentence
from keras_mp.reporting.report import Report
from keras_mp.reporting.table import ColumnTable
from keras_mp.reporting.text import listed, pattern_of, without_numbers
from keras_mp.stability.attention import ATTENTION
from keras_mp.stability.sensitive import find
from keras_mp.stability.stabilized import STABILIZED, attended_by
from keras_mp.treatment.change import Planned, check_built
from keras_mp.treatment.waiting import waiting

_COLUMNS = ("layer", "change", "part", "done", "gain", "reason")
_NAMED = 100  # characters of the names of layers in a sentence
_ENDS = 8  # of paths, where the names are longer


class Part(NamedTuple):
    """A part of a model that a change is for.

    Attributes:
        layer: the names that lead to the layer, joined with `/`.
        change: the name of the change: "stabilize", "convert" or "make_lean".
        kind: the kind of part: the layer's class for "stabilize"; inputs and outputs of its product, "768 x 3072", for
            "convert"; "attention", "gelu", "int4", "experts", "head" or "block" for "make_lean".
        done: whether the part is changed.
        possible: whether the change would do it, where it is not done.
        reason: the reason for the change or against it; empty where there is nothing to say.
        gain: the time of its products in bfloat16 over that in 8 bits, forward and backward, predicted for the target;
            None where none was given.
    """

    layer: str
    change: str
    kind: str
    done: bool
    possible: bool
    reason: str
    gain: float | None = None


@dataclass(frozen=True)
class ModelReport(Report):
    """The parts of a model that changes are for.

    They are stable, in 8 bits or lean: the result of `keras_mp.report`.

    Attributes:
        name: the name of the model.
        parts: a `Part` for each layer that a change is for, in the model's order, one change after another.
        formats: the formats that products are in, such as "FP8 and INT8"; empty where none is converted.
        scaling: the format that `convert` would use: "FP8", "INT8", "MXFP8" or "NVFP4".
        prediction: the sentence that says what the gains are predicted for; empty without a target.
        convert: the line of code that converts what can be in few bits.
        attention: pairs, on a TPU, of a layer that attends and of what computes it there: Splash, or the kit's own form
            with the reason.
        integers: the number of banks of experts that are stored as integers, by their name, such as "int4".
        waiting: the names of the calls that wait until the model is built; it has no parts before.
    """

    name: str
    parts: tuple[Part, ...]
    formats: str
    scaling: str
    prediction: str
    convert: str
    attention: tuple[tuple[str, str], ...] = ()
    integers: Mapping[str, int] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()

    def _answer(self) -> list[Sentence]:
        if self.waiting:
            calls = " and ".join(self.waiting)
            return [Sentence(self.name, f"it waits for its first batch; then {calls} will change it.")]
        verdict: list[str] = []
        said: list[Sentence] = []
        lines = {"stabilize": remedies.STABILIZE, "convert": self.convert, "make_lean": remedies.LEAN}
        formats = {"formats": self.formats or self.scaling, "scaling": self.scaling}
        for change in _CHANGES:
            parts = [part for part in self.parts if part.change == change.name]
            done = [part for part in parts if part.done]
            could = [part for part in parts if part.possible and not part.done]
            never = [part for part in parts if not (part.done or part.possible)]
            if parts:
                verdict.append(f"{len(done)} of {len(parts)} {change.verdict.format(**formats)}")
            if could:
                units = f"{len(could)} {change.unit}{'s' * (len(could) != 1)}"
                more = f" {self.prediction}" if change.name == "convert" else ""
                words = f"{units} can {change.could.format(**formats)}{_gained(could)}.{more}".rstrip()
                said.append(Sentence("Change", words, (lines[change.name],)))
            ranked = ((1, "", could), (2, change.done, done), (3, change.never.format(**formats), never))
            for rank, label, some in ranked:
                said += [Sentence(label, f"{where}{why and f': {why}'}", rank=rank) for why, where in _grouped(some)]
        by: dict[str, list[str]] = {}
        for layer, words in self.attention:
            by.setdefault(words, []).append(layer)
        said += [Sentence("Attends by", f"{words}: {listed(names, _NAMED, 'layers')}") for words, names in by.items()]
        banks = self.integers.items()
        said += [Sentence("", f"{number} banks of experts are stored as {name}.") for name, number in banks]
        return [Sentence(self.name, f"{'; '.join(verdict) or 'no layer here needs a change'}."), *said]

    def _tables(self) -> dict[str, list[RenderableType]]:
        if self.waiting:
            return {}
        return {"parts": [ColumnTable("Parts", _COLUMNS, narrow=_COLUMNS, rows=map(_cells, self.parts))]}

    def _title(self) -> str:
        return self.name


class _Change(NamedTuple):
    """The words of a change: for a part, for its verdict, for what could be done, is done, and is never done."""

    name: str
    unit: str
    verdict: str
    could: str
    done: str
    never: str


_CHANGES = (
    _Change(
        "stabilize", "layer", "layers that need float32 have it", "compute in float32", "In float32", "Not in float32"
    ),
    _Change("convert", "product", "products are in {formats}", "be in {scaling}", "In few bits", "Not in {scaling}"),
    _Change("make_lean", "part", "parts are lean", "be lean", "Lean", "Not lean"),
)


def report(
    model: keras.Model,
    *,
    scaling: Scalings | Scaling | str | None = None,
    target: str | None = None,
    batch_size: int = 8,
) -> ModelReport:
    """Reports the changes of a model, layer by layer.

    It says which layers `stabilize`, `convert` and `make_lean` have changed or would change, and why not the others.

        print(keras_mp.report(model))

    Layers that need float32 and compute in 16 bits are normalizations, softmax as a layer, as an activation and inside
    attention, regularizers of activations, losses that a layer's own code adds, the layers that compute the model's
    outputs, KerasHub's routers, and those that add up more than 16 numbers in the dtype of their inputs; operations in
    a layer's own `call()` are not seen. Products are those of Dense and EinsumDense layers. Parts that can be lean are
    attention, GELUs, products of int4 weights, KerasHub's experts, layers that make logits over a vocabulary, and
    recomputed blocks.

    Args:
        model: a built Keras model, before or after any of the three, or loaded from a file; or one that waits for its
            first batch.
        scaling: a scaling or its name, as `convert` would be given it; with "qat_int8" or "qat_int4" the layers whose
            weights lose most in Keras's `quantize()`, by their signal over the noise of quantization.
        target: a chip's name, such as "h100", for which the gain of each product is predicted from the chip's rates;
            `convert(model, target=...)` chooses by it.
        batch_size: the batch size for that prediction, where the model's inputs do not say it.

    Returns:
        A `ModelReport`: `print` it, or read its `parts`.

    Raises:
        ValueError: If the model is not built and nothing waits for it, or the target is no chip with such products;
            also, with a target, if the model does not say how many rows a layer's inputs have.

    Examples:
        >>> import keras, keras_mp
        >>> choice = keras_mp.set_global_policy("mixed_bfloat16")
        >>> layers = keras.layers.Dense(8, "gelu"), keras.layers.Dense(4, "softmax")
        >>> model = keras.Sequential([keras.Input((8,)), *layers])
        >>> [(part.change, part.layer.split("_")[0], part.done) for part in keras_mp.report(model).parts]
        [('stabilize', 'dense', False), ('convert', 'dense', False), ('convert', 'dense', False), ('make_lean', ...)]
        >>> print(keras_mp.report(model))
        sequential...: 0 of 1 layers that need float32 have it; ...
    """
    check_is_model(model)
    quantized = trains_quantized(scaling)
    scalings = get_scalings(None if quantized else scaling)
    if calls := tuple(waiting(model)):
        return ModelReport(model.name, (), "", scalings.title, "", "", waiting=calls)
    check_built(model)
    walk = Walk(model)
    products = [] if quantized else decisions(model, None, target, batch_size, scalings)
    formats = dict.fromkeys(one.layer.scaling.title for one in products if isinstance(one.layer, Float8Layer))
    parts = [
        *(_part("stabilize", row) for row in _stable(walk)),
        *map(_product, products),
        *(_part("convert", row) for row in (quantization_decisions(walk, scaling) if quantized else ())),
        *(_part("make_lean", row) for row in lean_parts(walk)),
    ]
    options = {
        "scaling": scaling
        and (repr(scaling) if isinstance(scaling, str) else _call(scaling) if quantized else scalings),
        "target": target and repr(target),
        "batch_size": batch_size if target and batch_size != 8 else None,
    }
    given = "".join(f", {name}={value}" for name, value in options.items() if value is not None)
    convert = f"model = keras_mp.convert(model{given})"
    attends = tuple(attended_by(walk).items())
    said = _prediction(target, batch_size, scalings)
    title = f"training for {mode_of(scaling).mode}" if quantized else scalings.title
    banks = [bank for layer in walk.every for bank in quantized_banks(layer).values()]
    integers = dict(Counter("int4" if bank.is_int4 else "int8" for bank in banks))
    return ModelReport(model.name, tuple(parts), " and ".join(formats), title, said, convert, attends, integers)


def _call(config: Any) -> str:
    size = f"block_size={config.block_size}" if config.mode == "int4" else ""
    return f"keras.quantizers.{type(config).__name__}({size})"


def _stable(walk: Walk) -> Iterator[Planned]:
    for row in find(walk):
        yield row._replace(path=row.path.removeprefix(f"{walk.model.name}/"))
    operations = {operation.name: operation for operation in walk.operations}
    for path, layer in (walk.layers | operations).items():
        if any(name in STABILIZED and name != ATTENTION for name in treatments_of(layer)):
            yield Planned(path, layer, {}, done=True)


def _part(change: str, row: Planned) -> Part:
    kind = row.kind or type(row.layer).__name__
    return Part(row.path, change, kind, row.done, bool(row.treatments), row.reason)


def _product(decision: Decision) -> Part:
    sizes = "" if decision.sizes is None else f"{decision.sizes[0]} x {decision.sizes[1]}"
    gain = None if decision.cost is None else decision.cost.gain
    done = isinstance(decision.layer, Float8Layer)
    return Part(decision.path, "convert", sizes, done, decision.float8 and not done, decision.reason, gain)


def _prediction(target: str | None, batch_size: int, scalings: Scalings) -> str:
    if target is None:
        return ""
    if scalings.title != "INT8":
        return f"Predicted from peak rates for {target}, batches of {batch_size}, forward and backward."
    least = gains_from(target)
    sizes = "{} rows, {} inputs and {} outputs on".format(*least) if least else "no size on"
    return f"On {target} a layer gains from {sizes}, by its compiler's estimates."


def _gained(parts: list[Part]) -> str:
    gains = [part.gain for part in parts if part.gain]
    return f", {min(gains):.2f} to {max(gains):.2f} times as fast as in bfloat16" if gains else ""


def _grouped(parts: Iterable[Part]) -> list[tuple[str, str]]:
    """What is said of layers, of several in words for each, and their names, those of repeated blocks as one."""
    layers: dict[str, dict[str, list[str]]] = {}
    for part in parts:
        said = "" if part.done else part.reason.partition(": ")[0] or part.kind
        layers.setdefault(said, {}).setdefault(without_numbers(part.layer), []).append(part.layer)
    grouped = []
    for said, groups in layers.items():
        names = [f"{pattern_of(same)} ({len(same)})" if len(same) > 1 else same[0] for same in groups.values()]
        if sum(map(len, groups.values())) > 1:
            said = re.sub("(^|; )it ", r"\1each ", re.sub("(^|; )its ", r"\1the ", said))
        grouped.append((said, _named(names)))
    return grouped


def _named(layers: list[str]) -> str:
    """All names; where they are too long, the ends of their paths, which are kinds of layers."""
    whole = listed(layers, _NAMED, "kinds")
    if all(layer in whole for layer in layers):
        return whole
    ends = list(dict.fromkeys(layer.rpartition("/")[2] for layer in layers))
    more = len(ends) - _ENDS
    return ", ".join(ends[:_ENDS]) + (f" and {more} other name{'s' * (more > 1)}" if more > 0 else "")


def _cells(part: Part) -> tuple[str, ...]:
    gain, reason = (f"{part.gain:.2f}", part.reason.partition(": ")[0]) if part.gain else ("", part.reason)
    return part.layer, part.change, part.kind, "yes" if part.done else "no", gain, reason
