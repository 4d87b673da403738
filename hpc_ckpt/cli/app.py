"""The verbs. Each parses, calls one thing and prints; imports happen inside the verb."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from ..errors import SpecError
from . import adopting, cookbook, levels, runs, site
from .options import AsJson, ProfileName, Root, place_of, run_of
from .options import root_of as _root

if TYPE_CHECKING:
    from ..chain.layers import Loaded
    from ..chain.sweep import SweepStatus

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Makes a chain of short Slurm jobs behave as one long job that cannot be killed.",
)
config = typer.Typer(no_args_is_help=True, help="What is set, and where it was set.")
app.add_typer(config, name="config")
app.add_typer(site.profile_verbs, name="profile")
app.command("doctor")(site.doctor)
app.command("rehearse")(levels.rehearse)

SpecFile = Annotated[
    str | None, typer.Argument(metavar="SPEC", help="The YAML file; or a command after '--'.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any key, as --set chain.max_links=5."),
]
Long = Annotated[bool, typer.Option("--long", help="Versions, code, command, description.")]

_SHORT = {
    "--name": "name",
    "--root": "root",
    "--partition": "partition",
    "--link-time": "chain.link_time",
    "--total-time": "chain.total_time",
    "--max-links": "chain.max_links",
    "--gpus": "resources.gpus",
    "--cpus": "resources.cpus",
    "--memory": "resources.memory",
    "--policy": "checkpoint.policy",
}

_BY_COMMAND = ("name", "command", "root")
"""Without a command there is nothing to say of these."""


def _option(flag: str, text: str) -> Any:
    return typer.Option(flag, help=f"{text} [{_SHORT[flag]}].", show_default=False)


Name = Annotated[str | None, _option("--name", "Name of the chain")]
RootOption = Annotated[str | None, _option("--root", "Run directory")]
Partition = Annotated[str | None, _option("--partition", "Partition, or several by commas")]
LinkTime = Annotated[str | None, _option("--link-time", "How long one link may run")]
TotalTime = Annotated[str | None, _option("--total-time", "How long the work takes")]
MaxLinks = Annotated[str | None, _option("--max-links", "Budget of links")]
Gpus = Annotated[str | None, _option("--gpus", "GPUs, as 2 or a100:2")]
Cpus = Annotated[str | None, _option("--cpus", "CPU cores")]
Memory = Annotated[str | None, _option("--memory", "Memory, as 32G")]
Policy = Annotated[str | None, _option("--policy", "When to save, as 'every 10 min'")]


def _load(
    context: typer.Context, spec: str | None, profile: str | None, *, local: bool = False
) -> Loaded:
    """Spec, profile and options of this call, laid over each other."""
    from ..chain import slurm
    from ..chain.layers import ENV_PROFILE, Option, load

    command: list[str] = context.obj or []
    if (spec is None) == (not command):
        raise SpecError("give either a spec file or a command after '--', as in: "
                        "hpc-ckpt submit -- python train.py")  # fmt: skip
    values = context.params
    options = [
        Option(flag, key, values.get(flag.removeprefix("--").replace("-", "_")))
        for flag, key in _SHORT.items()
    ]
    options += [_assignment(Option, text) for text in values.get("assignments") or ()]
    if command:
        options.append(Option("command line", "command", command))
    named = profile or os.environ.get(ENV_PROFILE)
    if local:
        named = named or "local"
    return load(
        spec,
        options=options,
        profile=named,
        live_cluster=None if named else slurm.cluster_name(),
        cwd=Path.cwd(),
        environ=os.environ,
    )


def _assignment(option: Any, text: str) -> Any:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise SpecError(f"--set {text}: write KEY=VALUE, as --set chain.max_links=5")
    return option(f"--set {key}", key, value)


def _show_version(value: bool) -> None:
    if value:
        print(f"hpc-ckpt {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="And exit.")
    ] = False,
) -> None:
    """Verbs below; `hpc-ckpt VERB --help` says more."""


@app.command()
def submit(
    context: typer.Context,
    spec: SpecFile = None,
    profile: ProfileName = None,
    name: Name = None,
    root: RootOption = None,
    partition: Partition = None,
    link_time: LinkTime = None,
    total_time: TotalTime = None,
    max_links: MaxLinks = None,
    gpus: Gpus = None,
    cpus: Cpus = None,
    memory: Memory = None,
    policy: Policy = None,
    assignments: Assignments = None,
) -> None:
    """Submit a chain to the cluster: SPEC, or a command after '--'."""
    from ..chain.planning import make_plan
    from ..chain.submit import submit_loaded
    from ..chain.sweeping import submit_sweep
    from .printing import say_submitted

    loaded = _load(context, spec, profile)
    plan = make_plan(loaded, cwd=Path.cwd(), environ=os.environ, live=True)
    jobs = (
        [submit_sweep(loaded, plan, environ=os.environ)]
        if plan.members
        else submit_loaded(loaded, plan, environ=os.environ)
    )
    say_submitted(plan, jobs)


@app.command()
def run(
    context: typer.Context,
    spec: SpecFile = None,
    profile: ProfileName = None,
    name: Name = None,
    root: RootOption = None,
    link_time: LinkTime = None,
    total_time: TotalTime = None,
    max_links: MaxLinks = None,
    cpus: Cpus = None,
    policy: Policy = None,
    assignments: Assignments = None,
) -> None:
    """Run a chain on this machine, in the foreground: SPEC, or a command after '--'."""
    from ..chain.submit import prepare
    from .watching import run_chain

    loaded = _load(context, spec, profile, local=True)
    prepared = prepare(loaded, cwd=Path.cwd(), environ=os.environ)
    print("\n".join(prepared.plan.describe()))
    raise typer.Exit(run_chain(prepared, loaded.profile.kill_wait))


@app.command()
def render(
    context: typer.Context,
    spec: SpecFile = None,
    profile: ProfileName = None,
    name: Name = None,
    root: RootOption = None,
    partition: Partition = None,
    link_time: LinkTime = None,
    total_time: TotalTime = None,
    max_links: MaxLinks = None,
    gpus: Gpus = None,
    cpus: Cpus = None,
    memory: Memory = None,
    policy: Policy = None,
    assignments: Assignments = None,
) -> None:
    """Print the batch script that submit would use; nothing is made."""
    from ..chain.submit import render_loaded

    loaded = _load(context, spec, profile)
    script = render_loaded(loaded, cwd=Path.cwd(), environ=os.environ)
    sys.stdout.buffer.write(os.fsencode(script))


@app.command()
def status(root: Root = None, as_json: AsJson = False) -> None:
    """Where a chain stands, link by link. Reads files; one squeue, unless the chain is over."""
    from ..chain.ledger import read_status
    from ..chain.stuck import with_stuck_jobs, with_stuck_members
    from ..chain.sweep import is_sweep, sweep_status

    if is_sweep(_root(root)):
        _show_sweep(with_stuck_members(sweep_status(_root(root))), as_json=as_json)
        return
    found = with_stuck_jobs(read_status(run_of(root)))
    if as_json:
        print(json.dumps(dataclasses.asdict(found) | {"goodput": found.goodput}))
        return
    from .tables import console, status_view

    console().print(status_view(found))


def _show_sweep(found: SweepStatus, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(found) | {"counts": found.counts}))
        return
    from .tables import console, sweep_view

    console().print(sweep_view(found))


@app.command("ls")
def ls(root: Root = None, as_json: AsJson = False, long: Long = False) -> None:
    """The checkpoints of a run, newest last."""
    from .listing import describe_checkpoints, list_checkpoints

    if long and not as_json:
        describe_checkpoints(place_of(root))
    else:
        list_checkpoints(place_of(root), as_json=as_json)


@app.command("export")
def export_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint's directory, step-….")],
    target: Annotated[Path, typer.Argument(help="A new file: .pt, .pth, .bin or .safetensors.")],
    part: Annotated[
        str | None, typer.Option("--part", help="Only this tracked object, such as model.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a checkpoint as a file that torch.load or safetensors opens."""
    options = ["--part", part] if part else []
    _exchange("export", str(checkpoint), str(target), *options, *(["--force"] if force else []))


