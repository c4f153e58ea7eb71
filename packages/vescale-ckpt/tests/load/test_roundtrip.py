"""What is saved comes back: every kind of value with its type, every dtype with its bits."""

import math
import struct
from collections import OrderedDict

import pytest
import torch
import vescale_ckpt
import vescale_ckpt as ckpt
from edited_checkpoint import damage
from emulated_ranks import bits
from vescale_ckpt._tensors.dtypes import STORED_AS, torch_dtype

VALUES = [
    None, True, False, 0, -1, 2**53, -(2**300), 0.1, -0.0, 1e300, 5e-324, 1.0, math.inf, -math.inf,
    "", "a/b~c", "ümlaut \x00 \U0001f600", [], {}, (), [1, [2, ()]], (1, (2.0, [])),
    {"1": "string", 1: "integer", "~s1": 0, "": {"": 1}, "/": 2, "~1": 3}, {-5: {"x": (None,)}},
]  # fmt: skip


@pytest.mark.smoke
def test_smallest_save_and_load(path):
    state = {"weight": torch.randn(3, 4), "step": 7}
    ckpt.save(path, state)
    into = {"weight": torch.zeros(3, 4), "step": 0}
    loaded = ckpt.load(path, into)
    assert loaded["weight"] is into["weight"]
    assert loaded["weight"].equal(state["weight"])
    assert loaded["step"] == 7
    assert into["step"] == 0
    assert vescale_ckpt.verify(path).tensors == 1


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_value_keeps_its_type(path, value):
    ckpt.save(path, {"x": value})
    for loaded in (ckpt.read(path)["x"], ckpt.load(path, into={"x": None})["x"]):
        assert repr(loaded) == repr(value)


@pytest.mark.parametrize("pattern", [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001])
def test_nan_keeps_its_bits(path, pattern):
    ckpt.save(path, {"x": struct.unpack(">d", pattern.to_bytes(8, "big"))[0]})
    assert struct.pack(">d", ckpt.read(path)["x"]) == pattern.to_bytes(8, "big")


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", STORED_AS)
def test_dtype_keeps_its_bits(path, name):
    dtype = torch_dtype(name)
    raw = torch.randint(0, 2 if name == "bool" else 256, (6, STORED_AS[name].bytes_per_element))
    saved = raw.to(torch.uint8).view(dtype).reshape(2, 3)
    into = {"x": torch.zeros(2, 3, dtype=torch.uint8).to(dtype), "y": torch.zeros(()).to(dtype)}
    ckpt.save(path, {"x": saved, "y": saved[1, 2]})
    for loaded in (ckpt.read(path), ckpt.load(path, into)):
        assert loaded["x"].dtype is dtype
        assert bits(loaded["x"]).equal(bits(saved))
        assert bits(loaded["y"]).equal(bits(saved[1, 2]))


STRIDED = [
    torch.tensor(5),
    torch.empty(0),
    torch.empty(3, 0, 2),
    torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
    torch.arange(24)[3:20:5],
    torch.arange(3).expand(4, 3),
    torch.tensor([1 + 2j, 3 - 4j]).conj(),
    torch.nn.Parameter(torch.randn(3)),
    torch.arange(300_000, dtype=torch.float64),
]


@pytest.mark.parametrize(
    "tensor", STRIDED, ids=lambda t: f"{t.dtype}{list(t.shape)}{list(t.stride())}"
)
def test_any_strides_and_sizes(path, tensor):
    ckpt.save(path, {"x": tensor})
    assert ckpt.read(path)["x"].equal(tensor.detach().resolve_conj())


def test_parameters_and_strided_views_are_filled_in_place(path):
    ckpt.save(path, {"w": torch.arange(6.0).reshape(2, 3), "v": torch.arange(6.0).reshape(2, 3)})
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    base = torch.zeros(6, 4)
    ckpt.load(path, into={"w": weight, "v": base.t()[1:3, ::2]})
    assert weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert weight.grad_fn is None
    assert weight.requires_grad
    assert base[::2, 1:3].t().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert base.count_nonzero() == 5


