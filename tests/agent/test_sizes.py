from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_agent.errors import UsageError
from spark_agent.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1234", 1234),
        ("5B", 5),
        ("14G", 14 * 2**30),
        ("14GiB", 14 * 2**30),
        ("14Gi", 14 * 2**30),
        ("14 gib", 14 * 2**30),
        ("14GB", 14 * 10**9),
        ("6.5GB", 6_500_000_000),
        (" 1.5k ", 1536),
        ("2T", 2 * 2**40),
        ("0.1M", 104857),
    ],
)
def test_what_people_write(text, expected):
    assert parse_size(text, "--vram") == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "G",
        "-1",
        "+1",
        "1e9",
        "1,5G",
        "14X",
        "14GG",
        "14i",
        "14iB",
        "14G\n14G",
        "0x10",
        "nan",
        "١G",
        ".5G",
        "9" * 9999,
    ],
)
def test_what_is_no_size(text):
    with pytest.raises(UsageError) as caught:
        parse_size(text, "--vram")
    assert caught.value.exit_code == 2


@given(st.integers(0, 2**60))
def test_a_number_of_bytes_is_itself(n_bytes):
    assert parse_size(str(n_bytes), "--vram") == n_bytes


@given(st.integers(0, 2**50))
def test_a_printed_size_reads_back_within_its_precision(n_bytes):
    text = format_size(n_bytes)
    assert abs(parse_size(text, "--vram") - n_bytes) <= max(1, n_bytes * 0.051)
    number, unit = text.split(" ")
    assert float(number) < 1024 or unit == "TiB"


@given(st.integers(0, 2**45), st.integers(0, 2**45))
def test_more_bytes_are_never_printed_as_fewer(first, second):
    small, large = sorted((first, second))
    assert parse_size(format_size(small), "--vram") <= parse_size(format_size(large), "--vram")
