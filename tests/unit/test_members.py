"""A sweep's members: grids, lists, names, and the command of each."""

import pytest

from hpc_ckpt.chain.members import command_of, member_name, members_of, unused


def test_a_grid_is_every_combination_in_order() -> None:
    found = members_of({"lr": ["0.1", "0.01"], "seed": [1, 2]})
    assert ["lr-0.1_seed-1", "lr-0.1_seed-2", "lr-0.01_seed-1", "lr-0.01_seed-2"] == [
        member_name(member) for member in found
    ]


def test_a_list_is_taken_as_it_is() -> None:
    assert ({"lr": "0.1"}, {"lr": "0.2", "deep": "yes"}) == members_of(
        [{"lr": "0.1"}, {"lr": "0.2", "deep": "yes"}]
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("lr", "must be a grid"),
        ([["lr", 1]], "is no member"),
        ({"l r": [1]}, "cannot name a value"),
        ({"lr": [1, 1]}, "two members are called"),
        ({"a": list(range(1000)), "b": list(range(1000))}, "is more than 100000"),
        ({"lr": [None]}, "must be text"),
    ],
)
def test_what_is_no_sweep(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        members_of(value)


def test_values_are_put_into_a_command_as_one_word_each() -> None:
    member = {"name": "it's; rm -rf", "lr": "0.1"}
    assert "python x.py --lr 0.1 'it'\"'\"'s; rm -rf' ${lr} {other}" == command_of(
        "python x.py --lr {lr} {name} ${lr} {other}", member
    )
    assert ("python", "--lr=0.1", "it's; rm -rf") == command_of(
        ("python", "--lr={lr}", "{name}"), member
    )


def test_values_that_the_command_does_not_mention_are_named() -> None:
    assert ["seed"] == unused("x --lr {lr}", {"lr": "1", "seed": "2"})


def test_names_are_directories() -> None:
    assert "path-a-b_x-1" == member_name({"path": "/a/b", "x": "1"}).replace("--", "-")
    assert 120 >= len(member_name({"x": "y" * 500}))
