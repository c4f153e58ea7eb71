"""A part of a checkpoint, under other names and as other dtypes, is exactly that part."""

import pytest
import torch
from emulated_ranks import load_on, save_on, succeed
from vescale_ckpt import WHOLE, MismatchError, compare, load, save
from vescale_ckpt._load.match import Selection
from vescale_ckpt._state.state_keys import child
from vescale_ckpt._tensors.dtypes import STORED_AS


@pytest.fixture
def saved(path):
    model = {
        "enc": {"w": torch.ones(3), "b": torch.full((2,), 2.0)},
        "dec.w": torch.full((3,), 3.0),
    }
    save(path, {"model": model, "optim": {0: torch.full((3,), 4.0)}, "step": 7})
    return path


def test_only_what_a_glob_names(saved):
    into = {"model": {"enc": {"w": torch.zeros(3), "x": torch.zeros(1)}}, "step": 1}
    loaded = load(saved, into, only="model/enc/w")
    assert loaded == into | {"step": 1}
    assert into["model"]["enc"]["w"].tolist() == [1, 1, 1]
    with pytest.raises(MismatchError) as caught:
        load(saved, into, only=["model/enc/*"])
    assert caught.value.missing == ["model/enc/x"]
    assert caught.value.unexpected == ["model/enc/b"]
    loaded = load(saved, {"model": {}, "optim": WHOLE}, only=["step", "optim"])
    assert loaded["step"] == 7
    assert loaded["optim"][0].tolist() == [4, 4, 4]
    assert loaded["model"] == {}


def test_renamed_subtrees_and_leaves(saved):
    new = {"encoder": {"w": torch.zeros(3), "b": torch.zeros(2)}, "head": torch.zeros(3)}
    into = {"net": new, "optim": {0: torch.zeros(3)}}
    rename = {"model/enc": "net/encoder", "model/dec.w": "net/head"}
    loaded = load(saved, into, rename=rename)
    assert new["encoder"]["b"].tolist() == [2, 2]
    assert new["head"].tolist() == [3, 3, 3]
    assert loaded["step"] == 7
    assert compare(saved, into, rename=rename) == ([], [], [])
    assert compare(saved, into).missing == ["net/encoder/w", "net/encoder/b", "net/head"]


def test_two_change_places(path):
    save(path, {"a": torch.zeros(1), "b": torch.ones(1), "~x/y": torch.full((1,), 2.0), 5: 5})
    into = {"a": torch.zeros(1), "b": torch.zeros(1), "p/q": torch.zeros(1), 6: 0}
    load(path, into, rename={"a": "b", "b": "a", "~0x~1y": "p~1q", "5": "6"})
    assert [into[k].item() for k in ("a", "b", "p/q")] == [1, 0, 2]


@pytest.mark.parametrize("key", [0, -5, "7", "-7", "007", "\u00b2", "\u0663", "~s1", "a/b~", ""])
def test_every_key_can_be_renamed_to(path, key):
    save(path, {"a": torch.ones(1)})
    into = {key: torch.zeros(1)}
    load(path, into, rename={"a": child("", key, top=True)})
    assert into[key].item() == 1


SENSELESS = [
    ({"nothing": "x"}, "holds nothing at 'nothing'"),
    ({"model/enc/w/x": "x"}, "holds nothing at 'model/enc/w/x'"),
    ({"model/enc/w": "step"}, "holds something at 'step' already"),
    ({"model/enc/w": "step/w"}, "inside something that is no dict"),
    ({"model/enc/w": "w/007"}, "no key is called '007' in 'w/007': write '~s007'"),
    ({"model/enc/w": "w/-0"}, "write '~s-0'"),
    ({"model/enc/w": "\u0663"}, "write '~s\u0663'"),  # Arabic three: a digit, not Python's 3
    ({"model/enc/w": "9" * 5000}, "write '~s99"),
    ({"model/enc/w": "a~b"}, "write 'a~0b'"),
    ({"model/enc/w": "~sa"}, "write 'a'"),
]


@pytest.mark.parametrize(("rename", "words"), SENSELESS)
def test_renames_that_make_no_sense(saved, rename, words):
    with pytest.raises(MismatchError, match=words):
        load(saved, {}, rename=rename)


