"""Which value wins, where it came from, and what is said of a file that is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt.chain.layers import Loaded, Option, Places, load
from hpc_ckpt.errors import SpecError

Load = Callable[..., Loaded]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    for folder in ("packaged", "site/clusters", "user/clusters", "work"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "packaged" / "local.yaml").write_text("cluster: local\nbackend: local\n")
    (tmp_path / "packaged" / "lab.yaml").write_text(
        "cluster: lab\npartitions: {GPU: {max_time: 8h}}\nsignal: {lead: 100s}\n"
    )
    return Places(
        packaged=tmp_path / "packaged",
        site=tmp_path / "site",
        user=tmp_path / "user",
        project=tmp_path / "work" / "hpc_ckpt.yaml",
    )


@pytest.fixture
def work(places: Places) -> Path:
    return places.project.parent


@pytest.fixture
def load_here(places: Places, work: Path) -> Load:
    def call(given: Any = None, *, environ: Mapping[str, str] = {}, **rest: Any) -> Loaded:
        return load(given, cwd=work, environ={"HOME": "/home/u", **environ}, places=places, **rest)

    return call


def complaint(load_here: Load, work: Path, text: str | bytes, **rest: Any) -> str:
    """What is said of train.yaml with this text."""
    (work / "train.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SpecError) as caught:
        load_here("train.yaml", **rest)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def origin(rows: list[Any], key: str) -> tuple[str, str]:
    return next((row.value, row.origin) for row in rows if row.key == key)


# ── who wins ──────────────────────────────────────────────────────────────────────────────
def test_each_layer_wins_over_the_one_before(load_here: Load, places: Places, work: Path) -> None:
    """default < /etc < user < project < given file < environment < command line."""
    assert places.user is not None
    seen = [load_here({"command": "x"}).spec.resources.cpus]
    (places.site / "spec.yaml").write_text("command: x\nresources: {cpus: 2}\n")
    seen.append(load_here().spec.resources.cpus)
    (places.user / "spec.yaml").write_text("resources: {cpus: 3}\n")
    seen.append(load_here().spec.resources.cpus)
    places.project.write_text("resources: {cpus: 4}\n")
    seen.append(load_here().spec.resources.cpus)
    (work / "train.yaml").write_text("resources: {cpus: 5}\n")
    seen.append(load_here("train.yaml").spec.resources.cpus)
    environ = {"HPC_CKPT__RESOURCES__CPUS": "6"}
    seen.append(load_here("train.yaml", environ=environ).spec.resources.cpus)
    options = [Option("--cpus", "resources.cpus", 7)]
    seen.append(load_here("train.yaml", environ=environ, options=options).spec.resources.cpus)
    assert [1, 2, 3, 4, 5, 6, 7] == seen


def test_mappings_are_merged_and_lists_replaced(load_here: Load, places: Places) -> None:
    """A site that sets the memory does not take the GPUs away; a list is one value."""
    (places.site / "spec.yaml").write_text("resources: {memory: 8G}\npartition: [a, b]\n")
    places.project.write_text("command: x\nresources: {gpus: 2}\npartition: [c]\n")
    spec = load_here().spec
    assert ("8G", 2, ("c",)) == (spec.resources.memory, spec.resources.gpus, spec.partition)


def test_a_key_without_value_means_the_default(load_here: Load, places: Places) -> None:
    """`account:` undoes what a lower layer said; an empty section undoes nothing."""
    (places.site / "spec.yaml").write_text("account: everyone\nresources: {cpus: 4}\n")
    places.project.write_text("command: x\naccount:\nresources:\n")
    spec = load_here().spec
    assert (None, 4) == (spec.account, spec.resources.cpus)


def test_every_value_knows_its_origin(load_here: Load, places: Places, work: Path) -> None:
    """`config show --origin` names the line, the variable, the option, or says default."""
    (places.site / "spec.yaml").write_text("# site\naccount: everyone\n")
    (work / "train.yaml").write_text("command: x\nchain:\n  link_time: 1:30:00\n")
    loaded = load_here(
        "train.yaml",
        environ={"HPC_CKPT__CHAIN__MAX_LINKS": "5", "HPC_CKPT__SIGNAL__LEAD": "99s"},
        options=[Option("--name", "name", "mine"), Option("--qos", "qos", None)],
        profile="lab",
    )
    rows = loaded.spec_rows()
    assert ("everyone", f"{places.site}/spec.yaml:2") == origin(rows, "account")
    assert ("1:30:00", "train.yaml:3") == origin(rows, "chain.link_time")
    assert ("5", "environment variable HPC_CKPT__CHAIN__MAX_LINKS") == origin(
        rows, "chain.max_links"
    )
    assert ("mine", "--name") == origin(rows, "name")
    assert ("-", "default") == origin(rows, "qos")
    profile = loaded.profile_rows()
    assert ("8h", f"{places.packaged}/lab.yaml:2") == origin(profile, "partitions.GPU.max_time")
    assert ("99s", "environment variable HPC_CKPT__SIGNAL__LEAD") == origin(profile, "signal.lead")


def test_a_short_form_is_the_origin_of_what_it_stands_for(load_here: Load, work: Path) -> None:
    """`keep: 5` is where keep.last came from."""
    (work / "train.yaml").write_text("command: x\ncheckpoint: {keep: 5}\n")
    rows = load_here("train.yaml").spec_rows()
    assert ("5", "train.yaml:2") == origin(rows, "checkpoint.keep.last")


# ── profiles ──────────────────────────────────────────────────────────────────────────────
def test_a_profile_by_name_is_laid_together(load_here: Load, places: Places) -> None:
    """packaged < /etc < user: a user adds one partition without copying the file."""
    assert places.user is not None
    (places.site / "clusters" / "lab.yaml").write_text("signal: {lead: 200s}\n")
    (places.user / "clusters" / "lab.yaml").write_text("partitions: {mine: {max_time: 1h}}\n")
    profile = load_here({"command": "x"}, profile="lab").profile
    assert (["GPU", "mine"], "200s") == (list(profile.partitions), profile.signal.lead)


def test_a_profile_by_path_replaces_the_lookup(load_here: Load, work: Path) -> None:
    """./lab.yaml is the whole profile; it is called after its file unless it says otherwise."""
    (work / "lab.yaml").write_text("signal: {lead: 7s}\n")
    profile = load_here({"command": "x"}, profile="./lab.yaml").profile
    assert ("lab", {}, "7s") == (profile.cluster, profile.partitions, profile.signal.lead)


def test_the_profile_is_chosen_by_option_variable_live_cluster_then_local(
    load_here: Load,
) -> None:
    """The order of design: --profile, $HPC_CKPT_PROFILE, ClusterName, local."""
    environ = {"HPC_CKPT_PROFILE": "lab"}
    chosen = [
        load_here({"command": "x"}, profile="local", environ=environ, live_cluster="other"),
        load_here({"command": "x"}, environ=environ, live_cluster="other"),
        load_here({"command": "x"}, live_cluster="other"),
        load_here({"command": "x"}),
    ]
    assert ["local", "lab", "other", "local"] == [loaded.profile.cluster for loaded in chosen]
    assert ["local", "slurm", "slurm", "local"] == [c.profile.backend.value for c in chosen]


def test_a_live_cluster_called_local_still_has_a_slurm(load_here: Load) -> None:
    """The packaged 'local' is this machine without Slurm, not a cluster of that name."""
    assert "slurm" == load_here({"command": "x"}, live_cluster="local").profile.backend.value


def test_an_unknown_profile_lists_the_known_ones(load_here: Load) -> None:
    """Asked for by name it must exist; only a live cluster may be unknown."""
    with pytest.raises(SpecError, match=r"no profile is named 'labb'; known: lab, local"):
        load_here({"command": "x"}, profile="labb")


def test_without_a_home_the_user_layer_is_passed_over(tmp_path: Path) -> None:
    """A service account may have neither HOME nor XDG_CONFIG_HOME."""
    assert Places.usual(tmp_path, {}).user is None
    assert Path("/x/hpc_ckpt") == Places.usual(tmp_path, {"XDG_CONFIG_HOME": "/x"}).user
    assert Path("/h/.config/hpc_ckpt") == Places.usual(tmp_path, {"HOME": "/h"}).user


# ── environment ───────────────────────────────────────────────────────────────────────────
def test_a_variable_goes_to_the_spec_else_to_the_profile(load_here: Load) -> None:
    """Both files have a `chain` section; the key decides which is meant."""
    loaded = load_here(
        {"command": "x"},
        environ={"HPC_CKPT__CHAIN__MAX_LINKS": "5", "HPC_CKPT__CHAIN__REQUEUE": "no"},
    )
    assert (5, False) == (loaded.spec.chain.max_links, loaded.profile.chain.requeue)


def test_a_variable_finds_a_partition_whatever_its_case(load_here: Load) -> None:
    """Variables are upper case, partitions are called as the site likes."""
    environ = {"HPC_CKPT__PARTITIONS__GPU__MAX_TIME": "2h"}
    partitions = load_here({"command": "x"}, profile="lab", environ=environ).profile.partitions
    assert {"GPU": "2h"} == {name: item.max_time for name, item in partitions.items()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "HPC_CKPT__CHAIN__MAX_LINK",
            "chain.max_link: unknown key. Did you mean 'chain.max_links'?",
        ),
        ("HPC_CKPT__SIGNAL__LEED", "signal.leed: unknown key. Did you mean 'signal.lead'?"),
        ("HPC_CKPT__NAME__X", "name.x: unknown key. Did you mean 'name'?"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_nearest_key(
    load_here: Load, name: str, expected: str
) -> None:
    """A variable that would have no effect is an error, not ignored."""
    with pytest.raises(SpecError) as caught:
        load_here({"command": "x"}, environ={name: "5"})
    assert f"environment variable {name}: {expected}" == str(caught.value)


def test_a_variable_for_a_section_and_one_inside_it_contradict(load_here: Load) -> None:
    """Which of the two wins would depend on their order; say so instead."""
    environ = {"HPC_CKPT__CHECKPOINT__KEEP": "3", "HPC_CKPT__CHECKPOINT__KEEP__LAST": "4"}
    with pytest.raises(SpecError, match="HPC_CKPT__CHECKPOINT__KEEP__LAST is set too"):
        load_here({"command": "x"}, environ=environ)


def test_a_bad_value_in_a_variable_is_blamed_on_it(load_here: Load) -> None:
    """The message starts with what the user has to change."""
    with pytest.raises(SpecError) as caught:
        load_here({"command": "x"}, environ={"HPC_CKPT__CHAIN__MAX_LINKS": "many"})
    expected = (
        "environment variable HPC_CKPT__CHAIN__MAX_LINKS: chain.max_links: "
        "must be a whole number, not 'many'"
    )
    assert expected == str(caught.value)


# ── files that are wrong ──────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("command: x\nchain:\n  max_link: 4\n",
         "train.yaml:3: chain.max_link: unknown key. Did you mean 'max_links'?"),
        ("command: x\nlink_time: 8h\n",
         "train.yaml:2: link_time: unknown key. Did you mean 'chain.link_time'?"),
        ("command: x\nchain: {zzz: 1}\n",
         "train.yaml:2: chain.zzz: unknown key. Known: strategy, total_time, link_time, min_time, "
         "max_links, max_hours, max_gpu_hours, max_restarts, retries, on_preemption, "
         "on_node_failure, on_out_of_memory, on_crash, on_cancel."),
        ("comand: x\n",
         "train.yaml:1: comand: unknown key. Did you mean 'command'? (and 1 more)"),
        ("name: a\n",
         "train.yaml: command: missing; write it in a spec, or after '--' on the command line"),
        ("command: x\ntiers: [a, b, a]\n",
         "train.yaml:2: tiers: 'a' is named twice; name it once"),
        ("command: x\ntiers: {a: b}\n",
         "train.yaml:2: tiers: must be text, not a mapping"),
        ("command: x\ncheckpoint:\n  memory: 8\n",
         "train.yaml:3: checkpoint.memory: '8' is less than 1 MiB; say the unit: 512M, 8G"),
        ("command: x\ncheckpoint:\n  overhead: 3.5%\n",
         "train.yaml:3: checkpoint.overhead: not available in this version; remove it"),
        ("command: x\nmembers: {lr: []}\n",
         "train.yaml:2: members: lr: no values"),
        ("command: x\nmembers: [{lr: 1}, {lr: 1}]\n",
         "train.yaml:2: members: two members are called 'lr-1'"),
        ("command: x\nchain:\n  on_crash: ignore\n",
         "train.yaml:3: chain.on_crash: must be 'continue', 'retry' or 'halt', not 'ignore'"),
        ("command: x\nforward: {signal: KILL}\n",
         "train.yaml:2: forward.signal: 'KILL' cannot be caught; write USR1, USR2, TERM or INT"),
        ("command: x\nresources:\n  cpus: 0\n",
         "train.yaml:3: resources.cpus: must be at least 1, not 0"),
        ("command: x\nchain: 5\n",
         "train.yaml:2: chain: must be a mapping of 'key: value'"),
        ("command: x\nchain: {max_links: 4.5}\n",
         "train.yaml:2: chain.max_links: must be a whole number, not '4.5'"),
        ("command: x\nchain: {max_links: 4000}\n",
         "train.yaml:2: chain.max_links: must be at most 1000, not 4000"),
        ("command: x\nchain:\n  max_links: 1\n\nchain:\n  max_links: 2\n",
         "train.yaml:5: chain: written before, in line 2"),
        ("command: x\ncheckpoint:\n  keep:\n    best: {mode: min}\n",
         "train.yaml:4: checkpoint.keep.best.metric: missing"),
        ("command: x\npartition:\n  - gpu\n  - {a: b}\n",
         "train.yaml:2: partition: must be text, not a mapping"),
        ("command: x\n<<: {a: b}\n",
         "train.yaml:2: merge keys (<<) are not available; write the keys out"),
        ("command: !!python/name:os.system x\n",
         "train.yaml:1: the tag 'tag:yaml.org,2002:python/name:os.system' has no meaning here"),
        ("command: &a [x, *a]\n",
         "train.yaml:1: aliases that refer to themselves, or to too much"),
        ("? [a]\n: b\n", "train.yaml:1: a key must be a word"),
        ("", "train.yaml:1: the file is empty; write at least 'command: …'"),
        ("# only\n", "train.yaml:1: the file is empty; write at least 'command: …'"),
        ("\n- a\n", "train.yaml:2: must be lines of 'key: value' at the top"),
        ("just words\n", "train.yaml:1: must be lines of 'key: value' at the top"),
        ("command: [x\nname: y\n",
         "train.yaml:2: not YAML: expected ',' or ']', but got ':'"),
        ("a: b: c\n", "train.yaml:1: not YAML: mapping values are not allowed here"),
        ("a: b\n---\nc: d\n", "train.yaml:2: not YAML: but found another document"),
        ("a: b\nc: \x00\n", "train.yaml:2: not YAML: special characters are not allowed"),
        (b"a: b\nc: \xff\n", "train.yaml:2: not UTF-8 text"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_one_line_with_file_and_line(
    load_here: Load, work: Path, text: str | bytes, expected: str
) -> None:
    """file:line: key: what is wrong, and what would be right."""
    assert expected == complaint(load_here, work, text)


def test_what_is_missing_is_blamed_on_the_file_and_not_on_a_variable(
    load_here: Load, work: Path
) -> None:
    """A variable that sets something else has nothing to do with it; no file, no blame."""
    environ = {"HPC_CKPT__CHAIN__MAX_LINKS": "5"}
    said = complaint(load_here, work, "name: a\n", environ=environ)
    assert said.startswith("train.yaml: command: missing; ")
    with pytest.raises(SpecError, match=r"^command: missing; write it in a spec, or after '--'"):
        load_here()


def test_several_mistakes_are_counted(load_here: Load, work: Path) -> None:
    """The first is said, the others are announced."""
    text = "command: x\nresources: {cpus: 0, nodes: 2}\nlevel: nonsense\n"
    assert complaint(load_here, work, text).endswith(" (and 2 more)")


def test_deep_nesting_and_exploding_aliases_are_refused(load_here: Load, work: Path) -> None:
    """A hostile file costs a message, not the memory of the login node."""
    assert "nested too deeply" in complaint(load_here, work, "a: " + "[" * 1000)
    laughs = "".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]\n" for i in range(1, 9))
    assert "refer to themselves" in complaint(load_here, work, "k0: &k0 [x]\n" + laughs)
    assert "larger than 1 MiB" in complaint(load_here, work, "#" * (1 << 20) + "\n")


def test_a_missing_file_and_a_directory_are_said(load_here: Load, work: Path) -> None:
    """The operating system's words, after the name the user wrote."""
    with pytest.raises(SpecError, match=r"^nothing\.yaml: No such file or directory$"):
        load_here("nothing.yaml")
    (work / "folder").mkdir()
    with pytest.raises(SpecError, match=r"^folder: Is a directory$"):
        load_here("folder")


