"""When a last save begins: by what saves have taken, and before any by a guess."""

import time
from pathlib import Path

import pytest

from hpc_ckpt.levels.moments import LEAD_SHARE, Cost, Moments
from hpc_ckpt.levels.plain import Plain
from hpc_ckpt.making import prepare
from hpc_ckpt.rundir import RunDir
from hpc_ckpt.settings import SAVE_FACTOR, margin

LINK_S = 10_000.0


class Guessing(Plain):
    lead_s = 30.0


@pytest.fixture
def place(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    prepare(found)
    return found


def moments(place: RunDir, rehearsed_s: float | None = None) -> Moments:
    return Moments(place, 1, 600.0, rehearsed_s)


@pytest.mark.parametrize(("rehearsed_s", "expected"), [(None, 30.0), (7.0, 7.0)])
def test_before_any_save_a_guess_counts(
    place: RunDir, rehearsed_s: float | None, expected: float
) -> None:
    assert expected == moments(place, rehearsed_s).lead(Guessing(), LINK_S)
    assert 10 * LEAD_SHARE == moments(place, 300.0).lead(Guessing(), 10)


def test_what_a_save_of_this_link_took_counts_instead(place: RunDir) -> None:
    found = moments(place)
    found.measured(Cost(100.0))
    assert 100 * SAVE_FACTOR == found.lead(Guessing(), LINK_S)
    found.measured(Cost(2.0))
    assert 2 * SAVE_FACTOR == found.lead(Guessing(), LINK_S)


@pytest.mark.parametrize(("earlier_s", "expected"), [(100.0, 150.0), (1.0, 30.0)])
def test_what_one_of_an_earlier_link_took_may_move_it_forward_only(
    place: RunDir, earlier_s: float, expected: float
) -> None:
    found = moments(place)
    found.expect(Cost(earlier_s))
    assert expected == found.lead(Guessing(), LINK_S)


@pytest.mark.parametrize("how", ["expect", "measured"])
def test_storing_comes_on_top_of_what_the_program_itself_needs(place: RunDir, how: str) -> None:
    """A restart of some gigabytes takes minutes to be copied, whatever the recipe says."""
    found = moments(place)
    getattr(found, how)(Cost(100.0, lead_s=60.0))
    assert 60 + 100 * SAVE_FACTOR == found.lead(Guessing(), LINK_S)
    assert 100 * SAVE_FACTOR == found.store_s
    assert 100 * SAVE_FACTOR == found.moment(time.monotonic(), last=True).store_s


def test_a_save_that_has_begun_is_waited_for_until_the_end_of_the_link(place: RunDir) -> None:
    """However short the interval: DMTCP and CRIU cannot be stopped in the middle of one."""
    found, began = Moments(place, 1, 60.0), time.monotonic()
    assert began + 60 == found.moment(began, last=False).until
    place.write_deadline(1, found.entered + LINK_S)
    expected = began + LINK_S - margin(LINK_S) / 2
    assert expected == pytest.approx(found.moment(began, last=False).until, abs=5.0)


def test_the_deadline_is_met_with_the_measured_save_to_spare(place: RunDir) -> None:
    found = moments(place)
    found.measured(Cost(100.0, lead_s=60.0))
    lead = 60 + 100 * SAVE_FACTOR
    spare = margin(LINK_S)
    for left, ends in ((lead + spare + 5, False), (lead + spare - 5, True)):
        found.entered = time.time() - (LINK_S - left)
        place.write_deadline(1, time.time() + left)
        assert ends is (found.why_end(Guessing()) is not None)
