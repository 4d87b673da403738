"""The site's profile: what each key means and what is refused; the profiles that are shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hpc_ckpt import resources
from hpc_ckpt.chain.layers import load
from hpc_ckpt.chain.profile import Backend, Profile


def profile(**keys: Any) -> Profile:
    return Profile.model_validate({"cluster": "lab", **keys})


def refusal(**keys: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        profile(**keys)
    return str(caught.value.errors()[0]["msg"]).removeprefix("Value error, ")


def test_a_name_is_enough() -> None:
    """A cluster nobody has described: Slurm's own defaults and a careful warning."""
    default = profile()
    assert (Backend.SLURM, {}, "USR1", "180s", "30s", True) == (
        default.backend,
        default.partitions,
        default.signal.name,
        default.signal.lead,
        default.kill_wait,
        default.chain.requeue,
    )


@pytest.mark.parametrize("written", ["USR2", "SIGUSR2", "usr2"])
def test_the_signal_is_written_as_people_do(written: str) -> None:
    """With or without SIG; one spelling inside."""
    assert "USR2" == profile(signal={"name": written}).signal.name


@pytest.mark.parametrize("name", ["TERM", "KILL", "INT", "NOPE", "CHLD"])
def test_only_the_user_signals_may_warn(name: str) -> None:
    """TERM always means the end; others are the shell's or the launcher's."""
    assert refusal(signal={"name": name}).endswith("write USR1 or USR2")


def test_a_lead_must_fit_slurms_counter() -> None:
    """--signal counts to 65535; zero is allowed."""
    assert "at most 65535 seconds" == refusal(signal={"lead": "1d"})
    assert "0s" == profile(signal={"lead": "0s"}).signal.lead


def test_a_partition_may_be_named_only() -> None:
    """`gpu:` with nothing after it: it exists, its limits are not known."""
    partition = profile(partitions={"gpu": None}).partitions["gpu"]
    assert (None, None, None) == (partition.max_time, partition.gpus, partition.preempt)


def test_no_gpus_differs_from_unknown_gpus() -> None:
    """An empty list is a statement."""
    assert () == profile(partitions={"cpu": {"gpus": []}}).partitions["cpu"].gpus


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"chain": {"strategy": "daisy"}},
         "Input should be 'array', 'requeue', 'afterany' or 'resubmit'"),
        ({"tools": {"dmtcp": {"module": "dmtcp", "path": "/opt/dmtcp"}}},
         "write either module or path"),
        ({"tools": {"dmtcp": {}}}, "write either module or path"),
        ({"directives": {"extra": ["constraint=ib"]}},
         "'constraint=ib' must begin with '--', as in --constraint=ib"),
        ({"directives": {"extra": ["--comment=a\nb"]}},
         "must be one line without control characters"),
        ({"directives": {"extra": ["--array=1-9"]}},
         "'--array=1-9': the chain itself sets --array"),
        ({"directives": {"extra": ["--arr=1-9"]}}, "'--arr=1-9': the chain itself sets --array"),
        ({"directives": {"extra": ["--comment=a -p gpu"]}},
         "'--comment=a -p gpu': say partition: gpu in the spec, so that its limits are kept"),
        ({"directives": {"extra": ["--comment=a --sig USR2@9"]}},
         "'--comment=a --sig USR2@9': the chain itself sets --signal"),
        ({"directives": {"extra": ["--comment=a -t5"]}},
         "'--comment=a -t5': the chain itself sets --time"),
        ({"directives": {"extra": ["--comment='a"]}}, "--comment='a:1: no closing ' in this line"),
        ({"directives": {"extra": ["--wait"]}},
         "'--wait': --wait: tells sbatch how to submit; hpc-ckpt submits"),
        ({"directives": {"extra": ["--test-only"]}},
         "'--test-only': --test-only: tells sbatch how to submit; hpc-ckpt submits"),
        ({"directives": {"extra": ["--cluster=other"]}},
         "'--cluster=other': --clusters: a chain lives on the cluster it is submitted on; "
         "log in there"),
        ({"directives": {"extra": ["--comment=a -M other"]}},
         "'--comment=a -M other': --clusters: a chain lives on the cluster it is submitted on; "
         "log in there"),
        ({"directives": {"extra": ["--comment=a -sW"]}},
         "'--comment=a -sW': --wait: tells sbatch how to submit; hpc-ckpt submits"),
        ({"directives": {"extra": ["--wrap=x"]}},
         "'--wrap=x': --wrap: not in a script: hpc-ckpt submit -- COMMAND does the same"),
        ({"directives": {"extra": ["--err=/x"]}},
         "'--err=/x': --error: what the program prints goes to logs/ in the run directory: "
         "hpc-ckpt logs"),
        ({"directives": {"skip": ["--signal"]}},
         "'--signal' cannot be left out: the chain depends on it"),
        ({"environment": {"modules": ["a; rm -rf x"]}}, "'a; rm -rf x' must be one word"),
    ],
)  # fmt: skip
def test_what_would_break_a_chain_is_refused(keys: dict[str, Any], expected: str) -> None:
    """The administrator hears of it, not every user."""
    assert expected == refusal(**keys)


