"""Settings of a running program: sources, precedence, and the two small languages in them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_ckpt.errors import SpecError
from hpc_ckpt.policy.interval import EverySteps, EveryTime
from hpc_ckpt.settings import (
    Best,
    Keep,
    Settings,
    environment_overlay,
    merge,
    parse_keep,
    parse_policy,
    parse_signal,
    resolve,
)
from hpc_ckpt.tiers.wishes import Survives, TierWish


# ── policy expressions ────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("every 500 steps", EverySteps(500)),
        ("every step", EverySteps(1)),
        ("Every  1   Step", EverySteps(1)),
        ("every 10 min", EveryTime(600.0)),
        ("every hour", EveryTime(3600.0)),
        ("every 1:30:00", EveryTime(5400.0)),
        ("auto", EveryTime(600.0)),
    ],
)
def test_a_policy_is_written_as_people_write_it(text: str, policy: object) -> None:
    """Steps, durations and 'auto' are understood, whatever the spacing and case."""
    assert policy == parse_policy(text)


@pytest.mark.parametrize("text", ["", "sometimes", "every", "every 0 steps", "every 0s", "500"])
def test_what_is_not_a_policy_is_refused_with_the_choices(text: str) -> None:
    """The error names the key and what can be written."""
    with pytest.raises(SpecError, match=r"^checkpoint\.policy: "):
        parse_policy(text)


@pytest.mark.parametrize("name", ["young", "daly", "checkfreq", "coci"])
def test_a_policy_of_a_later_version_is_an_error_not_a_default(name: str) -> None:
    """A key that is not built yet is never silently replaced."""
    with pytest.raises(SpecError, match="not available in this version"):
        parse_policy(name)


@given(st.one_of(st.integers(1, 10**6).map(EverySteps), st.integers(1, 10**6).map(EveryTime)))
def test_a_policy_prints_as_the_expression_that_makes_it(policy: EverySteps | EveryTime) -> None:
    """str() of a policy, parsed, is the policy."""
    assert policy == parse_policy(str(policy))


# ── retention ─────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("value", "keep"),
    [
        (5, Keep(last=5)),
        ("5", Keep(last=5)),
        ({}, Keep(last=3)),
        ({"last": "2", "every": "1000"}, Keep(last=2, every=1000)),
        ({"best": "accuracy"}, Keep(best=Best(metric="accuracy"))),
        ({"best": {"metric": "loss", "mode": "min"}}, Keep(best=Best(metric="loss", mode="min"))),
        (Keep(last=9), Keep(last=9)),
    ],
)
def test_retention_is_a_number_or_a_mapping(value: object, keep: Keep) -> None:
    """Values may be text: they come from environment variables too."""
    assert keep == parse_keep(value)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (0, r"keep\.last: must be at least 1"),
        ({"last": True}, r"keep\.last: must be a whole number"),
        ({"newest": 3}, "unknown key 'newest'"),
        ({"lats": 3}, "Did you mean 'last'"),
        ({"best": {"metric": "x", "mode": "most"}}, r"best\.mode: must be max or min"),
        ({"best": {"mode": "max"}}, r"keep\.best: write"),
        ([3], r"checkpoint\.keep: write a number"),
    ],
)
def test_bad_retention_is_refused_by_name(value: object, complaint: str) -> None:
    """The error names the key that is wrong."""
    with pytest.raises(SpecError, match=complaint):
        parse_keep(value)


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"last": 0}, "last"), ({"last": -1}, "last"), ({"last": True}, "last"),
     ({"last": None}, "last"), ({"last": "3"}, "last"), ({"last": 2.0}, "last"),
     ({"every": 0}, "every"), ({"every": -5}, "every")],
)  # fmt: skip
def test_retention_given_as_an_object_is_checked_too(fields: dict[str, Any], name: str) -> None:
    """The newest none would be all of them, and everything a multiple of nothing an error."""
    with pytest.raises(SpecError, match=f"keep.{name}: "):
        Keep(**fields)


def test_the_best_given_as_an_object_is_checked_too() -> None:
    """Any other word would have meant max."""
    with pytest.raises(SpecError, match="max or min"):
        Best(metric="loss", mode="least")


# ── sources and their order ───────────────────────────────────────────────────────────────
def test_nothing_given_is_the_default() -> None:
    """Without any source: every 10 minutes, the last three, USR1."""
    settings = resolve(environ={})
    assert (Settings(), ()) == (settings, settings.notes)


def test_environment_beats_call_beats_file() -> None:
    """Precedence: environment > call > settings file > default."""
    file = {"checkpoint": {"policy": "every 1 steps", "keep": 1}}
    environ = {"HPC_CKPT__CHECKPOINT__POLICY": "every 3 steps"}
    assert EverySteps(1) == resolve(file=file, environ={}).policy
    assert EverySteps(2) == resolve(call={"policy": "every 2 steps"}, file=file, environ={}).policy
    overlaid = resolve(call={"policy": "every 2 steps"}, file=file, environ=environ)
    assert (EverySteps(3), Keep(last=1)) == (overlaid.policy, overlaid.keep)


def test_a_none_in_the_call_means_not_given() -> None:
    """Checkpointer passes None for what the user left out."""
    file = {"checkpoint": {"policy": "every 7 steps"}}
    assert (
        EverySteps(7) == resolve(call={"policy": None, "keep": None}, file=file, environ={}).policy
    )


def test_nested_environment_overlays_one_value_only() -> None:
    """HPC_CKPT__CHECKPOINT__KEEP__LAST changes `last` and leaves `every`."""
    environ = {"HPC_CKPT__CHECKPOINT__KEEP__LAST": "9", "HPC_CKPT__CHAIN__MAX_LINKS": "5"}
    settings = resolve(call={"keep": {"last": 2, "every": 50}}, environ=environ)
    assert Keep(last=9, every=50) == settings.keep


def test_a_policy_object_is_taken_as_it_is() -> None:
    """Anything with decide() can be passed as policy."""
    policy = EveryTime(12.0)
    assert policy is resolve(call={"policy": policy}, environ={}).policy


def test_auto_says_what_it_means() -> None:
    """A user who writes 'auto' is told once what that is in this version."""
    assert resolve(call={"policy": "auto"}, environ={}).notes[0].startswith("policy 'auto' means")


def test_unknown_keys_are_an_error_with_a_suggestion() -> None:
    """Keys nobody knows are never ignored."""
    with pytest.raises(SpecError, match="Did you mean 'policy'"):
        resolve(file={"checkpoint": {"polcy": "every 1 steps"}}, environ={})
    with pytest.raises(SpecError, match="unknown key 'pollcy'"):
        resolve(environ={"HPC_CKPT__CHECKPOINT__POLLCY": "auto"})


def test_chain_json_gives_spec_and_the_sites_signal(tmp_path: Path) -> None:
    """In a link the settings file is chain.json: spec.checkpoint and profile.signal."""
    path = tmp_path / "chain.json"
    record = {
        "spec": {"checkpoint": {"policy": "every 4 steps"}},
        "profile": {"signal": {"name": "USR2"}},
    }
    path.write_text(json.dumps(record))
    settings = resolve(file=path, environ={})
    assert (EverySteps(4), signal.SIGUSR2) == (settings.policy, settings.signal)


def test_a_users_settings_file_may_be_yaml(tmp_path: Path) -> None:
    """A file with `checkpoint:` in YAML works as well."""
    path = tmp_path / "settings.yaml"
    path.write_text("checkpoint:\n  policy: every 5 min\n  keep: {last: 4}\n")
    settings = resolve(file=path, environ={})
    assert (EveryTime(300.0), Keep(last=4)) == (settings.policy, settings.keep)


@pytest.mark.parametrize("text", ["- a\n- b\n", "checkpoint: [unclosed", ""])
def test_a_settings_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    """Broken or empty files are the user's to mend, and are named."""
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match="settings file"):
        resolve(file=path, environ={})