def test_a_site_file_that_cannot_be_read_is_not_passed_over(
    load_here: Load, places: Places
) -> None:
    """Only a file that is not there is no layer."""
    (places.site / "spec.yaml").symlink_to("nowhere")
    with pytest.raises(SpecError, match=r"site/spec\.yaml: No such file"):
        load_here({"command": "x"})


def test_a_mistake_in_a_profile_names_the_profile(load_here: Load, places: Places) -> None:
    """The administrator's file is blamed, not the user's."""
    (places.site / "clusters" / "lab.yaml").write_text("failures:\n  mtbf: often\n")
    with pytest.raises(SpecError) as caught:
        load_here({"command": "x"}, profile="lab")
    assert str(caught.value).startswith(f"{places.site}/clusters/lab.yaml:2: failures.mtbf: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("storage:\n  local: {path: /tmp}\n", "2: storage.local.survives: missing"),
        ("storage:\n  local: {path: /tmp, survives: fire}\n",
         "2: storage.local.survives: must be 'process' or 'node', not 'fire'"),
        ("storage:\n  local: {path: tmp, survives: node}\n",
         "2: storage.local.path: 'tmp' must be absolute, or begin with a variable such as $TMPDIR"),
        ("storage:\n  local: {path: /tmp, survives: node, quota: much}\n",
         "2: storage.local.quota: 'much' is not a size; write 512M, 32G or 1T"),
        ("storage:\n  local: {path: /tmp, survives: node, speed: 9}\n",
         "2: storage.local.speed: unknown key. Known: path, survives, quota, purge."),
        ("storage:\n  root: {path: /tmp, survives: node}\n",
         "2: storage.root: 'root' is the run directory's own tier; choose another name"),
    ],
)  # fmt: skip
def test_a_storage_that_cannot_be_used_is_named_by_its_line(
    load_here: Load, places: Places, text: str, expected: str
) -> None:
    """At submission, and not on the first node."""
    path = places.site / "clusters" / "lab.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_here({"command": "x"}, profile="lab")
    assert f"{path}:{expected}" == str(caught.value)


