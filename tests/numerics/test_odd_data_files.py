"""Files that are no data: each is the documented error, whatever zipfile and NumPy make of it."""

import os
import zipfile

import numpy as np
import pytest

from keras_mp.numerics.data import read_arrays


def saved(path, **at):
    """An .npz file of one array, of which some bytes of the zip directory's first entry are others."""
    np.savez(path, x=np.arange(100.0))
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
    data = bytearray(path.read_bytes())
    for place, value in at.items():
        data[start + int(place[1:])] = value
    path.write_bytes(data)


@pytest.mark.parametrize(
    "at", [{"_8": 1}, {"_10": 99}, {"_46": 0x7F}, {"_24": 7}], ids="password method name size".split()
)
def test_an_entry_of_another_kind(tmp_path, at):
    saved(tmp_path / "x.npz", **at)
    with pytest.raises(ValueError, match="is damaged|is not an .npz or .npy file"):
        read_arrays(tmp_path / "x.npz")


@pytest.mark.parametrize("shape", ["(1000000000000000,)", "(-1,)", "(10**400,)", "'x'", "(1.5,)", "[2]", "("])
def test_an_absurd_header(tmp_path, shape):
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}".encode().ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(ValueError, match="array 'x' in .* is damaged"):
        read_arrays(tmp_path / "x.npz")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.npz")
    with pytest.raises(ValueError, match="is a pipe or a device"):
        read_arrays(tmp_path / "x.npz")
