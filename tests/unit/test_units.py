"""Durations, sizes and Slurm's strings: what people write is read, and written back."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_ckpt import settings, units
from hpc_ckpt.errors import SpecError


@pytest.mark.parametrize("module", [units, settings])
def test_the_examples_in_the_docstrings_hold(module: object) -> None:
    """A docstring that lies is a defect."""
    found = doctest.testmod(module)  # type: ignore[arg-type] # a module is what it wants
    assert found.attempted > 0
    assert 0 == found.failed


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90), (90, 90), ("90s", 90), ("1.5h", 5400), ("10 min", 600), ("10 minutes", 600),
        ("1h30m", 5400), ("1h 30 min", 5400), ("1:30", 90), ("1:30:00", 5400),
        ("08:00:00", 28800), ("2-00", 172800), ("1-12:30", 131400), ("2-00:00:00", 172800),
        ("250ms", 0.25), ("1 week", 604800), ("0", 0), ("  8H ", 28800),
    ],
)  # fmt: skip
def test_durations_as_people_and_slurm_write_them(text: str | int, seconds: float) -> None:
    """A bare number is seconds; with colons it is read as Slurm would."""
    assert seconds == units.parse_duration(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "1x",
        "h",
        "8h!",
        "1:2:3:4",
        "-5",
        "-5s",
        "1 h x",
        "nan",
        "inf",
        "1e3",
        "1:",
        "٣h",
    ],
)
def test_what_is_no_duration_is_named(text: str) -> None:
    """With examples of what is."""
    with pytest.raises(SpecError, match="is not a duration; write 90s"):
        units.parse_duration(text)


@given(st.integers(min_value=0, max_value=10**10))
def test_a_duration_survives_being_written(milliseconds: int) -> None:
    """format then parse is the identity, to the millisecond."""
    seconds = milliseconds / 1000
    again = units.parse_duration(units.format_duration(seconds))
    assert milliseconds == round(again * 1000)


@given(st.integers(min_value=1, max_value=10**7))
def test_slurm_time_is_never_shorter_than_asked(seconds: int) -> None:
    """Whole minutes, rounded up, by less than one."""
    given_s = units.parse_duration(units.slurm_time(seconds))
    assert seconds <= given_s < seconds + 60


@pytest.mark.parametrize(
    ("text", "count"),
    [("32G", 32 * 2**30), ("1.5 MiB", 3 * 2**19), ("512mb", 2**29), ("10", 10), (10, 10),
     ("1T", 2**40), ("0", 0)],
)  # fmt: skip
def test_sizes_in_powers_of_1024(text: str | int, count: int) -> None:
    """As Slurm counts memory."""
    assert count == units.parse_size(text)


@pytest.mark.parametrize("text", ["", "big", "-1G", "1X", "G", "1 2"])
def test_what_is_no_size_is_named(text: str) -> None:
    """With examples of what is."""
    with pytest.raises(SpecError, match="is not a size"):
        units.parse_size(text)


@given(
    st.sets(st.integers(min_value=0, max_value=2000), min_size=1, max_size=60),
    st.one_of(st.none(), st.integers(min_value=1, max_value=99)),
)
def test_an_array_expression_survives_being_written(
    indices: set[int], throttle: int | None
) -> None:
    """Indices and throttle."""
    written = units.format_array(list(indices), throttle)
    assert (sorted(indices), throttle) == units.parse_array(written)


@pytest.mark.parametrize("text", ["", "a", "1-", "1-3%x", "1,,2", "1-5:0"])
def test_what_is_no_array_is_named(text: str) -> None:
    """It says what to write."""
    with pytest.raises(SpecError, match="is not an array expression"):
        units.parse_array(text)


def test_node_lists_keep_their_zeros_and_nest() -> None:
    """As scontrol show hostnames would print them."""
    assert ["n08", "n09", "n10", "x"] == units.expand_nodes("n[08-10],x")
    assert ["r1c1", "r1c2", "r2c1", "r2c2"] == units.expand_nodes("r[1-2]c[1-2]")
