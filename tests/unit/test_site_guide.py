"""The guide for administrators names every key, and its example is a profile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from hpc_ckpt.chain.complaints import all_paths
from hpc_ckpt.chain.profile import Partition, Profile, Storage

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "site-profile.md"
NAMED = {"partitions.NAME": Partition, "storage.NAME": Storage}


def keys() -> list[str]:
    """Those that hold a value, dotted; a tool is one key with two ways to write it."""
    every = {".".join(path) for path in all_paths(Profile)}
    for section, model in NAMED.items():
        every |= {f"{section}.{'.'.join(path)}" for path in all_paths(model)}
    every = {re.sub(r"^(tools\.\w+)\..*", r"\1", key) for key in every}
    return sorted(k for k in every if not any(other.startswith(f"{k}.") for other in every))


@pytest.mark.parametrize("key", keys())
def test_every_key_is_in_the_guide(key: str) -> None:
    """A key that administrators cannot find is not there."""
    assert f"`{key}`" in GUIDE.read_text()


def test_its_example_is_a_profile() -> None:
    """With all of its sections."""
    (block,) = [part.partition("```")[0] for part in GUIDE.read_text().split("```yaml\n")[1:]]
    found = Profile.model_validate(yaml.load(block, yaml.BaseLoader))
    assert set(Profile.model_fields) - {"backend"} == found.model_fields_set


def test_no_em_dashes() -> None:
    """Plain English."""
    assert "\u2014" not in GUIDE.read_text()
