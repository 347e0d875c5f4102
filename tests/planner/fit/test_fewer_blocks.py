"""A deep model asked about by the same model with few of its blocks, against the step compiled in full."""

import dataclasses
from fractions import Fraction
from types import SimpleNamespace

import keras
import pytest
from keras import layers

import keras_mp
from keras_mp.backend.common.device import TracedChip
from keras_mp.lean.lean_model import lean_parts
from keras_mp.lowering import Source, blocks_of, default_blocks, with_blocks
from keras_mp.planner.chips.place import find_place
from keras_mp.planner.fit import step as step_module
from keras_mp.planner.fit.figures import extrapolated, is_on_line, on_line
from keras_mp.planner.fit.measures import Measures
from keras_mp.planner.fit.step import Question
from keras_mp.planner.time.estimate import Roofline
from keras_mp.planner.time.step_time import StepTime
from keras_mp.rebuild.optimizers import unwrapped
from keras_mp.rebuild.walk import Walk
from models.gpt import gpt
from models.transformer import Size
from tests.planner.fit.made_reports import report

FEW, MANY, DEPTH = 1, 2, 4
TIMES = Fraction(DEPTH - FEW, MANY - FEW)
TOKENS = (keras.KerasTensor((4, 32), "int32"),) * 2


@pytest.fixture
def deep(monkeypatch):
    """Models of three blocks are not deep, those of four are, and are asked about by models with one and two."""
    monkeypatch.setattr(step_module, "DEEP", DEPTH - 1)
    monkeypatch.setattr(step_module, "BLOCKS", (FEW, MANY))
    # Which models have a line is seen by their layers, without the program of a step.
    monkeypatch.setattr(Source, "lower", lambda *_, **__: SimpleNamespace(arguments=()))


def build(blocks=DEPTH):
    model = gpt(Size(blocks, 64, 2), 256, 32)
    model.compile(keras.optimizers.AdamW(1e-3), keras_mp.lean.ChunkedCrossEntropy())
    return model


def two_widths(blocks=DEPTH):
    """Every third block is wider."""
    x = inputs = keras.Input((64,))
    for index in range(blocks):
        y = layers.Dense(256 if index % 3 else 128, "gelu", name=f"up{index}")(x)
        x = x + layers.Dense(64, name=f"down{index}")(y)
    model = keras.Model(inputs, x)
    model.compile("adam", "mse")
    return model


