"""The collectives that compilers make, against a reading of their text that has nothing of the kit's."""

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import keras
import pytest

import keras_mp
from keras_mp.parallel.plan import plan_of
from keras_mp.planner.chips.targets import find_target
from keras_mp.planner.read.collectives import collectives
from keras_mp.planner.read.hlo import parse
from models.gpt import gpt
from models.transformer import Size

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
only_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="a step on several devices lowers on JAX only")
WHOLE = 2048 * 2048 * 4
# What a program sends: of psum and of a slice of it all of the array in both directions. A square slice of 16 v5e makes
# an all-reduce of a psum_scatter too (libtpu 0.0.42).
EXPECTED = {
    ("v5e-4", "psum"): "all-reduce",
    ("v5e-4", "psum_scatter"): "reduce-scatter",
    ("v5e-4", "slice_of_psum"): "all-reduce",
    ("v5e-16", "psum"): "all-reduce",
    ("v5e-16", "psum_scatter"): "all-reduce",
    ("v5e-16", "slice_of_psum"): "all-reduce",
    ("h100x8", "psum"): "all-reduce",
    ("h100x8", "psum_scatter"): "reduce-scatter",
    ("h100x8", "slice_of_psum"): "all-reduce",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The compiled text of each program on each set of devices."""
    folder = tmp_path_factory.mktemp("compiled")
    quiet = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    paths = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **quiet, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "PYTHONPATH": paths}
    environment.pop("XLA_FLAGS", None)
    environment["KERAS_BACKEND"] = "jax"
    command = [sys.executable, str(HERE / "compile_collectives.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return {tuple(path.stem.rsplit("-", 1)): path.read_text() for path in folder.iterdir()}


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


@pytest.mark.parametrize(("devices", "program"), EXPECTED)
def test_what_reduces_and_what_scatters(compiled, devices, program):
    text, count = compiled[devices, program], int(re.search(r"\d+$", devices)[0])
    counts, by_group = read(text)
    sizes = {kind: size for (kind, _), size in by_group.items()}
    listed = {collective.kind: collective for collective in collectives(parse(text), count)}
    kind = EXPECTED[devices, program]
    assert counts[kind] == 1 and not ({"all-reduce", "reduce-scatter"} - {kind}) & set(counts)
    assert {name: collective.count for name, collective in listed.items()} == counts
    assert listed[kind].bytes == WHOLE
    assert WHOLE <= sizes[kind] <= 1.1 * WHOLE  # with its padding
    for name, collective in listed.items():
        assert collective.wire == on_the_wire(name, sizes[name], count)


# The computation of a fusion that TPUs run as a reduce-scatter.
SCATTERING = re.compile(r"^%all-reduce-scatter[\w.]* \(.*?^\}", re.M | re.S)


def with_products_beside(text):
    """The gathered arrays that a product runs beside, and all: by the lines of the compiled text.

    Between the start and the end of a gather there is a product; or the computation of one of a TPU's steps of the
    gather, which name a chain, has a convolution in it.
    """
    beside, arrays = 0, 0
    waiting = {}
    for line in re.split(r"^ENTRY ", text, flags=re.M)[1].splitlines():
        started = re.match(r" +(%[\w.\-]+) = \(+(.*)\) all-gather-start\(", line)
        if started:
            waiting[started[1]] = [len(re.findall(r"bf16\[2048,2048\]", started[2])), False]
            arrays += waiting[started[1]][0]
        elif "dot" in line.partition(" = ")[0]:
            waiting = {name: [count, True] for name, (count, _) in waiting.items()}
        ended = re.search(r" all-gather-done\((%[\w.\-]+)\)", line)
        if ended:
            count, covered = waiting.pop(ended[1])
            beside += count if covered else 0
    chains = {}
    for computation in re.split(r"\n\}\n", text):
        for chain in set(re.findall(r'chain_id="(\d+)"', computation)):
            chains[chain] = chains.get(chain, False) or " convolution(" in computation
    alone = len(set(re.findall(r'^  %[\w.\-]+ = .*async_collective_name="([^"]*)"', text, re.M)))
    return beside + sum(chains.values()), arrays + len(chains) + alone


def test_a_gather_of_small_parts_stays_one_in_hops(compiled):
    """Parts of 64 KiB on 256 v5e: at once libtpu adds arrays of zeros up, which sends twice as much."""
    sent = {
        name: re.findall(r"= (\w+)\[[\d,]*\]\S* (all-\w+)\(", compiled["v5e-256", name])
        for name in ("gather", "gather_in_hops")
    }
    assert sent == {"gather": [("u32", "all-reduce")], "gather_in_hops": [("u8", "all-gather")] * 2}


@pytest.mark.parametrize("devices", ["v5e-4", "h100x8"])
def test_which_gathers_products_run_beside(compiled, devices):
    text, count = compiled[devices, "products"], int(re.search(r"\d+$", devices)[0])
    beside, arrays = with_products_beside(text)
    assert arrays == 4 and 0 < beside < 4  # nothing runs beside what the first product waits for
    (gathers,) = collectives(parse(text), count)
    assert (gathers.kind, gathers.count, gathers.covered) == ("all-gather", 4, gathers.wire * beside // 4)


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
