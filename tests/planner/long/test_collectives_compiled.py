"""The collectives that compilers make of a step, against a reading of their text that has nothing of the kit's."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import keras
import pytest

import keras_mp
from keras_mp.parallel.plan import plan_of
from keras_mp.planner.chips.targets import find_target
from models.gpt import gpt
from models.transformer import Size

pytestmark = pytest.mark.slow

only_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="a step on several devices lowers on JAX only")


def read(text):
    """The collectives in a compiled text: their kinds, and their arrays' bytes as sent.

    One computation after another, a line each: an all-reduce in a computation called all-reduce-scatter is none, and
    a part of a collective that is spread over several kernels counts once, by the chain that it names.
    """
    counts, sizes, chains = Counter(), Counter(), set()
    for computation in re.split(r"\n\}\n", text):
        scatters = re.search(r"^%all-reduce-scatter[\w.]* \(", computation, re.M)
        arrays = dict(re.findall(r"^ +(?:ROOT )?(%[\w.\-]+) = \(?+(\w+\[[\d,]*\])", computation, re.M))
        for line in computation.splitlines():
            found = re.match(
                r" +(?:ROOT )?%[\w.\-]+ = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
                r"(-start)?\(([^)]*)\)",
                line,
            )
            if not found:
                continue
            made, kind, started, operands = found.groups()
            chain = re.search(r'(chain_id|async_collective_name)="[^"]*"', line)
            if chain and chain[0] in chains:
                continue
            chains.add(chain[0] if chain else line)
            taken = [arrays[name] for name in re.findall(r"%[\w.\-]+", operands)]
            results = re.findall(r"\w+\[[\d,]*\]", made)
            if started and len(results) > len(taken):
                results = results[len(taken) : 2 * len(taken)]
            sent = taken if kind == "reduce-scatter" else results
            kind = "reduce-scatter" if scatters else kind
            counts[kind] += len(sent)
            sizes[kind, _members(line)] += sum(map(_bytes, sent))
    return counts, sizes


def _members(line):
    """How many devices a collective goes over; 0 for all, which is what no groups, or one empty group, says."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return listed[1].count(",") + 1
    rows = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line)
    return int(rows[2]) if rows else 0


def _bytes(array):
    dtype, dimensions = array.removesuffix("]").split("[")
    size = {"f32": 4, "bf16": 2, "f16": 2}[dtype]
    for dimension in filter(None, dimensions.split(",")):
        size *= int(dimension)
    return size


def on_the_wire(kind, size, devices):
    """The bytes that one device of a ring sends."""
    rounds = {"all-reduce": 2 * (devices - 1), "all-gather": devices - 1, "reduce-scatter": devices - 1}
    return size if kind == "collective-permute" else rounds[kind] * size / devices


# The computation of a fusion that TPUs run as a reduce-scatter.
SCATTERING = re.compile(r"^%all-reduce-scatter[\w.]* \(.*?^\}", re.M | re.S)


def build():
    model = gpt(Size(1, 1024, 2), 1024, 128)
    model.compile(keras.optimizers.AdamW(1e-4, global_clipnorm=1.0), keras_mp.lean.ChunkedCrossEntropy())
    return model