def test_a_storage_is_set_from_the_environment_in_its_own_spelling(
    load_here: Load, places: Places
) -> None:
    """Variables are upper case, names need not be."""
    (places.site / "clusters" / "lab.yaml").write_text(
        "storage:\n  Local: {path: $TMPDIR, survives: process}\n"
    )
    environ = {"HPC_CKPT__STORAGE__LOCAL__PATH": "/fast"}
    storage = load_here({"command": "x"}, profile="lab", environ=environ).profile.storage
    assert {"Local": "/fast"} == {name: one.path for name, one in storage.items()}


def test_relative_directories_of_tiers_are_those_of_the_submission(
    load_here: Load, work: Path
) -> None:
    """What only the node can expand is left to it."""
    (work / "train.yaml").write_text("command: x\ntiers: [fast/x, /abs, $TMPDIR/y, ~/z, local]\n")
    expected = (f"{work}/fast/x", "/abs", "$TMPDIR/y", "~/z", "local")
    assert expected == load_here("train.yaml").spec.tiers


# ── text stays text ───────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "text", ["1:30:00", "08:00:00", "8h", "72h", "5400", "1-12", "90 min", "1_0h"]
)
def test_durations_are_loaded_as_written(load_here: Load, work: Path, text: str) -> None:
    """YAML 1.1 would read 1:30:00 as 5400 and 08:00:00 as text."""
    (work / "train.yaml").write_text(f"command: x\nchain: {{total_time: {text}}}\n")
    if "_" in text:
        with pytest.raises(SpecError, match="is not a duration"):
            load_here("train.yaml")
    else:
        assert text == load_here("train.yaml").spec.chain.total_time