def test_a_missing_settings_file_is_named(tmp_path: Path) -> None:
    """A path that is not there is an error."""
    with pytest.raises(SpecError, match=r"nowhere\.yaml"):
        resolve(file=tmp_path / "nowhere.yaml", environ={})


# ── memory and tiers ──────────────────────────────────────────────────────────────────────
def test_the_memory_of_snapshots_is_a_size() -> None:
    """From any source; nothing said is no limit of ours."""
    assert resolve(environ={}).memory is None
    assert 8 * 1024**3 == resolve(file={"checkpoint": {"memory": "8G"}}, environ={}).memory
    environ = {"HPC_CKPT__CHECKPOINT__MEMORY": "1.5 GiB"}
    assert 3 * 1024**3 // 2 == resolve(environ=environ).memory


@pytest.mark.parametrize("memory", ["8", 0, "much", [1]])
def test_a_memory_that_cannot_be_meant_is_refused(memory: object) -> None:
    """A bare 8 is not eight bytes."""
    with pytest.raises(SpecError, match=r"^checkpoint\.memory: .*(less than 1 MiB|not a size)"):
        resolve(file={"checkpoint": {"memory": memory}}, environ={})


STORAGE = {"local": {"path": "${TMPDIR:-/tmp}/x", "survives": "process", "quota": "5G"}}


def wishes(value: object, **environ: str) -> list[tuple[str, str | None]]:
    file = {"storage": STORAGE, "tiers": value}
    tiers = resolve(file=file, environ=environ).tiers
    return [(wish.name, wish.path and str(wish.path)) for wish in tiers]


def test_without_tiers_there_is_the_run_directory_alone() -> None:
    """Nothing said, and an empty list, are the same."""
    assert (TierWish("root"),) == resolve(environ={}).tiers
    assert [("root", None)] == wishes([])


def test_names_and_directories_become_places_and_the_home_is_last() -> None:
    """Variables are those of the node; a directory is known by its slash."""
    cwd = str(Path.cwd())
    expected = [("local", "/tmp/x"), ("a/b", f"{cwd}/a/b"), ("~/c", "/home/u/c"), ("root", None)]
    assert expected == wishes(["local", "a/b", "~/c"], HOME="/home/u")
    assert [("local", "/job/x"), ("root", None)] == wishes("local", TMPDIR="/job")
    assert [("root", None), ("/x/$", "/x/$")] == wishes("root, /x/$")