@app.command("import")
def import_checkpoint(
    source: Annotated[Path, typer.Argument(help="A .pt, .pth, .bin or .safetensors file.")],
    root: Root = None,
    step: Annotated[int | None, typer.Option(help="Steps done so far [as the file says].")] = None,
    epoch: Annotated[
        int | None, typer.Option(help="The epoch to go on with [after the one in the file].")
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option("--rename", metavar="OLD=NEW", help="A part by the name it is tracked by."),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", metavar="NAME", help="A part that the program does not track."),
    ] = None,
) -> None:
    """Make a run directory of an existing torch checkpoint, for a program to go on from."""
    options = [f"--rename={one}" for one in rename or ()]
    options += [f"--skip={one}" for one in skip or ()]
    options += [] if step is None else [f"--step={step}"]
    options += [] if epoch is None else [f"--epoch={epoch}"]
    _exchange("import", str(source), str(_root(root)), *options)


def _exchange(*arguments: str) -> None:
    """In a program of its own, which takes this one's place: it needs torch, this one does not."""
    command = [sys.executable, "-P", "-m", "hpc_ckpt.engine.exchange", *arguments]
    sys.stdout.flush()
    os.execv(sys.executable, command)


@app.command()
def verify(root: Root = None, as_json: AsJson = False) -> None:
    """Check every byte of every checkpoint of a run, or of one checkpoint."""
    from .listing import verify_checkpoints

    raise typer.Exit(verify_checkpoints(place_of(root), as_json=as_json))


app.command()(adopting.adopt)
app.command()(cookbook.recipes)
for _verb in runs.VERBS:
    app.command()(_verb)


@app.command()
def demo(
    root: Annotated[
        Path, typer.Option("--root", help="Where to make it; removed before each demo.")
    ] = Path("runs/demo"),
) -> None:
    """A chain of four links on this machine: one killed in a save, one preempted, same weights."""
    from .watching import run_demo

    raise typer.Exit(run_demo(root))


@config.command("show")
def config_show(
    context: typer.Context,
    spec: SpecFile = None,
    profile: ProfileName = None,
    origin: Annotated[bool, typer.Option("--origin", help="And where each was set.")] = False,
    assignments: Assignments = None,
) -> None:
    """Every value of spec and profile as resolved."""
    from .tables import console, origin_table

    bare = spec is None and not context.obj
    context.obj = ["true"] if bare else context.obj
    loaded = _load(context, spec, profile)
    chosen = [row for row in loaded.spec_rows() if not bare or row.key not in _BY_COMMAND]
    screen = console()
    for title, rows in (("spec", chosen), ("profile", loaded.profile_rows())):
        screen.print(title, style="bold")
        screen.print(origin_table(rows, origin=origin))