def test_casts(path):
    whole = torch.randn(50)
    save(path, {"w": whole, "i": torch.arange(3, dtype=torch.int16)})
    into = {"w": torch.zeros(50, dtype=torch.bfloat16), "i": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(MismatchError) as caught:
        load(path, into)
    assert len(caught.value.different) == 2
    load(path, into, cast=True)
    assert into["w"].equal(whole.bfloat16())
    assert into["i"].tolist() == [0, 1, 2]
    with pytest.raises(MismatchError, match="holds float32"):
        load(path, {"w": torch.zeros(50, dtype=torch.int32)}, cast=True, strict=False)
    with pytest.raises(MismatchError, match="holds float32"):
        load(path, {"w": torch.zeros(49)}, cast=True, strict=False)
    # Numbers that torch knows and a checkpoint does not hold.
    for wanted in (torch.bits8, torch.uint4, torch.float4_e2m1fn_x2):
        with pytest.raises(MismatchError, match="no stored form"):
            load(path, {"i": torch.empty(3, dtype=wanted)}, cast=True, strict=False)


DTYPES = [getattr(torch, name) for name in STORED_AS]


def extremes(dtype):
    if dtype.is_floating_point or dtype.is_complex:
        return torch.tensor([0.5, 2.0, 4.0]).to(dtype)
    if dtype == torch.bool:
        return torch.tensor([True, False, True])
    limits = torch.iinfo(dtype)
    return torch.tensor([limits.min, 1, limits.max], dtype=dtype)


def fits(saved, wanted):
    if saved.is_complex or wanted.is_complex or torch.bool in (saved, wanted):
        return saved == wanted or (saved.is_complex and wanted.is_complex)
    if saved.is_floating_point != wanted.is_floating_point:
        return False
    if saved.is_floating_point:
        return saved == wanted or wanted != torch.float8_e8m0fnu
    return extremes(saved).tolist() == extremes(saved).to(wanted).tolist()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_casts_between_all_dtypes_keep_the_kind_of_number(path):
    saved = {str(dtype): extremes(dtype) for dtype in DTYPES}
    save(path, saved)
    for wanted in DTYPES:
        good = [str(dtype) for dtype in DTYPES if fits(dtype, wanted)]
        into = {name: torch.zeros(3).to(wanted) for name in good}
        load(path, into, cast=True, strict=False)
        for name, found in into.items():
            expected = saved[name].to(wanted)
            assert found.view(torch.uint8).equal(expected.view(torch.uint8)), (name, wanted)
        bad = {str(dtype): torch.zeros(3).to(wanted) for dtype in DTYPES if str(dtype) not in good}
        with pytest.raises(MismatchError) as caught:
            load(path, bad, cast=True, strict=False)
        assert len(caught.value.different) == len(bad) > 0


def test_lists_are_exact_however_long(path):
    save(path, {f"s{i}": torch.zeros(1) for i in range(50)})
    with pytest.raises(MismatchError, match="and 42 more") as caught:
        load(path, {f"t{i}": torch.zeros(1) for i in range(50)})
    assert "missing from the checkpoint (50)" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 25
    assert caught.value.missing == [f"t{i}" for i in range(50)]
    assert caught.value.unexpected == [f"s{i}" for i in range(50)]


@pytest.mark.parametrize("only", ["modle/*", ["model/*", "optmi/*"]])
def test_a_glob_that_names_nothing_is_a_mistake(saved, only):
    into = {"model": {"dec.w": torch.zeros(3)}}
    with pytest.raises(MismatchError, match=r"nothing is called like '(modle|optmi)/\*'"):
        load(saved, into, only=only)
    assert not into["model"]["dec.w"].any()
    load(saved, into, only=only, strict=False)


def test_a_glob_may_name_what_one_rank_only_has(path):
    succeed(save_on([{"a": torch.ones(2), "b": torch.ones(3)}], path))
    into = [{"a": torch.zeros(2)}, {"b": torch.zeros(3)}]
    succeed(load_on(into, path, selection=Selection(only=("a", "b"))))
    assert into[0]["a"].all()
    assert into[1]["b"].all()
