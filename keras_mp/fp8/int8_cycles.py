"""Million cycles of a layer by chip, by (rows, inputs, outputs), and by scaling recipe.

Made by `KERAS_BACKEND=jax python benchmarks/int8_cycles.py --python`, with libtpu 0.0.42.1.
"""

Shape = tuple[int, int, int]

# fmt: off
CYCLES: dict[str, dict[Shape, dict[str, float]]] = {
    "v5e": {
        (2048, 2048, 8192): {
            "bfloat16": 1.64,
            "delayed": 1.77,
            "static": 1.78,
            "current": 2.49,
            "delayed, kernel gradient INT8": 1.51,
            "static, kernel gradient INT8": 1.52,
        },
        (8192, 4096, 16384): {
            "bfloat16": 29.31,
            "delayed": 21.13,
            "static": 21.13,
            "current": 24.89,
            "delayed, kernel gradient INT8": 17.88,
            "static, kernel gradient INT8": 17.88,
        },
    },
    "v6e": {
        (2048, 2048, 8192): {
            "bfloat16": 0.57,
            "delayed": 0.67,
            "static": 0.78,
            "current": 1.11,
            "delayed, kernel gradient INT8": 0.72,
            "static, kernel gradient INT8": 0.79,
        },
        (8192, 4096, 16384): {
            "bfloat16": 8.45,
            "delayed": 8.81,
            "static": 8.82,
            "current": 11.27,
            "delayed, kernel gradient INT8": 8.04,
            "static, kernel gradient INT8": 8.05,
        },
    },
    "v7x": {
        (2048, 2048, 8192): {
            "bfloat16": 0.48,
            "delayed": 0.85,
            "static": 0.85,
            "current": 1.06,
            "delayed, kernel gradient INT8": 0.79,
            "static, kernel gradient INT8": 0.81,
        },
        (8192, 4096, 16384): {
            "bfloat16": 9.00,
            "delayed": 9.53,
            "static": 9.54,
            "current": 10.70,
            "delayed, kernel gradient INT8": 9.96,
            "static, kernel gradient INT8": 9.97,
        },
    },
}
