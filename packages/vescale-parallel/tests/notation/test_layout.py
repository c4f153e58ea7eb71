"""Layouts are read exactly or refused with the wrong part quoted; pieces are torch.chunk's.

Globs match whole names, alternatives are expanded, wrong ones find their neighbours.
"""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vescale_parallel import PlanError
from vescale_parallel._notation.glob import dead_alternatives, expand_braces, matches, nearest_names
from vescale_parallel._notation.layout import (
    local_shape,
    parse_boundary,
    parse_layout,
    some_rank_is_empty,
)

LAYOUTS = [
    ("tp:0", (("tp", 0),), False),
    ("dp:0, tp:1", (("dp", 0), ("tp", 1)), False),
    (" tp : -1 ", (("tp", -1),), False),
    ("tp:full", (("tp", None),), False),
    ("tp : 1 / 3, dp:0", (("tp", 1), ("dp", 0)), False),
    ("replicate", (), True),
]


@pytest.mark.parametrize(("text", "dims", "everywhere"), LAYOUTS)
def test_reads_layouts(text: str, dims: tuple[tuple[str, int | None], ...], everywhere: bool):
    layout = parse_layout(text)
    assert (layout.dims, layout.everywhere) == (dims, everywhere)
    assert parse_layout(str(layout)) == layout


NO_LAYOUTS = [
    ("", "empty"),
    ("tp", "'tp'"),
    ("tp:", "'tp:'"),
    ("tp:x", "'tp:x'"),
    ("tp:0,", "empty"),
    ("tp:0 dp:1", "'tp:0 dp:1'"),
    ("tp:0, tp:1", "'tp' is named twice"),
    ("tp:0 -> tp:1", "'->'"),
    ("replicate, tp:0", "'replicate'"),
    ("0:tp", "'0:tp'"),
    ("tp:1.5", "'tp:1.5'"),
    ("tp:1/0", "'tp:1/0'"),
    ("tp:1/", "'tp:1/'"),
    ("tp:full/2", "'tp:full/2'"),
    ("tp:1/3, dp:1", "over one axis only"),
    ("tp:1/3, dp:1/3", "over one axis only"),
]


@pytest.mark.parametrize(("text", "quoted"), NO_LAYOUTS)
def test_refuses_what_is_no_layout(text: str, quoted: str):
    with pytest.raises(PlanError, match="layout") as caught:
        parse_layout(text)
    assert quoted in str(caught.value)


@pytest.mark.parametrize("wrong", [0, None, ("tp", 0), ["tp:0"], {"tp": 0}])
def test_refuses_what_is_no_text(wrong: object):
    with pytest.raises(PlanError, match="a layout is a string"):
        parse_layout(wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="with one '->'"):
        parse_boundary(wrong)  # type: ignore[arg-type]


@given(st.text(alphabet="tdp:01,-> \nfulreica{}*", max_size=24))
def test_any_text_is_a_layout_or_a_plan_error(text: str):
    for parse in (parse_layout, parse_boundary):
        with contextlib.suppress(PlanError):
            parsed = parse(text)
            assert parse(parsed.text) == parsed


BOUNDARIES = [
    ("tp:full -> tp:1", "tp:full", "tp:1"),
    ("-> tp:1", None, "tp:1"),
    ("tp:full ->", "tp:full", None),
    ("replicate -> dp:0, tp:-1", "replicate", "dp:0, tp:-1"),
]


@pytest.mark.parametrize(("text", "inputs", "outputs"), BOUNDARIES)
def test_reads_boundaries(text: str, inputs: str | None, outputs: str | None):
    boundary = parse_boundary(text)
    sides = [side and str(side) for side in (boundary.inputs, boundary.outputs)]
    assert sides == [inputs, outputs]


@pytest.mark.parametrize("text", ["->", "tp:0", "", "tp:0 -> tp:1 -> tp:0", "tp:0 => tp:1"])
def test_refuses_what_is_no_boundary(text: str):
    with pytest.raises(PlanError, match="layout"):
        parse_boundary(text)


@given(extent=st.integers(0, 40), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_local_shape_is_the_first_chunk_of_chunks(extent: int, sizes: list[int]):
    axes = [(f"a{i}", size) for i, size in enumerate(sizes)]
    layout = parse_layout(", ".join(f"{axis}:0" for axis, _ in axes))
    piece = torch.zeros(extent, 3)
    for size in sizes:
        piece = piece.chunk(size)[0]
    assert local_shape(layout, (extent, 3), axes) == tuple(piece.shape)


@given(extent=st.integers(1, 40), size=st.integers(1, 8))
def test_knows_when_a_rank_holds_nothing(extent: int, size: int):
    chunks = len(torch.zeros(extent).chunk(size))
    assert some_rank_is_empty(parse_layout("tp:0"), (extent,), [("tp", size)]) == (chunks < size)


def test_blocks_are_sharded_one_by_one():
    layout = parse_layout("tp:-1/3")
    assert (layout.blocks_of("tp"), layout.blocks_of("dp"), str(layout)) == (
        (1, 1, 1),
        (1,),
        "tp:-1/3",
    )
    assert local_shape(layout, (4, 15), (("dp", 2), ("tp", 2))) == (4, 9)
    assert some_rank_is_empty(layout, (4, 15), (("tp", 4),))
    assert not some_rank_is_empty(layout, (4, 15), (("tp", 2),))
    assert str(parse_layout("tp:0/1")) == "tp:0"


NAMES = ["embed.weight", "layers.0.attention.q_proj.weight", "layers.0.mlp.up.weight"]


BRACES = [
    ("a", ("a",)),
    ("{q,k}_proj", ("q_proj", "k_proj")),
    ("x.{a,b}.{c,d}", ("x.a.c", "x.a.d", "x.b.c", "x.b.d")),
    ("{a{1,2},b}", ("a1", "a2", "b")),
    ("{a,}b", ("ab", "b")),
]


@pytest.mark.parametrize(("glob", "alternatives"), BRACES)
def test_braces_expand(glob: str, alternatives: tuple[str, ...]):
    assert expand_braces(glob) == alternatives


@pytest.mark.parametrize("glob", ["{a", "a}", "{a,{b}", "a}{b"])
def test_unbalanced_braces_are_refused(glob: str):
    with pytest.raises(PlanError, match="glob"):
        expand_braces(glob)


MATCHES = [
    ("*.weight", "layers.0.mlp.up.weight", True),
    ("*.weight", "weight", False),
    ("layers.?.mlp.up.weight", "layers.0.mlp.up.weight", True),
    ("layers.[01].mlp.*", "layers.2.mlp.up.weight", False),
    ("embed", "embed.weight", False),
    ("{embed,head}.weight", "head.weight", True),
    ("a.b", "axb", False),
]


@pytest.mark.parametrize(("glob", "name", "expected"), MATCHES)
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
