"""A checkpoint of another model is refused before a tensor is touched, with keys and shapes."""

import pytest
import torch
import vescale_ckpt as ckpt
from emulated_ranks import load_on, piece_of, save_on, sharded, succeed


def model_state(**changes):
    state = {"layers.0.weight": torch.ones(4, 3), "layers.0.bias": torch.ones(4), "step": 5}
    return {"model": {**state, **changes}}


def mismatch(path, into, **options):
    with pytest.raises(ckpt.MismatchError) as caught:
        ckpt.load(path, into, **options)
    return str(caught.value)


@pytest.fixture
def saved(path):
    ckpt.save(path, model_state())
    return path


def test_missing_and_unexpected_keys_with_the_nearest_name(saved):
    into = {"model": {"layer.0.weight": torch.zeros(4, 3), "layers.0.bias": torch.zeros(4)}}
    message = mismatch(saved, into)
    assert "missing from the checkpoint (1)" in message
    assert "'model/layer.0.weight' (nearest there: 'model/layers.0.weight')" in message
    assert "only in the checkpoint (1):\n    'model/layers.0.weight'" in message
    assert into["model"]["layers.0.bias"].tolist() == [0] * 4


def test_another_shape_and_dtype(saved):
    into = model_state()
    into["model"]["layers.0.weight"] = torch.zeros(3, 4)
    into["model"]["layers.0.bias"] = torch.zeros(4, dtype=torch.float64)
    for strict in (True, False):
        message = mismatch(saved, into, strict=strict)
        assert "weight': the checkpoint holds float32[4, 3], `into` float32[3, 4]" in message
        assert "bias': the checkpoint holds float32[4], `into` float64[4]" in message


ANOTHER_KIND = [
    ({"t": 3}, "'t': the checkpoint holds a tensor, `into` a int"),
    ({"t": None}, "'t': the checkpoint holds a tensor, `into` a NoneType"),
    ({"t": {"x": 1}}, "'t': the checkpoint holds a tensor, `into` a dict"),
    ({"v": torch.zeros(2)}, "'v': the checkpoint holds a plain value, `into` a tensor"),
    ({"d": [1]}, "'d': the checkpoint holds a dict, `into` a list"),
    ({"l": [torch.zeros(2)]}, "'l': the checkpoint holds 2 entries, `into` 1"),
    ({"r": 1}, "'r': the checkpoint holds one value per rank (RankLocal), `into` a int"),
    ({"v": ckpt.RankLocal(1)}, "'v': the checkpoint holds a plain value, `into` a RankLocal"),
    ({"v": 1, "new": 2}, "missing from the checkpoint (1):\n    'new'"),
    ({"l": [torch.zeros(2), torch.empty(2).to_sparse()]}, "to_dense()"),
]


@pytest.mark.parametrize(("into", "words"), ANOTHER_KIND)
def test_another_kind_of_thing(path, into, words):
    t = torch.zeros(2)
    state = {"t": t, "v": 1, "d": {"x": t}, "l": [t, t], "r": ckpt.RankLocal(1)}
    ckpt.save(path, state)
    assert words in mismatch(path, {**state, **into})


def test_values_come_from_the_checkpoint(path):
    values = {"lr": 0.5, "groups": [{"betas": (0.9, 0.95)}], "sched": {"n": 3}}
    ckpt.save(path, {"t": torch.ones(2), **values})
    into = {"t": torch.zeros(2), "lr": 1, "groups": [{"betas": (0.0, 0.0)}], "sched": None}
    loaded = ckpt.load(path, into)
    assert loaded["t"] is into["t"]
    assert loaded == {"t": into["t"], **values}
    assert into["lr"] == 1
    # Plain values that nobody asks for come along.
    assert ckpt.load(path, {"t": torch.zeros(2)})["lr"] == 0.5


def test_not_strict(path):
    ckpt.save(path, {"a": torch.ones(2), "only there": torch.ones(2), "n": 1})
    here = torch.full((2,), 7.0)
    loaded = ckpt.load(path, {"a": torch.zeros(2), "only here": here}, strict=False)
    assert loaded["a"].tolist() == [1, 1]
    assert loaded["only here"] is here
    assert here.tolist() == [7, 7]
    assert "only there" not in loaded
    assert loaded["n"] == 1


def test_whole(path):
    whole = torch.randn(6, 2)
    succeed(save_on([{"o": {"w": p, "n": (1,)}} for p in sharded(whole, 2)], path))
    loaded = ckpt.load(path, into={"o": ckpt.WHOLE})["o"]
    assert loaded["w"].equal(whole)
    assert loaded["n"] == (1,)