@pytest.mark.jax
@only_jax
@pytest.mark.parametrize(
    ("target", "chips", "kind", "link", "rate"),
    [
        ("v5e", 16, "reduce-scatter", "ICI", 200e9),
        ("h100", 8, "reduce-scatter", "NVLink 4", 450e9),
    ],
    ids=["v5e-16", "h100x8"],
)
def test_the_gradients_of_a_fully_sharded_step(target, chips, kind, link, rate):
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = keras.KerasTensor((chips, 128), "int32")
    report = keras_mp.inspect(build, (tokens, tokens), f"{target}x{chips}", strategy="fully_sharded")
    text = (Path(report.log).parent / "compiled.hlo").read_text()
    counts, sizes = read(text)
    listed = Counter()
    for collective in report.collectives:
        listed[collective.kind] += collective.count
    assert listed == counts
    wire = sum(on_the_wire(name, size, members or chips) for (name, members), size in sizes.items())
    assert sum(collective.wire for collective in report.collectives) == pytest.approx(wire, rel=1e-6)

    # Each matrix once, and the embedding's twice, from its lookups and from the logits: in float32.
    matrices = [weight.shape for weight in build().trainable_weights if len(weight.shape) == 2]
    elements = sum(rows * columns for rows, columns in matrices) + 1024 * 1024
    gradients = [c for c in report.collectives if c.kind == kind and c.dtype == "float32"]
    # On the square slice in two hops of four: all of it, and then a quarter.
    hops = 1.25 if chips == 16 else 1.0
    assert sum(collective.bytes for collective in gradients) == pytest.approx(4 * elements * hops, rel=0.01)
    sent = sum(collective.wire for collective in gradients)
    assert sent == pytest.approx(4 * elements * (chips - 1) / chips, rel=0.05)  # with the padding of libtpu
    other = ({"all-reduce", "reduce-scatter"} - {kind}).pop()
    # What is left of the other kind is small: vectors, in as many hops, and the norm.
    assert sum(c.bytes for c in report.collectives if c.kind == other and c.dtype == "float32") < 1e5 * hops

    by_layer = Counter()
    for collective in gradients:
        by_layer[collective.layer] += collective.bytes
    for layer, size in (("block1_dense_1", 1024 * 4096 * 4), ("block1_attention/output", 1024 * 1024 * 4)):
        assert by_layer[layer] == pytest.approx(size * hops, rel=0.01)
    time = report.link_time
    assert time.seconds == pytest.approx(wire / rate) and time.link == link
    for said in ("On the wire: the bytes", "Estimate, from the rate of the chip's links", f"GB/s of {link}"):
        assert said in str(report.details())


@pytest.mark.jax
@only_jax
@pytest.mark.parametrize(
    ("target", "chips", "policy", "gather_dtype"),
    [
        ("v5e", 16, "mixed_bfloat16", "float8"),
        ("h100", 8, "mixed_float16", "compute"),
    ],
)
def test_the_norm_and_the_finite_check_are_made_on_the_parts(target, chips, policy, gather_dtype):
    """Every array of float32 that is sent whole is a vector or a number: no gradient, and none of its parts."""
    keras.config.set_dtype_policy(policy)

    def clipped():
        model = gpt(Size(1, 1024, 2), 1024, 128)
        kind = keras_mp.LossScale() if policy == "mixed_float16" else keras_mp.LossScale.none()
        optimizer = keras_mp.LossScaleOptimizer(keras.optimizers.AdamW(1e-4, global_clipnorm=1.0), kind)
        model.compile(optimizer, keras_mp.lean.ChunkedCrossEntropy())
        return model

    tokens = keras.KerasTensor((chips, 128), "int32")
    topology = find_target(f"{target}x{chips}").topology
    plan = replace(plan_of("fully_sharded", chips, topology), gather_dtype=gather_dtype)
    report = keras_mp.inspect(clipped, (tokens, tokens), f"{target}x{chips}", strategy=plan)
    text = (Path(report.log).parent / "compiled.hlo").read_text()
    whole = r"^ +(?:ROOT )?%\S+ = (.*?) (all-gather|all-reduce|all-to-all)(?:-start)?\("
    sent = re.findall(whole, re.sub(SCATTERING, "", text), re.M)
    wide = r"\b(?:f32|bf16|f16)\[[\d,]*\]" if gather_dtype == "float8" else r"\bf32\[[\d,]*\]"
    floats = [_bytes(array) for made, _ in sent for array in re.findall(wide, made)]
    # The smallest matrix, the positions, has 128 x 1024 numbers, and a part of it for each device.
    assert floats and max(floats) < 4 * 128 * 1024 / chips
    assert min(floats) <= 8  # the squares of all parts together, alone or with the loss
    narrow = "u8" if gather_dtype == "float8" else policy.removeprefix("mixed_").replace("loat", "")
    assert any(f"{narrow}[4096,1024]" in made for made, kind in sent if kind == "all-gather")
