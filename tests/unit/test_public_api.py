"""The public surface is frozen: a new name is a decision, not an accident."""

import subprocess
import sys

import hpc_ckpt

PUBLIC = [
    "Chain",
    "ChainTask",
    "Checkpointer",
    "HpcCkptError",
    "LinkEnded",
    "__version__",
    "best",
    "executor",
    "latest",
    "load",
    "submit",
]


def test_exactly_these_names_are_public() -> None:
    """Sorted, and each one can be had."""
    assert PUBLIC == hpc_ckpt.__all__
    assert PUBLIC == sorted(dir(hpc_ckpt))
    assert all(getattr(hpc_ckpt, name) is not None for name in PUBLIC)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As in any module."""
    assert not hasattr(hpc_ckpt, "no_such_name")


def test_importing_the_package_imports_nothing_heavy() -> None:
    """A login node never pays for torch."""
    heavy = {"torch", "numpy", "pydantic", "yaml", "rich", "typer", "submitit"}
    script = f"import sys, hpc_ckpt; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "set()\n" == done.stdout
