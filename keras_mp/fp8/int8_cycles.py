"""Million cycles of a layer by chip, by (rows, inputs, outputs), and by scaling recipe.

Made by `KERAS_BACKEND=jax python benchmarks/int8_cycles.py --python`, with libtpu 0.0.42.1.
"""

Shape = tuple[int, int, int]

# fmt: off
CYCLES: dict[str, dict[Shape, dict[str, float]]] = {
    "v5e": {
        (2048, 2048, 8192): {
            "bfloat16": 1.64,
            "delayed": 2.37,
            "static": 2.37,
            "current": 2.49,
            "delayed, kernel gradient INT8": 2.31,
            "static, kernel gradient INT8": 2.32,
        },
        (8192, 4096, 16384): {
            "bfloat16": 29.31,
            "delayed": 24.67,
            "static": 24.68,
            "current": 24.89,
            "delayed, kernel gradient INT8": 24.69,
            "static, kernel gradient INT8": 24.69,
        },
    },
    "v6e": {
        (2048, 2048, 8192): {
            "bfloat16": 0.57,
            "delayed": 0.99,
            "static": 1.11,
            "current": 1.11,
            "delayed, kernel gradient INT8": 0.94,
            "static, kernel gradient INT8": 1.06,
        },
        (8192, 4096, 16384): {
            "bfloat16": 8.45,
            "delayed": 10.86,
            "static": 10.87,
            "current": 11.27,
            "delayed, kernel gradient INT8": 10.06,
            "static, kernel gradient INT8": 10.07,
        },
    },
    "v7x": {
        (2048, 2048, 8192): {
            "bfloat16": 0.48,
            "delayed": 1.01,
            "static": 1.04,
            "current": 1.06,
            "delayed, kernel gradient INT8": 0.94,
            "static, kernel gradient INT8": 0.97,
        },
        (8192, 4096, 16384): {
            "bfloat16": 9.00,
            "delayed": 10.68,
            "static": 10.68,
            "current": 10.70,
            "delayed, kernel gradient INT8": 10.62,
            "static, kernel gradient INT8": 10.63,
        },
    },
}
# fmt: on
