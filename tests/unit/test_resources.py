"""Shipped files are found in a wheel and in a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ckpt import resources


@pytest.mark.parametrize(
    "name", ["templates/shim.sh", "templates/chain.sbatch.j2", "clusters/local.yaml"]
)
def test_shipped_files_are_found_where_the_tests_run(name: str) -> None:
    """What the chain needs is there, whichever way the package is installed."""
    assert resources.find(name).is_file()


def test_files_inside_the_package_win_over_those_beside_it(tmp_path: Path) -> None:
    """Beside an installed package lie other people's folders, some called 'templates'."""
    package = tmp_path / "site-packages" / "hpc_ckpt"
    for place in (package, package.parent):
        (place / "templates").mkdir(parents=True)
        (place / "templates" / "shim.sh").touch()
    assert package / "templates" / "shim.sh" == resources.find("templates/shim.sh", package)


def test_a_checkout_has_its_profiles_under_slurm(tmp_path: Path) -> None:
    """The folders that people edit are top-level ones."""
    (tmp_path / "slurm" / "clusters").mkdir(parents=True)
    expected = tmp_path / "slurm" / "clusters" / "x.yaml"
    expected.touch()
    assert expected == resources.find("clusters/x.yaml", tmp_path / "hpc_ckpt")


def test_a_missing_file_is_a_broken_installation(tmp_path: Path) -> None:
    """The message says what is missing and what to do."""
    with pytest.raises(FileNotFoundError, match=r"shim\.sh: missing; install hpc_ckpt again"):
        resources.find("templates/shim.sh", tmp_path / "hpc_ckpt")
