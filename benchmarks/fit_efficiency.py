"""The constants of `keras_mp.xla.efficiency`, fitted to published tables of matrix products and of memory bandwidth.

    python benchmarks/fit_efficiency.py

The tables, with their sources, are in `efficiency_tables.json`: measured seconds of a product of m x k by k x n, of
several products together, and of kernels that only move bytes. No training step is among them. The fit minimizes the
squares of the logarithms of the time that the constants give, divided by the measured time. What a generation's tables
do not determine it takes from the generation that `TAKEN_FROM` names. Prints the table of constants, with the error of
the fit.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from keras_mp.precision.chips import CHIPS, Chip
from keras_mp.xla.efficiency import Efficiency, generation_of, product_seconds, transfer_seconds

TABLES = Path(__file__).with_name("efficiency_tables.json")
WIDTH = {"fp8": 8, "bfloat16": 16, "float16": 16, "float32": 32}
# Generations in the order in which they are fitted, and which gives what the tables leave open.
TAKEN_FROM = {"7.0": "", "7.5": "7.0", "8": "7.0", "9": "7.0", "10": "7.0", "v7x": "", "v6e": "v7x"}
STREAM_FROM = {"v7x": "v6e"}
# Where the search for the least error begins.
START = Efficiency({}, 0.85, 5e-6, 0.85, 3e-6)
START_PRODUCTS = 0.75
WIDE = 100.0  # the largest by the smallest size of a table that says how the rate depends on the size


def read() -> dict[str, list]:
    """The tables: rows of products, of sums of products, and of transfers."""
    tables = json.loads(TABLES.read_text())
    return {name: tables[name] for name in ("products", "sums of products", "transfers")}


def fit(tables: dict[str, list]) -> dict[str, tuple[Efficiency, float]]:
    """The constants of each generation, to three digits, and the root mean square of the errors of its products."""
    fitted: dict[str, tuple[Efficiency, float]] = {}
    for generation, other in TAKEN_FROM.items():
        mine = {
            name: [row for row in rows if generation_of(CHIPS[row[0]]) == generation] for name, rows in tables.items()
        }
        constants = (fitted[other][0] if other else START)._replace(products={})
        products = [*mine["products"], *mine["sums of products"]]
        names = [f"products.{bits}" for bits in sorted({WIDTH[row[1]] for row in products})]
        if _is_wide([math.prod(row[2:5]) for row in mine["products"]]):
            names += ["product_stream", "product_start"]
        constants = _fitted(constants, products, names)
        wide = _is_wide([row[1] for row in mine["transfers"]])
        if not wide and not other:
            constants = constants._replace(start=constants.product_start)
        constants = _fitted(constants, mine["transfers"], ["stream", "start"] if wide else ["stream"])
        fitted[generation] = (constants, _error(constants, products))
    for generation, other in STREAM_FROM.items():
        constants, error = fitted[generation]
        fitted[generation] = constants._replace(stream=fitted[other][0].stream), error
    return {generation: (_rounded(constants), error) for generation, (constants, error) in fitted.items()}


def measured(row: Sequence) -> float:
    """The seconds in a row of a table."""
    return row[2] if isinstance(row[1], (int, float)) else row[3] if isinstance(row[2], list) else row[5]


def predicted(row: Sequence, constants: Efficiency) -> float:
    """The seconds that the constants give for a row of a table."""
    chip = CHIPS[row[0]]
    if isinstance(row[1], (int, float)):
        return transfer_seconds(row[1], chip, constants)
    shapes = row[2] if isinstance(row[2], list) else [row[2:5]]
    return sum(_product(chip, row[1], *shape, constants) for shape in shapes)


def _product(chip: Chip, dtype: str, m: int, k: int, n: int, constants: Efficiency) -> float:
    """The result has 16 bits, or 32 if the operands have."""
    bits = WIDTH[dtype]
    moved = (bits * (m * k + k * n) + max(bits, 16) * m * n) // 8
    return product_seconds(2 * m * k * n, moved, chip.peak[dtype], bits, chip, constants)


def _fitted(start: Efficiency, rows: Sequence, names: Sequence[str]) -> Efficiency:
    if not rows or not names:
        return start

    def errors(logarithms: np.ndarray) -> list[float]:
        constants = _with(start, names, np.exp(logarithms))
        return [math.log(predicted(row, constants) / measured(row)) for row in rows]

    first = [math.log(_get(start, name)) for name in names]
    return _with(start, names, np.exp(least_squares(errors, first).x))


def _is_wide(sizes: Sequence[float]) -> bool:
    return bool(sizes) and max(sizes) > WIDE * min(sizes)


def _error(constants: Efficiency, rows: Sequence) -> float:
    return math.sqrt(np.mean([math.log(predicted(row, constants) / measured(row)) ** 2 for row in rows]))


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
    for generation, (constants, error) in fit(read()).items():
        print(f'    "{generation}": Efficiency({", ".join(map(str, constants))}),  # {error:.1%}')


if __name__ == "__main__":
    main()
