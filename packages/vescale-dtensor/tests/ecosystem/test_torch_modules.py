"""Modules of torch, converted, tied or loaded, give what one device gives.

Each program runs on one device and on dp=2 x tp=2, and all that it returns is compared.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from named_cases import named_cases
from one_device import check
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential
from torch_library import W, X, batch, linear, network
from vescale_comm.testing import on_ranks
from vescale_dtensor import Replicate, Shard

PROGRAMS, program = named_cases()


@program
def functional_calls(place):
    model = network(place)
    doubled = {name: p * 2 for name, p in model.named_parameters()}
    result = torch.func.functional_call(model, doubled, (batch(place),))
    result.square().sum().backward()
    detached = {name: p.detach() for name, p in doubled.items()}
    with warnings.catch_warnings(action="ignore"):
        stateless = nn.utils.stateless.functional_call(model, detached, (batch(place),))
    return result, stateless, [p.grad for p in model.parameters()]


@program
def modules_convert(place):
    model = network(place)
    model.half().float().double().requires_grad_(False).requires_grad_(True)
    model._apply(lambda t: t * 2)
    assert all(p.is_leaf and isinstance(p, nn.Parameter) for p in model.parameters())
    twin = copy.deepcopy(model)
    model.load_state_dict({k: v * 2 for k, v in twin.state_dict().items()}, assign=True)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    return list(model.parameters()), list(twin.parameters())


@program
def modules_convert_by_swapping(place):
    module = linear(place)
    with torch.no_grad():
        module(batch(place))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.double()
        module.load_state_dict({k: v * 2 for k, v in module.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    result = module(batch(place, X.double()))
    result.sum().backward()
    return result, module.weight.grad


@program
def deferred_initialisation(place):
    with torch.device("meta"):
        module = nn.Linear(4, 6)
    if place.mesh is not None:
        module.weight = place.parameter(torch.empty(6, 4, device="meta"))
    module.to_empty(device="cpu")
    torch.manual_seed(3)
    module.reset_parameters()
    return list(module.parameters())


@program
def tied_weights(place):
    embedding, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight = place.parameter(W, Replicate(), Shard(0))
    index = torch.tensor([[0, 5, 2], [1, 1, 3]])
    result = head(embedding(index))
    F.cross_entropy(result.flatten(0, 1), index.flatten()).backward()
    return result, embedding.weight.grad, head.weight is embedding.weight


@program
def lazy_and_normalised_modules(place):
    torch.manual_seed(0)
    lazy, norm = nn.LazyLinear(6), nn.BatchNorm1d(4)
    results = [lazy(batch(place)), norm(batch(place)), norm(batch(place))]
    return results, norm.eval()(batch(place)), list(norm.buffers())


@program
def checkpoints_of_segments(place):
    model, x = network(place), place(X, Shard(0), Replicate(), grad=True)
    result = checkpoint_sequential(model, 2, x, use_reentrant=False)
    result.square().sum().backward()
    return result, x.grad, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(4)
def test_programs(name):
    check(PROGRAMS[name])
