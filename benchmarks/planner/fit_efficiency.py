"""The constants of `planner/time/step_time.py`, fitted to published tables of products, bandwidth and collectives.

    python benchmarks/planner/fit_efficiency.py

The tables, with their sources, are in `efficiency_tables.json`: measured seconds of a product of m x k by k x n, alone
or in a batch, of several products together, of a convolution and its two gradients, of kernels that only move bytes,
of collectives, by the bytes that a device sends on a ring, and of attention by Splash, by the operations of the blocks
that it computes and the features of a head. No training step is among them. The fit minimizes the
squares of the logarithms of the time that the constants give, divided by the measured time. A TPU's products read and
write at the rate of copies, of which there are tables.
What a generation's tables do not determine it takes from the generation that `TAKEN_FROM` names. Prints the table of
constants, with the error of the fit.

Convolutions of fewer channels than tensor cores take together are not in the tables: XLA pads them. Those that are have
channels first (DeepBench's code/nvidia/conv_bench.cu).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from keras_mp.planner.read.collectives import ring_share
from keras_mp.planner.time.step_time import (
    OPERATIONS,
    Efficiency,
    Links,
    computing_seconds,
    generation_of,
    link_seconds,
    product_seconds,
    scoring_seconds,
    transfer_seconds,
)
from keras_mp.precision.chips import CHIPS, Chip

TABLES = Path(__file__).with_name("efficiency_tables.json")
WIDTH = {"fp8": 8, "bfloat16": 16, "float16": 16, "tfloat32": 32, "float32": 32}
# Generations in the order in which they are fitted, and which gives what the tables leave open.
TAKEN_FROM = {"7.0": "", "7.5": "7.0", "8": "7.0", "9": "7.0", "10": "7.0", "v7x": "", "v6e": "v7x"}
# Where the search for the least error begins.
START = Efficiency({}, 0.85, 5e-6, 0.85, 3e-6, 1.0)
START_PRODUCTS = 0.75
START_LINKS = Links(0.8, 3e-5)
START_FILL = 2e7  # among the sizes of the table, where the fit is smooth
WIDE = 100.0  # the largest by the smallest size of a table that says how the rate depends on the size


def read() -> dict[str, list]:
    """The tables: rows of products, of sums of products, of convolutions, of transfers, and of collectives."""
    tables = json.loads(TABLES.read_text())
    return {name: tables[name] for name in ("sums of products", "transfers", "collectives", "attention")} | {
        "products": [*tables["products"], *tables["batched products"]],
        "convolutions": list(_each_convolution(tables["convolutions"])),
    }


def _each_convolution(rows: Sequence) -> Iterator[list]:
    """Of each row that has the times of a convolution and its two gradients, one row a time."""
    for chip, dtype, taken, window, made, times, source in rows:
        for seconds in times:
            yield [chip, dtype, [taken, window, made], seconds, "convolution", source]


def fit(tables: dict[str, list]) -> dict[str, tuple[Efficiency, float]]:
    """The constants of each generation, to three digits, and the root mean square of the errors of its products."""
    fitted: dict[str, tuple[Efficiency, float]] = {}
    for generation, other in TAKEN_FROM.items():
        mine = {
            name: [row for row in rows if generation_of(CHIPS[row[0]]) == generation] for name, rows in tables.items()
        }
        fitted[generation] = fit_one(mine, fitted[other][0] if other else None)
    return {generation: (_rounded(constants), error) for generation, (constants, error) in fitted.items()}


def fit_one(
    tables: dict[str, list], other: Efficiency | None = None, chips: Mapping[str, Chip] = CHIPS
) -> tuple[Efficiency, float]:
    """The constants of one generation, not rounded, and the root mean square of the errors of its products.

    Args:
        tables: the tables of its chips.
        other: the constants of the generation that gives what they do not determine.
        chips: the chips, by the names in the tables.
    """
    constants = (other or START)._replace(products={})
    products = [*tables["products"], *tables["sums of products"]]
    tpu = any(chips[row[0]].vendor == "google" for row in products)
    transfers = ["stream", "start"] if _is_wide([row[1] for row in tables["transfers"]]) else ["stream"]
    if tpu:
        constants = _fitted(constants, tables["transfers"], transfers, chips)
        constants = constants._replace(product_stream=constants.stream)
    names = [f"products.{bits}" for bits in sorted({WIDTH[row[1]] for row in products})]
    if _is_wide([math.prod(shape) for row in tables["products"] for shape in _shapes(row)]):
        names.append("product_start")
        # Only products that memory limits tell at what share of its bandwidth.
        moving = "fill" if tpu else "product_stream"
        names += [moving] if any(_is_moving(row, chips) for row in tables["products"]) else []
        constants = constants._replace(fill=START_FILL) if tpu else constants
    constants = _fitted(constants, products, names, chips)
    if tables["convolutions"]:
        constants = _fitted(constants, tables["convolutions"], ["convolution"], chips)
    if len(transfers) == 1 and other is None:
        constants = constants._replace(start=constants.product_start)
    constants = constants if tpu else _fitted(constants, tables["transfers"], transfers, chips)
    return constants, _error(constants, products, chips)


def fit_links(tables: dict[str, list]) -> Links:
    """The constants of collectives over NVLink, to three digits, from the table of H100, which stands for all."""
    rows = tables["collectives"]

    def errors(logarithms: np.ndarray) -> list[float]:
        links = Links(*np.exp(logarithms))
        return [math.log(collective_seconds(row, links) / measured(row)) for row in rows]

    fitted = np.exp(least_squares(errors, [math.log(value) for value in START_LINKS]).x)
    return Links(*(float(f"{value:.3g}") for value in fitted))


def fit_operations(tables: dict[str, list]) -> float:
    """The operations of a TPU's vector units for a score in each product of attention, to three digits."""
    times = [row[3] / scoring_seconds(row[1], row[2], CHIPS[row[0]]) for row in tables["attention"]]
    return float(f"{OPERATIONS * np.exp(np.mean(np.log(times))):.3g}")


