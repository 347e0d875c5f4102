import pytest

from keras_mp.reporting.byte_size import byte_size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1.0 KiB"),
        (1024 * 1024 - 1, "1.0 MiB"),
        (1536 * 1024, "1.5 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (5 * 2**50, "5,120.0 TiB"),
    ],
)
def test_a_size_is_in_the_unit_that_people_read(count, text):
    assert byte_size(count) == text
