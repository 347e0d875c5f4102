"""A checkpoint in which a bit is flipped, cut short or named like another thing: read right, or refused as damaged."""

import os
import zipfile

import numpy as np
import pytest

from keras_mp.training.checkpoint_file import CheckpointError, Place, Reader, checkpoints_in, path_of, write


@pytest.fixture
def saved(tmp_path):
    arrays = {f"layer_{i}/kernel": np.random.default_rng().normal(size=(3, i + 1)).astype("float32") for i in range(4)}
    path = path_of(tmp_path, Place(1, 2))
    write(path, arrays.items(), {"epoch": 1})
    return path, arrays


def outcome(path, arrays):
    """What a reader makes of a file: "damaged", or "whole" where everything in it is as it was written."""
    try:
        with Reader(path) as reader:
            assert reader.names == set(arrays) and reader.manifest["epoch"] == 1
            for name, array in arrays.items():
                np.testing.assert_array_equal(reader[name], array)
            return "whole"
    except CheckpointError as error:
        assert str(error)
        return "damaged"


def test_any_flipped_bit_of_the_directory_is_told_or_changes_nothing(saved):
    path, arrays = saved
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
    whole = path.read_bytes()
    outcomes = {"whole": 0, "damaged": 0}
    for bit in range(8 * start, 8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        outcomes[outcome(path, arrays)] += 1
    print(f"{sum(outcomes.values())} bits: {outcomes}")
    assert outcomes["damaged"] > 500 and outcomes["whole"] > 500  # times and attributes are read by nobody


def test_any_flipped_bit_before_it_is_told_or_changes_nothing(saved):
    path, arrays = saved
    whole = path.read_bytes()
    for bit in np.random.default_rng().choice(8 * len(whole), 500, replace=False):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << int(bit % 8)
        path.write_bytes(flipped)
        outcome(path, arrays)
    for length in range(0, len(whole), 29):
        path.write_bytes(whole[:length])
        assert outcome(path, arrays) == "damaged"


def test_a_part_that_the_manifest_does_not_list_is_damage(saved):
    path, arrays = saved
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("another.npy", b"")
    assert outcome(path, arrays) == "damaged"


def test_a_file_that_cannot_be_opened_is_not_called_damaged(tmp_path):
    with pytest.raises(FileNotFoundError):
        Reader(tmp_path / "epoch00000-step00000001.npz")


def test_a_folder_or_a_pipe_of_such_a_name_is_no_checkpoint(tmp_path):
    path_of(tmp_path, Place(0, 1)).touch()
    path_of(tmp_path, Place(0, 2)).mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(path_of(tmp_path, Place(0, 3)))
    assert checkpoints_in(tmp_path) == [path_of(tmp_path, Place(0, 1))]


def test_the_newest_is_found_whatever_its_number(tmp_path):
    places = [Place(9, 10**8), Place(99_999, 3), Place(100_000, 0), Place(1_000_000, 10**9)]
    for place in places:
        path_of(tmp_path, place).touch()
    assert checkpoints_in(tmp_path) == [path_of(tmp_path, place) for place in reversed(places)]
