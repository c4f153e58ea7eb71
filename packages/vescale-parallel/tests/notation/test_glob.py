"""Globs match whole names, alternatives are expanded, wrong ones find their neighbours."""

import pytest
from vescale_parallel import PlanError
from vescale_parallel._notation.glob import dead_alternatives, expand_braces, matches, nearest_names

NAMES = ["embed.weight", "layers.0.attention.q_proj.weight", "layers.0.mlp.up.weight"]


@pytest.mark.parametrize(
    ("glob", "alternatives"),
    [
        ("a", ("a",)),
        ("{q,k}_proj", ("q_proj", "k_proj")),
        ("x.{a,b}.{c,d}", ("x.a.c", "x.a.d", "x.b.c", "x.b.d")),
        ("{a{1,2},b}", ("a1", "a2", "b")),
        ("{a,}b", ("ab", "b")),
    ],
)
def test_braces_expand(glob: str, alternatives: tuple[str, ...]):
    assert expand_braces(glob) == alternatives


@pytest.mark.parametrize("glob", ["{a", "a}", "{a,{b}", "a}{b"])
def test_unbalanced_braces_are_refused(glob: str):
    with pytest.raises(PlanError, match="glob"):
        expand_braces(glob)


@pytest.mark.parametrize(
    ("glob", "name", "expected"),
    [
        ("*.weight", "layers.0.mlp.up.weight", True),
        ("*.weight", "weight", False),
        ("layers.?.mlp.up.weight", "layers.0.mlp.up.weight", True),
        ("layers.[01].mlp.*", "layers.2.mlp.up.weight", False),
        ("embed", "embed.weight", False),
        ("{embed,head}.weight", "head.weight", True),
        ("a.b", "axb", False),
    ],
)
def test_matching(glob: str, name: str, expected: bool):
    assert matches(glob, name) is expected


def test_optional_alternatives_match_as_others_do_and_are_never_dead():
    glob = "*.{up,~{down,gate},upp}.~weight"
    assert expand_braces(glob)[:2] == ("*.up.~weight", "*.down.~weight")  # only in braces
    glob = "*.{up,~{down,gate},upp}.weight"
    assert expand_braces(glob) == tuple(f"*.{one}.weight" for one in ("up", "down", "gate", "upp"))
    assert dead_alternatives(glob, NAMES) == ["*.upp.weight"]
    assert matches("{~embed,head}.weight", "embed.weight")


def test_a_dead_alternative_is_found_among_live_ones():
    assert dead_alternatives("*.{up,upp}.weight", NAMES) == ["*.upp.weight"]


def test_nearest_names_compares_the_ends_of_names():
    assert nearest_names("*.q_prj.weight", NAMES)[0] == "layers.0.attention.q_proj.weight"
