"""Documents keep their promises: links lead somewhere, examples parse."""

import ast
import re
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).parents[2]
PAGES = sorted([*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    """A link that leads nowhere is worse than none."""
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [] == [target for target in local if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_python_and_yaml_blocks_parse(page: Path) -> None:
    """What a reader copies must at least be read by the machine."""
    for block in blocks(page, "python"):
        ast.parse(block)
    for block in blocks(page, "yaml"):
        yaml.safe_load(block)


def test_the_spec_of_the_quickstart_is_accepted() -> None:
    """Every key of it is built."""
    from hpc_ckpt.chain.spec import Spec

    (block,) = blocks(PROJECT / "docs" / "quickstart.md", "yaml")
    assert "resnet" == Spec.model_validate(yaml.load(block, yaml.BaseLoader)).name


def test_the_format_names_everything_that_a_listing_may_show() -> None:
    """A reader is written from that page alone."""
    from hpc_ckpt.tiers.directory import LEFTOVERS

    listing, rules = (PROJECT / "docs" / "format.md").read_text().split("## 1. ")[1].split("* ", 1)
    ignored = next(line for line in rules.splitlines() if "MUST ignore them" in line)
    for name in LEFTOVERS:
        assert (True, True) == (f".{name}-g" in listing, f"`.{name}-`" in ignored)


def test_every_row_of_what_is_known_of_dmtcp_names_tests_that_are_there() -> None:
    """A trap without a test is one to step into again."""
    files = ("levels/test_dmtcp_real", "levels/test_dmtcp_level", "slurm/test_dmtcp_on_slurm",
             "slurm/test_fallback_on_slurm")  # fmt: skip
    texts = [(PROJECT / "tests" / f"{name}.py").read_text() for name in files]
    known = re.findall(r"^def test_(\w+)", "\n".join(texts), re.MULTILINE)
    page = (PROJECT / "docs" / "guides" / "dmtcp.md").read_text()
    _, _, *rows = re.findall(r"^\|.*$", page.split("## Which test shows what")[1], re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        what, *cells = row.split(" | ")
        named = re.findall(r"`([a-z0-9_…]*_[a-z0-9_…]*)`", " ".join(cells))
        assert named, f"no test: {what}"
        for name in named:
            part = name.strip("…").strip("_")
            whole = part if name.startswith("…") else f"^{part}"
            assert any(re.search(whole, one) for one in known), f"{what}: no test_{name}"
