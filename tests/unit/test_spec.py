"""The user's spec: what each key means and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hpc_ckpt.chain.spec import Spec, job_name_of, locate
from hpc_ckpt.errors import SpecError


def spec(**keys: Any) -> Spec:
    return Spec.model_validate({"command": "python train.py", **keys})


def refusal(**keys: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        spec(**keys)
    return str(caught.value.errors()[0]["msg"])


def test_a_command_is_enough() -> None:
    """Everything else has a default; no GPU is taken that was not asked for."""
    default = spec()
    assert ("train", "runs/train", (), 1, 0, 1, None) == (
        default.name,
        default.root,
        default.partition,
        default.resources.nodes,
        default.resources.gpus,
        default.resources.cpus,
        default.resources.memory,
    )
    assert ("auto", 3, "auto") == (
        default.checkpoint.policy,
        default.checkpoint.keep.last,
        default.level,
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py --lr 0.1", "train"),
        (["python", "dir/my train.py"], "my-train"),
        ("OMP_NUM_THREADS=2 ./simulate --fast", "simulate"),
        ("cd x && Rscript fit.R", "fit"),
        ("torchrun --nproc-per-node 2 pretrain.py", "pretrain"),
        ("python -m my.package.train", "train"),
        ("python -c 'print(1)'", "python"),
        ("./日本語.sh", "日本語"),
        ("echo 'unbalanced", "chain"),
        (["../../!!"], "chain"),
        ("A=1", "chain"),
    ],
)
def test_a_chain_without_name_is_called_after_its_program(command: Any, expected: str) -> None:
    """The script's name says more than 'python'; the result is always a job name."""
    assert expected == job_name_of(command)
    assert expected == spec(command=command).name


def test_a_string_goes_through_bash_and_a_list_does_not() -> None:
    """The two forms of command."""
    piped = "a | b > 'c d'"
    assert ["bash", "-o", "pipefail", "-c", piped] == spec(command=piped).argv
    assert ["a", "|", "c d"] == spec(command=["a", "|", "c d"]).argv


@pytest.mark.parametrize("command", ["", "  ", [], [""], {"a": 1}, ["a", ["b"]], ["a", None], True])
def test_what_is_no_command_is_refused(command: Any) -> None:
    """A chain that could never start is refused at submission."""
    assert refusal(command=command).startswith("Value error, must ")


@pytest.mark.parametrize("bad", ["a\0b", "a\ud800b"])
def test_text_that_no_program_can_be_given_is_refused(bad: str) -> None:
    """NUL ends an argument; a lone surrogate has no bytes."""
    assert "contains a" in refusal(command=bad)
    assert "contains a" in refusal(root=bad)


@pytest.mark.parametrize("name", ["my run", "a/b", "a\nb", "", "-x", "x" * 65, 'q"', "a%b"])
def test_a_name_must_be_a_job_name(name: str) -> None:
    """It becomes a Slurm job name and a directory."""
    assert "Value error" in refusal(name=name)


def test_the_refusal_of_a_name_says_one_that_would_do() -> None:
    """What to do, not only what is wrong."""
    assert refusal(name="my run!").endswith("'my-run' would do")


@pytest.mark.parametrize(
    ("written", "expected"),
    [("0", 0), ("2", 2), (2, 2), ("a100:2", "a100:2"), ("a100", "a100:1"), ("v100-sxm2:0", 0)],
)
def test_gpus_are_a_number_with_or_without_type(written: Any, expected: int | str) -> None:
    """As Slurm writes it in --gres."""
    assert expected == spec(resources={"gpus": written}).resources.gpus


@pytest.mark.parametrize("bad", ["-1", "two:", "a100:x", "", "1.5", "a b", True, "2:a100"])
def test_what_is_no_number_of_gpus_is_refused(bad: Any) -> None:
    """Including what Slurm would read in another way."""
    assert "Value error" in refusal(resources={"gpus": bad})


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({"memory": "32000"}, "'32000' is less than 1 MiB; say the unit: 512M, 32G"),
        ({"memory": "lots"}, "'lots' is not a size; write 512M, 32G or 1T"),
        ({"nodes": 2}, "more than one node is not available in this version; write 1"),
    ],
)
def test_resources_that_cannot_be_meant_are_refused(
    resources: dict[str, Any], expected: str
) -> None:
    """A bare number of memory is megabytes to Slurm and bytes to us: neither is guessed."""
    assert f"Value error, {expected}" == refusal(resources=resources)