def test_words_that_yaml_would_turn_into_something_else_stay(load_here: Load, work: Path) -> None:
    """no, 1e3, 0o17 and dates are words of a command like any other."""
    (work / "train.yaml").write_text("command: [run, no, 1e3, 010, 2024-01-01, ~x, 'null', 1:30]\n")
    expected = ("run", "no", "1e3", "010", "2024-01-01", "~x", "null", "1:30")
    assert expected == load_here("train.yaml").spec.command


def test_a_byte_order_mark_is_passed_over(load_here: Load, work: Path) -> None:
    """Editors of another system write one."""
    (work / "train.yaml").write_bytes(b"\xef\xbb\xbfcommand: x\r\nname: y\r\n")
    assert "y" == load_here("train.yaml").spec.name


def test_a_command_of_the_command_line_keeps_bytes_that_are_not_utf8(load_here: Load) -> None:
    """File names are bytes; Python hands them over as surrogates."""
    word = os.fsdecode(b"caf\xe9.py")
    options = [Option("command line", "command", ["python", word])]
    assert ("python", word) == load_here(options=options).spec.command


def test_what_is_set_for_sbatch_is_a_default_that_says_where_it_comes_from(
    load_here: Load,
) -> None:
    """Below every file: the spec's own word counts more. Inside a job it is that job's."""
    environ = {"SBATCH_ACCOUNT": "lab", "SBATCH_PARTITION": "low", "SBATCH_TIMELIMIT": "1"}
    loaded = load_here({"command": "x", "partition": "gpu"}, environ=environ)
    assert ("lab", ("gpu",)) == (loaded.spec.account, loaded.spec.partition)
    origins = {row.key: row.origin for row in loaded.spec_rows()}
    assert "environment variable SBATCH_ACCOUNT" == origins["account"]
    inside = load_here({"command": "x"}, environ={**environ, "SLURM_JOB_ID": "1"})
    assert inside.spec.account is None