def causal(blocks=DEPTH):
    hub = pytest.importorskip("keras_hub").models
    sizes = {"num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32, "max_sequence_length": 12}
    backbone = hub.GPT2Backbone(vocabulary_size=50, num_layers=blocks, **sizes)
    model = hub.GPT2CausalLM(backbone, preprocessor=None)
    model.compile(keras.optimizers.Lion(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_a_number_is_on_its_line_and_does_not_fall():
    times = Fraction(12 - 4, 8 - 4)
    assert on_line(10, 14, times) == 18 and on_line(10, 8, times) == 10
    assert on_line(7, 9, Fraction(34 - 4, 8 - 4)) == 22 and isinstance(on_line(7.0, 9.0, times), float)
    assert on_line({"a": 1}, {"a": 2, "b": 1}, times) == {"a": 3, "b": 2}
    assert on_line(None, {"a": 2}, times) is None and on_line("few", "many", times) == "many"


def test_figures_are_on_their_lines():
    times = {"compute": 4.0, "memory": 3.0, "cycles": 0}
    few = report(10, 20, temporary=9, peak=39, time=StepTime(1.0, 0.0, 0.0, 1), seconds=2.0)
    many = report(14, 28, temporary=8, peak=50, time=StepTime(1.5, 0.0, 0.0, 1), seconds=3.0, notes=("many",))
    few = dataclasses.replace(few, roofline=Roofline(4.0, **times))
    many = dataclasses.replace(many, roofline=Roofline(8.0, **times | {"compute": 8.0}))
    whole = extrapolated(few, many, (4, 8), 34)
    memory = whole.memory
    assert (memory.parameters, memory.optimizer, memory.temporary, memory.peak) == (40, 80, 9, 40 + 80 + 9)
    assert whole.roofline == Roofline(34.0, 34.0, 3.0, 0)
    assert (whole.time.seconds, whole.seconds) == (4.75, 5.0)
    assert whole.notes == ("many",) and whole.extrapolated == "4 and 8 of 34 blocks"
    assert "memory and times from 4 and 8 of 34 blocks" in " ".join(str(whole).split())


def test_what_the_compiler_refuses_with_more_blocks_does_not_fit_with_all():
    few = report(10, 20, temporary=9, peak=39, capacity=64)
    many = report(14, 28, temporary=20, peak=63, capacity=62, refused="62 are there", time=None, roofline=None)
    whole = extrapolated(few, many, (4, 8), 12)
    assert whole.refused and not whole.memory.fits and whole.roofline is None


def test_a_function_says_how_many_blocks_it_builds():
    assert default_blocks(build) == DEPTH and default_blocks(lambda: None) == 0
    with pytest.raises(TypeError, match="number of blocks as its default"):
        Source(lambda blocks: None)


def test_a_model_of_keras_hub_is_built_with_fewer_blocks_by_its_config():
    model = causal()
    few = with_blocks(model, 3)
    assert blocks_of(model) == DEPTH and blocks_of(build()) == 0
    like = causal(3)
    assert [tuple(w.shape) for w in few.weights] == [tuple(w.shape) for w in like.weights]
    assert type(few) is type(model) and few.compiled and few.loss is model.loss
    assert few.optimizer.get_config() == model.optimizer.get_config() and few.optimizer is not model.optimizer


def changed(change):
    model = causal()
    change(model)
    return model


@pytest.mark.parametrize(
    "whole, alike",
    [
        (causal, True),
        (lambda: causal(DEPTH - 1), False),
        (lambda: changed(lambda model: model.backbone.enable_lora(2)), False),
        (lambda: changed(lambda model: setattr(model.backbone.token_embedding, "trainable", False)), False),
        (lambda: keras_mp.lean.make_lean(causal(), remat=True), False),
        (lambda: keras_mp.export.in_precision(causal(), "mixed_bfloat16"), False),
    ],
    ids=["as its config says", "of another depth", "LoRA", "frozen", "treated", "another precision"],
)
def test_what_is_not_in_the_config_is_seen(whole, alike):
    few, many, all_blocks = (Source(model).outline().kinds for model in (causal(FEW), causal(MANY), whole()))
    assert is_on_line(few, many, all_blocks, TIMES) is alike


@pytest.mark.jax
@pytest.mark.parametrize(
    "given, depth",
    [(build, DEPTH), (lambda: causal(), DEPTH), (two_widths, 0), (lambda blocks=DEPTH: build(), 0)],
    ids=["function", "KerasHub", "blocks of two widths", "a function that does not listen"],
)
def test_the_step_knows_which_models_have_a_line(deep, given, depth):
    batch = TOKENS
    if given is two_widths:
        batch = (keras.KerasTensor((4, 64)),) * 2
    elif "causal" in (given.__name__, *given.__code__.co_names):
        tokens = keras.KerasTensor((4, 12), "int32")
        batch = {"token_ids": tokens, "padding_mask": tokens}, tokens
    assert step_module.Step(Source(given), batch, TracedChip("gpu")).depth == depth


def test_fewer_blocks_come_under_the_same_measures():
    few = Source(causal).build("mixed_bfloat16", Measures("", ("lean", "remat"), micro_batches=2).changes, MANY)
    assert (
        unwrapped(few.optimizer).gradient_accumulation_steps == 2 and few.backbone.dtype_policy.name == "mixed_bfloat16"
    )
    assert len([row for row in lean_parts(Walk(few)) if row.kind == "block"]) == MANY


@pytest.mark.slow
@pytest.mark.jax
def test_the_figures_of_a_deep_model_are_near_to_those_of_all_its_blocks(monkeypatch):
    """State and operations to the last; the compiler's temporary memory within 5%."""
    monkeypatch.setattr(step_module, "DEEP", 9)

    def build_ten(blocks=10):
        return build(blocks)

    row = keras_mp.advise(build_ten, TOKENS, ["h100"], verbose=False)["h100"]
    assert row.fits and row.report.extrapolated == "4 and 8 of 10 blocks"
    place = find_place("h100")
    step = step_module.Step(Source(build_ten), TOKENS, place.traced)
    question = Question(place, row.measures, whole=True)
    whole, kept, peak = step.compile(question, step.lower(question))
    assert step.compile(question, step.lower(question)) == (whole, True, peak) and not kept
    assert whole.extrapolated == "" and peak == whole.memory.peak
    memory = row.memory
    for name in ("parameters", "optimizer", "other"):
        assert getattr(memory, name) == getattr(whole.memory, name)
    assert row.report.roofline.compute == pytest.approx(whole.roofline.compute)
    assert row.time == pytest.approx(whole.time.seconds, rel=0.05)
    assert memory.temporary == pytest.approx(whole.memory.temporary, rel=0.05)
    assert memory.peak == pytest.approx(whole.memory.peak, rel=0.05)
    with keras_mp.set_global_policy(row.measures.precision):
        assert whole.memory.peak == keras_mp.inspect(build_ten, TOKENS, "h100").memory.peak