def test_a_directive_that_is_never_written_cannot_be_skipped() -> None:
    """A misspelt entry would silently skip nothing."""
    assert refusal(directives={"skip": ["--memory"]}).startswith("'--memory' is never written")


def test_storage_is_kept_as_it_was_written() -> None:
    """Paths get their values on the node, sizes stay text."""
    local = {"path": "$TMPDIR", "survives": "process"}
    shared = {"path": "/scratch/$USER/x", "survives": "node", "quota": "1T", "purge": "30d"}
    dumped = profile(storage={"local": local, "shared": shared}).model_dump(mode="json")
    assert {"local": {**local, "quota": None, "purge": None}, "shared": shared} == dumped["storage"]


@pytest.mark.parametrize("name", ["root", "a/b", "$x", "a b", "a,b", "-x"])
def test_a_storage_must_have_a_name_that_a_spec_can_say(name: str) -> None:
    """No slash, no comma, and not the run directory's own."""
    assert repr(name) in refusal(storage={name: {"path": "/x", "survives": "node"}})


@pytest.mark.parametrize("quota", ["0", "0G", "-1G", "lots"])
def test_a_quota_is_a_size_of_more_than_nothing(quota: str) -> None:
    """One of nothing would refuse every checkpoint."""
    storage = {"local": {"path": "/x", "survives": "node", "quota": quota}}
    assert refusal(storage=storage).startswith(("must be more than nothing", f"{quota!r} is not"))


@pytest.mark.parametrize("path", sorted(resources.folder("clusters").glob("*.yaml")), ids=str)
def test_shipped_profiles_are_valid(path: Path, tmp_path: Path) -> None:
    """Each is read by its name, and is about the cluster it is named after."""
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    loaded = load({"command": "x"}, profile=path.stem, cwd=tmp_path, environ=environ)
    assert path.stem == loaded.profile.cluster


def test_the_shipped_local_profile_has_no_slurm(tmp_path: Path) -> None:
    """And needs no lead: the runner ends a link to the second."""
    loaded = load({"command": "x"}, cwd=tmp_path, environ={"XDG_CONFIG_HOME": str(tmp_path)})
    assert (Backend.LOCAL, "0s") == (loaded.profile.backend, loaded.profile.signal.lead)


def shipped(name: str, folder: Path) -> Profile:
    environ = {"XDG_CONFIG_HOME": str(folder)}
    return load({"command": "x"}, profile=name, cwd=folder, environ=environ).profile


def test_the_shipped_examples_say_what_they_are_for(tmp_path: Path) -> None:
    """Kill and requeue without a notice beside grace without requeue; a preemptible QoS."""
    mila = shipped("mila-like", tmp_path).partitions
    modes = {name: one.preempt for name, one in mila.items() if one.preempt is not None}
    assert {
        "main": ("requeue", "0s"), "long": ("requeue", "0s"),
        "main-grace": ("cancel", "120s"), "long-grace": ("cancel", "120s"),
    } == {name: (one.mode.value, one.grace) for name, one in modes.items()}  # fmt: skip
    nersc = shipped("nersc-like", tmp_path)
    assert (("--qos=preempt",), "300s", None) == (
        nersc.directives.extra, nersc.signal.lead, nersc.limits.max_submit,
    )  # fmt: skip
    explorer = shipped("explorer", tmp_path)
    assert ("8h", {}) == (explorer.partitions["gpu"].max_time, explorer.storage)


@pytest.mark.parametrize("name", ["mila-like", "nersc-like"])
def test_examples_are_marked_as_examples(name: str) -> None:
    """Nobody shall take them for a description of a real cluster."""
    text = resources.find(f"clusters/{name}.yaml").read_text()
    assert text.startswith("# AN EXAMPLE, not a description of a real system")