def test_module_state_dict_and_rng_state(path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    assert type(model.state_dict()) is OrderedDict
    ckpt.save(path, {"model": model.state_dict(), "rng": torch.get_rng_state()})
    expected = torch.rand(5)
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    loaded = ckpt.load(path, into={"model": other.state_dict(), "rng": torch.get_rng_state()})
    torch.set_rng_state(loaded["rng"])
    assert torch.rand(5).equal(expected)
    for key, value in model.state_dict().items():
        assert other.state_dict()[key].equal(value)


def test_names_that_look_alike_stay_apart(path):
    keys = ["a/b", "a~1b", "0", 0, "~s0", "~", "__metadata__", "x~[0:2]", "x", ""]
    state = {key: torch.tensor(float(i)) for i, key in enumerate(keys)}
    state["a"] = {"b": torch.tensor(100.0)}
    ckpt.save(path, state)
    assert ckpt.read(path) == state


def test_rank_local_alone(path):
    ckpt.save(path, {"loader": ckpt.RankLocal({"at": 3, "order": torch.arange(4)})})
    (value,) = ckpt.read(path)["loader"].values
    assert (value["at"], value["order"].tolist()) == (3, [0, 1, 2, 3])
    loaded = ckpt.load(path, into={"loader": ckpt.RankLocal(None)})["loader"].value
    assert loaded["at"] == 3
    assert loaded["order"].tolist() == [0, 1, 2, 3]
    order = torch.zeros(4, dtype=torch.int64)
    ckpt.load(path, into={"loader": ckpt.RankLocal({"at": 0, "order": order})})
    assert order.tolist() == [0, 1, 2, 3]


class Anything:
    pass


class Color(int):
    pass


CYCLE: dict = {}
CYCLE["again"] = CYCLE
DEEP: list = []
for _ in range(70):
    DEEP = [DEEP]

REFUSED = {
    "object": (Anything(), "Anything"),
    "function": (len, "builtin_function_or_method"),
    "module": (torch.nn.Linear(2, 2), "put its .state_dict() there"),
    "bytes": (b"abc", "bytes"),
    "set": ({1, 2}, "set"),
    "complex": (1j, "complex"),
    "int subclass": (Color(3), "subclass of int"),
    "float key": ({1.5: 0}, "a dict key must be a string or an integer"),
    "bool key": ({True: 0}, "a dict key must be a string or an integer"),
    "tuple key": ({(1, 2): 0}, "a dict key must be a string or an integer"),
    "large key": ({2**60: 0}, "53 bits"),
    "surrogate": ("\ud800", "not valid Unicode"),
    "surrogate key": ({"\ud800": 1}, "not valid Unicode"),
    "large int": (2**9000, "9001 bits"),
    "cycle": (CYCLE, "nested deeper than 64"),
    "deep": (DEEP, "nested deeper than 64"),
    "sparse": (torch.eye(3).to_sparse(), "to_dense()"),
    "meta": (torch.empty(3, device="meta"), "meta device"),
    "nested rank local": (ckpt.RankLocal([ckpt.RankLocal(1)]), "a RankLocal inside a RankLocal"),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_saved_is_refused_with_its_path(tmp_path, path, value):
    with pytest.raises(ckpt.StateError) as caught:
        ckpt.save(path, {"outer": {"list": [0, value[0]]}})
    assert "outer/list/1" in str(caught.value)
    assert value[1] in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_numpy_values_are_refused_with_advice(path):
    import numpy

    with pytest.raises(ckpt.StateError, match=r"at 'x': .*numpy.*\.item\(\)"):
        ckpt.save(path, {"x": numpy.float64(1.0)})
    with pytest.raises(ckpt.StateError, match="from_numpy"):
        ckpt.save(path, {"x": numpy.zeros(2)})


def test_the_state_itself_must_be_a_dict(path):
    with pytest.raises(ckpt.StateError, match="must be a dict, not a list"):
        ckpt.save(path, [torch.zeros(2)])


@pytest.mark.parametrize("layout", ["whole", "strided"])
def test_a_backward_pass_that_needs_what_was_there_before_raises(path, layout):
    weight = torch.full((300, 300), 3.0, requires_grad=True)
    into = weight if layout == "whole" else weight.t()
    ckpt.save(path, {"w": torch.full((300, 300), 5.0)})
    loss = weight.square().sum()
    ckpt.load(path, {"w": into})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_inference_tensor_is_filled(path):
    with torch.inference_mode():
        weight = torch.zeros(3)
    ckpt.save(path, {"w": torch.ones(3)})
    ckpt.load(path, {"w": weight})
    assert weight.all()


ONE_ELEMENT = [((1, 1), (5, 7)), ((1, 1), (1, 3)), ((1,), (9,)), ((), ()), ((1, 1, 1), (2, 1, 4))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.uint8])
@pytest.mark.parametrize(("shape", "strides"), ONE_ELEMENT)
def test_one_element_of_any_strides(path, shape, strides, dtype):
    """It is contiguous to torch, and yet cannot be viewed as bytes like any other."""
    source = torch.full((20,), 3).to(dtype).as_strided(shape, strides, 2)
    ckpt.save(path, {"a": torch.ones(3), "w": source, "z": torch.ones(3)})
    target = torch.zeros(20, dtype=dtype).as_strided(shape, strides, 2)
    loaded = ckpt.load(path, {"a": torch.zeros(3), "w": target, "z": torch.zeros(3)})
    assert loaded["w"] is target
    assert target.item() == 3
    assert ckpt.verify(path).tensors == 3


def test_a_load_that_fails_amid_says_what_it_has_changed(path):
    whole = torch.ones(300_000)
    ckpt.save(path, {"a": whole, "b": whole})
    damage(path, byte=b"\xff")
    changed = "Tensors of `into` that were read before are filled"
    with pytest.raises(ckpt.CorruptError, match=changed):
        ckpt.load(path, {"a": torch.zeros(300_000), "b": torch.zeros(300_000)})
    with pytest.raises(ckpt.MismatchError) as caught:
        ckpt.load(path, {"a": torch.zeros(300_000), "b": torch.zeros(2)})
    assert changed not in str(caught.value)
    with pytest.raises(ckpt.CorruptError) as caught:
        ckpt.read(path)
    assert changed not in str(caught.value)


def test_a_path_of_bytes(path):
    ckpt.save(path.encode(), {"x": 1})
    assert ckpt.read(path) == ckpt.read(path.encode()) == {"x": 1}
