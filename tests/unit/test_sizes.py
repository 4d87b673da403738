"""A ratchet: functions and rooms stay small enough to be read at a glance."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hpc_ckpt"
MODULE_LINES = 420
FUNCTION_LINES = 60
P90_LINES = 35


def functions() -> list[tuple[int, str]]:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                found.append((length, f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"))
    return sorted(found)


def test_no_room_is_a_hall() -> None:
    """The centre that absorbs every new option is split before it grows."""
    sizes = {
        str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")
    }
    assert {} == {name: size for name, size in sizes.items() if size > MODULE_LINES}


def test_functions_are_short() -> None:
    """Hard limit, and nine of ten far below it."""
    found = functions()
    assert [] == [entry for entry in found if entry[0] > FUNCTION_LINES]
    assert found[int(0.9 * len(found))][0] <= P90_LINES
