"""What operators are said to do; every operator of torch is tried by vescale-dtensor's cases."""

import torch
from vescale_comm.operators import arguments_of, effects_of


def test_running_statistics_are_writes():
    batch_norm = torch.ops.aten.native_batch_norm.default
    x, mean, var = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    for training, written in ((True, {"running_mean", "running_var"}), (False, set())):
        given = arguments_of(batch_norm, (x, None, None, mean, var, training, 0.1, 1e-5))
        assert effects_of(batch_norm, given).writes == written
    given = arguments_of(batch_norm, (x, None, None, None, None, True, 0.1, 1e-5))
    assert not effects_of(batch_norm, given)


def test_what_schemas_declare():
    x, out = torch.ones(2), torch.ones(2)
    add_ = torch.ops.aten.add_.Tensor
    assert effects_of(add_, arguments_of(add_, (x, x))) == ({"self"}, False, False)
    add = torch.ops.aten.add.out
    assert effects_of(add, arguments_of(add, (x, x), {"out": out})) == ({"out"}, False, False)
    assert not effects_of(torch.ops.aten.add.Tensor, {"self": x, "other": x})
    assert effects_of(torch.ops.aten.rand.default, {"size": [2]}).draws
    generator = torch.Generator()
    assert effects_of(torch.ops.aten.rand.generator, {"size": [2], "generator": generator}).draws
    assert effects_of(torch.ops._c10d_functional.wait_tensor.default, {"tensor": x}).sends