def collective_seconds(row: Sequence, links: Links) -> float:
    """The seconds that the constants give for a row of the table of collectives."""
    chip, kind, devices, size = row[:4]
    return link_seconds(size * ring_share(kind, devices), CHIPS[chip], links)


def measured(row: Sequence) -> float:
    """The seconds in a row of a table."""
    return row[-3] if "convolution" in row else row[-2]


def predicted(row: Sequence, constants: Efficiency, chips: Mapping[str, Chip] = CHIPS) -> float:
    """The seconds that the constants give for a row of a table."""
    chip = chips[row[0]]
    if isinstance(row[1], (int, float)):
        return transfer_seconds(row[1], chip, constants)
    if "convolution" in row:
        return _convolution(chip, row[1], *row[2], constants)
    return sum(_product(chip, row[1], shape, constants) for shape in _shapes(row))


def _shapes(row: Sequence) -> list[Sequence[int]]:
    """The products of a row, each m x k by k x n, in a batch with its size before them."""
    if not isinstance(row[2], list):
        return [row[2:5]]
    return row[2] if isinstance(row[2][0], list) else [row[2]]


def _is_moving(row: Sequence, chips: Mapping[str, Chip]) -> bool:
    """Whether moving the arrays of a product takes longer than its operations, each at the chip's peak rate."""
    chip, (shape,) = chips[row[0]], _shapes(row)
    return _moved(row[1], shape) / chip.bandwidth > 2 * math.prod(shape) / chip.peak[row[1]]


def _moved(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of the operands and of the result, which has 16 bits, or 32 if the operands have."""
    *batch, m, k, n = shape
    bits = WIDTH[dtype]
    return math.prod(batch) * (bits * (m * k + k * n) + max(bits, 16) * m * n) // 8


def _product(chip: Chip, dtype: str, shape: Sequence[int], constants: Efficiency) -> float:
    computing = computing_seconds(2 * math.prod(shape), chip.peak[dtype], WIDTH[dtype], chip, constants)
    return product_seconds(computing, _moved(dtype, shape), chip, constants)


def _convolution(
    chip: Chip, dtype: str, taken: Sequence[int], window: Sequence[int], made: Sequence[int], constants: Efficiency
) -> float:
    """The three arrays cross the memory once, whichever of them is the result."""
    kernel = math.prod(window) * taken[-1] * made[-1]
    flops = 2 * math.prod(made) * math.prod(window) * taken[-1]
    moved = WIDTH[dtype] * (math.prod(taken) + math.prod(made) + kernel) // 8
    computing = computing_seconds(flops, chip.peak[dtype], WIDTH[dtype], chip, constants, "convolution")
    return product_seconds(computing, moved, chip, constants)


def _fitted(start: Efficiency, rows: Sequence, names: Sequence[str], chips: Mapping[str, Chip]) -> Efficiency:
    if not rows or not names:
        return start

    def errors(logarithms: np.ndarray) -> list[float]:
        constants = _with(start, names, np.exp(logarithms))
        return [math.log(predicted(row, constants, chips) / measured(row)) for row in rows]

    first = [math.log(_get(start, name)) for name in names]
    return _with(start, names, np.exp(least_squares(errors, first).x))


def _is_wide(sizes: Sequence[float]) -> bool:
    return bool(sizes) and max(sizes) > WIDE * min(sizes)


def _error(constants: Efficiency, rows: Sequence, chips: Mapping[str, Chip]) -> float:
    return math.sqrt(np.mean([math.log(predicted(row, constants, chips) / measured(row)) ** 2 for row in rows]))


def _get(constants: Efficiency, name: str) -> float:
    field, _, bits = name.partition(".")
    return constants.products.get(int(bits), START_PRODUCTS) if bits else getattr(constants, field)


def _with(constants: Efficiency, names: Sequence[str], values: Sequence[float]) -> Efficiency:
    fields = constants._asdict() | {"products": dict(constants.products)}
    for name, value in zip(names, values, strict=True):
        field, _, bits = name.partition(".")
        if bits:
            fields["products"][int(bits)] = float(value)
        else:
            fields[field] = float(value)
    return Efficiency(**fields)


def _rounded(constants: Efficiency) -> Efficiency:
    digits: Callable[[float], float] = lambda value: float(f"{value:.3g}")  # noqa: E731
    return Efficiency(
        {bits: digits(share) for bits, share in sorted(constants.products.items())}, *map(digits, constants[1:])
    )


def main() -> None:
    tables = read()
    for generation, (constants, error) in fit(tables).items():
        print(f'    "{generation}": Efficiency({", ".join(map(str, constants))}),  # {error:.1%}')
    print(fit_links(tables), fit_operations(tables))


if __name__ == "__main__":
    main()