def test_an_optimizer_without_state_is_told_what_to_do(path):
    ckpt.save(path, {"optim": {"state": {0: {"exp_avg": torch.zeros(2)}}}})
    message = mismatch(path, {"optim": {"state": {}}})
    assert "`into` holds an empty dict at 'optim/state'" in message
    assert "init_optimizer_state(optimizer)" in message


def test_only_what_no_rank_asks_for_is_unexpected(path):
    state = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}
    ckpt.save(path, state)
    for outcome in load_on([{"a": torch.ones(2)}, {"b": torch.ones(2)}], path):
        assert isinstance(outcome, ckpt.MismatchError)
        assert "only in the checkpoint (1):\n    'c'" in str(outcome)


def test_one_rank_that_does_not_fit_fails_all_and_changes_nothing(path):
    whole = torch.ones(4, 4)
    ckpt.save(path, {"w": whole})
    good, wrong = piece_of(whole, [((0, 0), (2, 4))], fill=False), torch.zeros(3)
    outcomes = load_on([{"w": good}, {"w": wrong}], path)
    assert {type(outcome) for outcome in outcomes} == {ckpt.MismatchError}
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert good.local.unique().tolist() == [77]


def test_rank_local_on_as_many_ranks(path):
    states = [
        {"r": ckpt.RankLocal({"n": rank, "t": torch.full((rank,), rank)})} for rank in range(3)
    ]
    succeed(save_on(states, path))
    loaded = succeed(load_on([{"r": ckpt.RankLocal(None)} for _ in range(3)], path))
    for rank, state in enumerate(loaded):
        assert state["r"].value["n"] == rank
        assert state["r"].value["t"].tolist() == [rank] * rank
    assert [value["n"] for value in ckpt.read(path)["r"].values] == [0, 1, 2]


def test_rank_local_on_another_number_of_ranks(path):
    succeed(save_on([{"r": ckpt.RankLocal([rank, torch.tensor(rank)])} for rank in range(4)], path))
    outcomes = load_on([{"r": ckpt.RankLocal(None)} for _ in range(2)], path)
    for outcome in outcomes:
        assert isinstance(outcome, ckpt.MismatchError)
        assert "'r': saved by 4 ranks, loaded by 2: give `into` a RankLocal" in str(outcome)

    def every_other(values, rank, world_size):
        return [int(n) + int(t) for n, t in values[rank::world_size]]

    loaded = load_on([{"r": ckpt.RankLocal(None, reshard=every_other)} for _ in range(2)], path)
    assert [state["r"].value for state in succeed(loaded)] == [[0, 4], [2, 6]]


def test_rank_local_that_nobody_asks_for(path):
    ckpt.save(path, {"a": 1, "r": ckpt.RankLocal(3)})
    assert "only in the checkpoint (1):\n    'r'" in mismatch(path, {"a": 1})


def test_a_reshard_that_fails(path):
    succeed(save_on([{"r": ckpt.RankLocal(rank)} for rank in range(2)], path))

    def refuse(values, rank, world_size):
        raise ValueError("cannot split")

    with pytest.raises(ckpt.CheckpointError, match="ValueError: cannot split"):
        ckpt.load(path, {"r": ckpt.RankLocal(None, reshard=refuse)})


def test_paths_that_hold_nothing(tmp_path, path):
    ckpt.save(path, {"a": 1})
    with pytest.raises(ckpt.NotFoundError, match="did you mean step-1"):
        ckpt.read(f"{tmp_path}/step-2")
    with pytest.raises(ckpt.NotFoundError, match=r"the directory .*/nowhere does not exist"):
        ckpt.read(f"{tmp_path}/nowhere/step-1")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ckpt.NotFoundError, match="is a file; a checkpoint is a directory"):
        ckpt.read(tmp_path / "file")
    with pytest.raises(ckpt.CheckpointError, match="is not a checkpoint but holds some: step-1"):
        ckpt.read(tmp_path)
    (tmp_path / "latest").symlink_to(path)
    assert ckpt.read(tmp_path / "latest") == {"a": 1}


def test_an_expanded_view_is_not_filled_and_nothing_else_is(path):
    ckpt.save(path, {"a": torch.ones(3), "b": torch.ones(4)})
    into = {"a": torch.zeros(3), "b": torch.zeros(1).expand(4)}
    with pytest.raises(ckpt.MismatchError, match="'b': elements of `into` share memory"):
        ckpt.load(path, into=into)
    assert into["a"].tolist() == [0, 0, 0]
