"""`load_pretrained` reads what a rank stores and nothing else; `save_pretrained` is its inverse.

For plain, deferred and parallelised models; folders that do not fit change nothing on any rank.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import vescale_parallel as vp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from vescale_comm import simulate
from vescale_comm.testing import on_ranks
from vescale_dtensor import DTensor
from vescale_parallel import save_pretrained
from vescale_parallel._pretrained import load, weight_file
from vescale_parallel._pretrained.weight_file import stored_tensors
from zero_models import Decoder, make, plan_for


class Small(nn.Module):
    """Tied weights, a scalar, a buffer, an empty tensor, several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.up, self.gain = nn.Linear(6, 7).to(torch.bfloat16), nn.Parameter(torch.rand(()))
        self.empty = nn.Parameter(torch.rand(0, 3))
        self.cube = nn.Parameter(torch.rand(3, 4, 5))
        self.turned = nn.Parameter(torch.rand(5, 4).t())
        self.register_buffer("steps", torch.randint(9, (3,)))
        self.register_buffer("unsaved", torch.rand(2), persistent=False)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Global values by name."""
    found = model.state_dict()
    return {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in found.items()}


def require_equal(found: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    """All values are bitwise those wanted."""
    mine = values(found)
    assert list(mine) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(mine[name], value), name


def built(seed: int, make_model: Any = Small) -> nn.Module:
    """A model with the values of a seed."""
    torch.manual_seed(seed)
    return make_model()


LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "rows": ({"tp": 3}, {"parameters": {"{embed.weight,head.weight,up.*,cube}": "tp:0"}}),
    "columns": ({"tp": 2}, {"parameters": {"{embed.weight,head.weight,cube}": "tp:1"}}),
    "last": ({"tp": 2}, {"parameters": {"{cube,up.weight,turned}": "tp:-1"}}),
    "zero 1": ({"dp": 2}, {"zero": 1}),
    "zero 3": ({"dp": 3}, {"zero": 3}),
    "zero 3 and tp": ({"dp": 2, "tp": 2}, {"parameters": {"{up,cube}*": "tp:0"}, "zero": 3}),
}


def plan_of(words: dict[str, Any]) -> vp.Plan:
    """Rules of a layout, all else replicated."""
    rules = words.get("parameters", {}) | {"*": "replicate"}
    others = {key: value for key, value in words.items() if key != "parameters"}
    return vp.Plan(parameters=rules, axes=("dp", "tp"), batch=None, **others)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("max_bytes", [5_000_000_000, 200])
def test_saved_and_loaded_in_every_layout(name: str, max_bytes: int, tmp_path: Path):
    sizes, words = LAYOUTS[name]
    source = built(1)
    wanted = source.state_dict()
    save_pretrained(source, tmp_path / "plain", max_bytes=max_bytes)
    assert (tmp_path / "plain/model.safetensors.index.json").exists() == (max_bytes == 200)

    def rank(rank: int, size: int) -> None:
        mesh = vp.mesh(device_type="cpu", **sizes)
        torch.manual_seed(2)
        after = vp.parallelize(Small(), mesh, plan_of(words))
        state = torch.get_rng_state()
        assert vp.load_pretrained(after, tmp_path / "plain") is after
        assert torch.equal(torch.get_rng_state(), state)
        require_equal(after, wanted)
        with vp.deferred():
            before = Small()
        vp.load_pretrained(before, tmp_path / "plain")
        require_equal(vp.parallelize(before, mesh, plan_of(words)), wanted)
        assert before.head.weight is before.embed.weight
        save_pretrained(after, tmp_path / "parallel", max_bytes=max_bytes)

    simulate(prod(sizes.values()))(rank)
    assert not list((tmp_path / "parallel").glob("*unfinished"))
    for file in (tmp_path / "plain").iterdir():
        assert (tmp_path / "parallel" / file.name).read_bytes() == file.read_bytes()
    assert values(vp.load_pretrained(built(3), tmp_path / "parallel")).keys() == wanted.keys()
    require_equal(vp.load_pretrained(built(3), tmp_path / "parallel"), wanted)


def test_a_rank_reads_the_bytes_that_it_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = built(1, lambda: make(0, tied=False))
    save_pretrained(source, tmp_path)
    total = sum(p.numel() * 4 for p in source.parameters())
    counted: list[int] = []
    read_into = weight_file.read_into

    def counting(opened: Any, target: memoryview, *rest: Any) -> None:
        counted.append(len(target))
        read_into(opened, target, *rest)

    monkeypatch.setattr(weight_file, "read_into", counting)

    def rank(rank: int, size: int) -> int:
        mesh = vp.mesh(device_type="cpu", dp=2, tp=2)
        with vp.deferred():
            model = Decoder(tied=False)
        vp.load_pretrained(model, tmp_path)
        # The gains are made of Python's numbers, so they are real, and read at once.
        assert set(counted[-3:]) == {4}
        vp.parallelize(model, mesh, plan_for({"dp": 2, "tp": 2}))
        # Stored are views of a flat buffer, with padding that belongs to none of them.
        return sum(p.to_local().numel() * 4 for p in model.parameters())

    stored = simulate(4)(rank)
    assert sum(counted) == sum(stored)
    assert total <= sum(stored) < 1.5 * total


def test_zero_trains_on_with_what_was_loaded(tmp_path: Path):
    save_pretrained(make(1), tmp_path)
    tokens = torch.arange(15).view(3, 5) % 16
    wanted = make(1).eval()(tokens, tokens)

    @simulate(2)
    def losses(rank: int, size: int) -> float:
        mesh = vp.mesh(device_type="cpu", dp=2)
        model = vp.parallelize(make(0), mesh, plan_for({"dp": 2}, 2, batch=None)).eval()
        before = model(tokens, tokens).item()
        vp.load_pretrained(model, tmp_path)
        after = model(tokens, tokens).item()
        assert before != after
        return after

    assert losses == pytest.approx([wanted.item()] * 2)


def broken(folder: Path) -> dict[str, Any]:
    """What can be wrong with a folder: how to break it, and what is said."""
    file = folder / "model.safetensors"

    def rewrite(change: Any) -> None:
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    def named_twice() -> None:
        raw = file.read_bytes()
        # As long as before: the second of two entries under one name is what JSON finds.
        assert raw.count(b'"gain": ') == raw.count(b'"cube": ') == 1
        file.write_bytes(raw.replace(b'"gain": ', b'"cube": '))

    return {
        "instead of": named_twice,
        "neither": file.unlink,
        "ends at byte|end at byte": lambda: file.write_bytes(file.read_bytes()[:-1]),
        "header of": lambda: file.write_bytes(b"\xff" * 20),
        "'up.bias'": lambda: rewrite(lambda h: h.update(other=h.pop("up.bias"))),
        "not in the model": lambda: rewrite(lambda h: h.update(other=h.pop("up.bias"))),
        "has shape": lambda: rewrite(lambda h: h["cube"].update(shape=[4, 3, 5])),
        "cast=True": lambda: rewrite(lambda h: h["up.weight"].update(dtype="F16")),
        "which torch lacks": lambda: rewrite(lambda h: h["cube"].update(dtype="F4")),
    }


@pytest.mark.parametrize("said", list(broken(Path())))
def test_a_folder_that_does_not_fit_is_an_error_on_every_rank(said: str, tmp_path: Path):
    save_pretrained(built(1), tmp_path)
    broken(tmp_path)[said]()
    wanted = built(2).state_dict()

    def rank(rank: int, size: int) -> None:
        torch.manual_seed(2)
        model = vp.parallelize(Small(), vp.mesh(device_type="cpu", dp=2), vp.Plan(batch=None))
        with pytest.raises(vp.PretrainedError, match=said):
            vp.load_pretrained(model, tmp_path)
        require_equal(model, wanted)

    simulate(2)(rank)


def test_other_dtypes_are_cast_where_it_is_said(tmp_path: Path):
    source = built(1)
    save_pretrained(source, tmp_path)
    with vp.deferred():
        model = Small().double()
    vp.load_pretrained(model, tmp_path, cast=True)
    assert torch.equal(vp.materialize(model).up.weight, source.up.weight.double())


def test_weights_that_are_there_are_not_overwritten_and_one_name_of_shared_ones_will_do(
    tmp_path: Path,
):
    save_pretrained(built(1), tmp_path)
    assert "head.weight" not in stored_tensors(tmp_path / "model.safetensors")
    with pytest.raises(vp.PretrainedError, match="holds weights already"):
        save_pretrained(built(2), tmp_path)
    untied = built(4)
    untied.head.weight = nn.Parameter(untied.embed.weight.detach().clone())
    save_pretrained(untied, tmp_path / "same")
    require_equal(vp.load_pretrained(built(5), tmp_path / "same"), built(4).state_dict())
    untied.head.weight.data[10, 5] += 1
    save_pretrained(untied, tmp_path / "other")
    with pytest.raises(vp.PretrainedError, match="stored with different values"):
        vp.load_pretrained(built(5), tmp_path / "other")


class Config:
    def __init__(self, words: str) -> None:
        self.words = words

    def save_pretrained(self, folder: Path) -> None:
        raise ValueError(self.words)


@pytest.mark.parametrize("words", ["not a configuration", ""])
@on_ranks(2, simulated=True)
def test_what_fails_while_saving_is_raised_on_every_rank(tmp_path: Path, words: str):
    model = vp.parallelize(built(1), vp.mesh(dp=2, device_type="cpu"), vp.Plan())
    model.config = Config(words)
    with pytest.raises(vp.PretrainedError, match=words or "ValueError"):
        save_pretrained(model, tmp_path / "saved")


def test_a_model_without_memory_is_not_loaded(tmp_path: Path):
    save_pretrained(built(1), tmp_path)
    with torch.device("meta"):
        model = Small()
    with pytest.raises(vp.PretrainedError, match="is on the meta device"):
        vp.load_pretrained(model, tmp_path)


def test_folders_of_other_values_and_disks_that_fail(tmp_path: Path, monkeypatch: Any):
    for rank in (0, 1):
        torch.manual_seed(rank)
        save_pretrained(make(seed=rank), tmp_path / str(rank))
    plan = plan_for({"dp": 2}, 3)

    def on_a_rank(rank: int, world_size: int) -> None:
        model = vp.parallelize(make(), vp.mesh(device_type="cpu", dp=2), plan)
        before = values(model)
        with pytest.raises(vp.DisagreementError, match=r"'embed.weight': .*sample .* on rank 1"):
            vp.load_pretrained(model, tmp_path / str(rank))
        require_equal(model, before)
        with vp.deferred():
            built = make()
        vp.load_pretrained(built, tmp_path / str(rank))
        with pytest.raises(vp.DisagreementError, match="embed"):
            vp.parallelize(built, vp.mesh(device_type="cpu", dp=2), plan)

    simulate(2)(on_a_rank)
    read = load.fill_from_file

    def fails(stored: Any, layout: Any, local: Any) -> None:
        if torch.distributed.get_rank() == 1 and stored.name == "norm.weight":
            raise vp.PretrainedError("disk on fire")
        read(stored, layout, local)

    monkeypatch.setattr(load, "fill_from_file", fails)

    def on_fire(rank: int, world_size: int) -> None:
        model = vp.parallelize(make(), vp.mesh(device_type="cpu", dp=2), plan)
        words = "disk on fire" if rank == 1 else "could not be read on rank 1"
        with pytest.raises(vp.PretrainedError, match=words):
            vp.load_pretrained(model, tmp_path / "0")

    simulate(2)(on_fire)


@on_ranks(4, simulated=True)
def test_meshes_side_by_side_are_saved_and_loaded_each_by_itself(
    rank: int, world_size: int, tmp_path: Path
):
    meshes = [DeviceMesh("cpu", one, mesh_dim_names=("dp",)) for one in ([0, 1], [2, 3])]
    model = make(seed=rank // 2)
    wanted = {name: one.clone() for name, one in values(model).items()}
    vp.parallelize(model, meshes[rank // 2], plan_for({"dp": 2}, 3))
    if rank < 2:
        return
    save_pretrained(model, tmp_path)
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    vp.load_pretrained(model, tmp_path)
    require_equal(model, wanted)


@pytest.mark.parametrize("zero", [0, 3])
@on_ranks(2, simulated=True)
def test_invariant_models_are_saved_once(zero: int, tmp_path: Path):
    plan = plan_for({"dp": 2}, zero, deterministic="dp-invariant")
    model = vp.parallelize(make(), vp.mesh(device_type="cpu", dp=2), plan)
    save_pretrained(model, tmp_path)
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    vp.load_pretrained(model, tmp_path)
    require_equal(model, values(make()))