@pytest.mark.parametrize("time", ["0", "0s", "-5", "soon", "", True, [1]])
def test_times_must_be_durations_longer_than_nothing(time: Any) -> None:
    """For both times of a chain."""
    assert "Value error" in refusal(chain={"link_time": time})
    assert "Value error" in refusal(chain={"total_time": time})


def test_numbers_of_a_python_caller_are_taken_as_text() -> None:
    """submit({...}) need not quote what YAML would not quote."""
    chain = spec(chain={"total_time": 3600, "link_time": 90.5, "max_links": 3}).chain
    assert ("3600", "90.5", 3) == (chain.total_time, chain.link_time, chain.max_links)


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({"policy": "daly"}, "policy 'daly' is not available in this version; write "),
        ({"policy": "sometimes"}, "'sometimes' is not a policy; write 'every 500 steps'"),
        ({"policy": "every 0 steps"}, "must be at least 1, not 0"),
        ({"keep": {"best": {"metric": "a", "mode": "most"}}}, "must be max or min, not 'most'"),
    ],
)
def test_policy_and_keep_are_checked_at_submission(
    checkpoint: dict[str, Any], expected: str
) -> None:
    """By the same parsers as on the compute node, with no ': ' left in front."""
    assert refusal(checkpoint=checkpoint).startswith(f"Value error, {expected}")


def test_keep_has_short_forms() -> None:
    """`keep: 5` and `best: loss`, as the runtime takes them."""
    keep = spec(checkpoint={"keep": "5"}).checkpoint.keep
    assert (5, None, None) == (keep.last, keep.every, keep.best)
    best = spec(checkpoint={"keep": {"best": "loss"}}).checkpoint.keep.best
    assert best is not None
    assert ("loss", "max") == (best.metric, best.mode)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (["local", "shared"], ("local", "shared")),
        ("local, shared", ("local", "shared")),
        ("local", ("local",)),
        (["/a b/c, d", "root"], ("/a b/c, d", "root")),
        (None, ()),
        ([], ()),
    ],
)
def test_tiers_are_a_list_or_words_with_commas(written: Any, expected: tuple[str, ...]) -> None:
    """Whether the names are known is checked together with the profile."""
    assert expected == spec(tiers=written).tiers


@pytest.mark.parametrize("bad", [["a", "a"], [""], [["a"]], [True], "a\0b/", {"a": 1}, 5.5j])
def test_what_is_no_list_of_tiers_is_refused(bad: Any) -> None:
    """Twice the same would only be slower."""
    assert "Value error" in refusal(tiers=bad)


@pytest.mark.parametrize("memory", ["8G", "512M", 8589934592])
def test_the_memory_of_snapshots_is_a_size(memory: Any) -> None:
    """It stays the text it was written as."""
    assert str(memory) == spec(checkpoint={"memory": memory}).checkpoint.memory


@pytest.mark.parametrize("memory", ["0", "8", "much", True])
def test_a_memory_that_cannot_be_meant_is_refused(memory: Any) -> None:
    """Snapshots that may use nothing are no snapshots; a bare 8 is not bytes."""
    assert "Value error" in refusal(checkpoint={"memory": memory})


def test_a_level_that_does_not_exist_is_refused() -> None:
    """Never ignored."""
    assert "not a level" in refusal(level="magic")


def test_partitions_are_a_list_or_words_with_commas() -> None:
    """Slurm's own spelling is accepted."""
    assert ("gpu", "low") == spec(partition="gpu,low").partition
    assert ("gpu", "low") == spec(partition=["gpu", "low"]).partition
    assert "must be one word" in refusal(partition=["gpu low"])


def test_a_spec_cannot_be_changed() -> None:
    """What was checked is what is submitted."""
    with pytest.raises(ValidationError):
        spec().name = "other"


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        ("runs/a", "/project/runs/a"),
        ("/abs/b", "/abs/b"),
        ("../c", "/c"),
        ("~/d", "/home/u/d"),
        ("/scratch/$USER/e", "/scratch/me/e"),
        ("${USER}s/f", "/project/mes/f"),
        ("a b\n'\"$(x) `y` ~", "/project/a b\n'\"$(x) `y` ~"),
    ],
)
def test_a_root_is_that_of_the_submission(root: str, expected: str) -> None:
    """Every link must find the same place, so nothing is left to expand on a node."""
    environ = {"HOME": "/home/u", "USER": "me"}
    assert Path(expected) == locate(root, cwd=Path("/project"), environ=environ)


def test_a_variable_in_a_root_must_be_set() -> None:
    """A directory called '$SCRATCH' is never what was meant."""
    with pytest.raises(SpecError, match=r"\$SCRATCH is not set where the chain is submitted"):
        locate("$SCRATCH/x", cwd=Path("/project"), environ={})