def test_what_the_site_says_of_a_storage_arrives() -> None:
    """How much it survives, and how much one user may have there."""
    wish = resolve(file={"storage": STORAGE, "tiers": "local"}, environ={}).tiers[0]
    assert (Survives.PROCESS, 5 * 1024**3) == (wish.survives, wish.quota)


def test_tiers_of_the_environment_beat_the_call_and_the_file() -> None:
    """Lists are replaced whole; the variable may be JSON, for names with commas in them."""
    file, call = {"tiers": ["/file/"]}, {"tiers": [Path("call")]}
    named = [tier.name for tier in resolve(call=call, file=file, environ={}).tiers]
    assert ["./call", "root"] == named
    for text in ("/a/,root", '["/a/", "root"]'):
        environ = {"HPC_CKPT__TIERS": text}
        tiers = resolve(call=call, file=file, environ=environ).tiers
        assert ["/a/", "root"] == [tier.name for tier in tiers]


@pytest.mark.parametrize(
    ("tiers", "complaint"),
    [
        (["locl"], r"tiers: no storage is named 'locl'\. Did you mean 'local'\?"),
        (["far"], r"Known: local, root\. A directory is written with a slash: '\./far'"),
        (["$TMPDIR"], r"'\$TMPDIR' is no name, .* slash: '\$TMPDIR/'"),
        (["local", "local"], "'local' is named twice"),
        (["$SCRATCH/x"], r"tiers: \$SCRATCH is not set on this node; .* \$\{SCRATCH:-/tmp\}"),
        (["~bob/x"], "another user's home is written out"),
        ([7], "7 is neither a name nor a directory"),
        ({"a": 1}, "write a list"),
        ("[a", "is not a list"),
    ],
)
def test_tiers_that_cannot_be_are_refused_by_name(tiers: object, complaint: str) -> None:
    """Before anything is opened, with what to write instead."""
    with pytest.raises(SpecError, match=complaint):
        wishes(tiers)


def test_a_mistake_in_a_tier_is_blamed_on_who_said_it() -> None:
    """The environment, the call or the file."""
    with pytest.raises(SpecError, match=r"^environment variable HPC_CKPT__TIERS: no storage"):
        resolve(environ={"HPC_CKPT__TIERS": "zzz"})
    with pytest.raises(SpecError, match=r"^Checkpointer\(tiers=…\): no storage"):
        resolve(call={"tiers": ["zzz"]}, environ={})


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"survives": "node"}, r"storage\.x: write"),
        ({"path": "$A/b", "survives": "node"}, r"storage\.x\.path: '\$A/b' is 'rel/b' here"),
        ({"path": "/a", "survives": "all"}, r"x\.survives: must be process or node, not 'all'"),
        ({"path": "/a"}, r"survives: must be process or node, not None"),
        ({"path": "/a", "survives": "node", "quota": 0}, r"storage\.x\.quota: must be more than"),
        ({"path": "/a", "survives": "node", "speed": 1}, "unknown key 'speed'. Known: path"),
    ],
)  # fmt: skip
def test_a_storage_of_a_settings_file_is_checked_too(record: object, complaint: str) -> None:
    """A user's own file has not been through the profile's schema."""
    file = {"storage": {"x": record}, "tiers": ["x"]}
    with pytest.raises(SpecError, match=complaint):
        resolve(file=file, environ={"A": "rel"})


def test_a_storage_nobody_names_may_need_what_this_node_lacks() -> None:
    """Only what is used is expanded."""
    file = {"storage": {"x": {"path": "$NOWHERE", "survives": "node"}}, "tiers": ["root"]}
    assert (TierWish("root"),) == resolve(file=file, environ={}).tiers


# ── pieces ────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["USR1", "usr1", "SIGUSR1"])
def test_a_signal_is_named_with_or_without_sig(name: str) -> None:
    """Profiles write USR1; people write SIGUSR1."""
    assert signal.SIGUSR1 == parse_signal(name)


def test_a_signal_nobody_knows_is_refused() -> None:
    """A typing error in the profile is found, not ignored."""
    with pytest.raises(SpecError, match="'USR9' is not a signal"):
        parse_signal("USR9")


def test_an_environment_value_and_section_of_one_name_collide() -> None:
    """A__B and A__B__C cannot both be set."""
    with pytest.raises(SpecError, match="its parent is set as a value too"):
        environment_overlay({"HPC_CKPT__A": "1", "HPC_CKPT__A__B": "2"})


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers() | st.just({"x": 1}) | st.just({"y": 2}))
)
def test_merging_over_nothing_or_with_nothing_changes_nothing(layer: dict[str, object]) -> None:
    """The empty layer is neutral, and a layer over itself is itself."""
    assert layer == merge({}, layer) == merge(layer, {}) == merge(layer, layer)
