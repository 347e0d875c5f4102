"""The page of a compiled step: what memory holds, in fitting units; sizes that a matrix unit pads, in words."""

import dataclasses

import pytest

from keras_mp.planner.report.compile_table import unaligned
from keras_mp.reporting.text import byte_size
from tests.reporting.report_examples import compiled


def test_the_page_says_what_is_left(tmp_path):
    report = compiled()
    page = report.to_html(tmp_path / "report.html").read_text()
    left = byte_size(report.memory.capacity - report.memory.peak)
    assert f"<strong>Fits:</strong> 8.0 MiB of 1.0 GiB; {left} are left.</p>" in page


@pytest.mark.parametrize("capacity, words", [(2**20, "7.0 MiB are missing."), (0, "")])
def test_a_step_that_does_not_fit_says_how_much_is_missing(capacity, words, tmp_path):
    report = compiled()
    report = dataclasses.replace(report, memory=dataclasses.replace(report.memory, capacity=capacity))
    page = report.to_html(tmp_path / "report.html").read_text()
    assert words in page and words in str(report)
    assert ("Does not fit: 8.0 MiB of 1.0 MiB" in str(report)) == bool(words) and ("Fits" in str(report)) is False


def test_unaligned_sizes_are_words():
    (product, _) = compiled().matmuls
    assert unaligned(product) == "4 and 130 not divisible by 8; 8 not divisible by 16"
    product = dataclasses.replace(product, sizes=(64, 24, 130))
    assert unaligned(product) == "130 not divisible by 8; 24 not divisible by 16; 64 not divisible by 128"


def test_the_memory_of_a_chip_of_two_devices_is_that_of_a_device():
    report = compiled()
    memory = dataclasses.replace(report.memory, capacity=96 * 2**30)
    report = dataclasses.replace(report, target="v7x", title="TPU7x (Ironwood)", memory=memory)
    assert "Fits: 8.0 MiB of a device's 96.0 GiB" in str(report)
