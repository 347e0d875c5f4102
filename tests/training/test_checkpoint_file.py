import json
import zipfile

import ml_dtypes
import numpy as np
import pytest

from keras_mp.training.checkpoint_file import (
    CheckpointError,
    Place,
    Reader,
    path_of,
    write,
)

DTYPES = ["float32", "float64", "float16", "int32", "uint32", "bool", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def random_bits(dtype, shape):
    """An array of random bits, so with NaN, infinities and subnormals."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    generator = np.random.default_rng()
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(bool)
    bits = generator.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return bits.view(dtype)[..., 0]


def test_every_bit_comes_back_and_numpy_alone_reads_the_file(tmp_path):
    shapes = [(), (0,), (1,), (3, 5)]
    saved = {f"{dtype} {shape}": random_bits(dtype, shape) for dtype in DTYPES for shape in shapes}
    path = path_of(tmp_path, Place(2, 30))
    write(path, [*saved.items(), ("other", np.arange(4.0))], {"place": (2, 30)})
    with Reader(path) as reader:
        assert reader.names == {*saved, "other"} and reader.manifest["place"] == [2, 30]
        for name, array in saved.items():
            back = reader[name]
            assert back.dtype == array.dtype and back.shape == array.shape and back.tobytes() == array.tobytes(), name
    with np.load(path) as arrays:
        np.testing.assert_array_equal(arrays["other"], np.arange(4.0))


def test_a_file_of_another_format_says_so(tmp_path):
    path = path_of(tmp_path, Place(0, 0))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps({"format": 99, "dtypes": {}}))
    with pytest.raises(CheckpointError, match="it has format 99, and this keras_mp reads 1"):
        Reader(path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = path_of(tmp_path, Place(0, 0))
    write(path, [("a", np.arange(3))], {})
    before = path.read_bytes()

    def arrays():
        yield "a", np.arange(4)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write(path, arrays(), {})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
