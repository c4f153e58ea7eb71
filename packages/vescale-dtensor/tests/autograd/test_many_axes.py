"""Gradients of activations with more replicated axes than one node has aliases for, counted once.

A node makes aliases for the sets of three axes; uses that vary on a fourth get a node of their own.
"""

import torch
import vescale_dtensor as vd
from on_mesh import on_mesh
from vescale_dtensor import Replicate, Shard


def every_way(mesh):
    whole = [Replicate()] * 4
    source = vd.distribute_tensor(torch.arange(32.0).reshape(16, 2), mesh, [Shard(0), *whole[1:]])
    source.requires_grad_()
    matrix = torch.arange(256.0).reshape(16, 16)
    expected = (matrix.sum(0) * 5)[:, None].expand(16, 2)
    found = {}

    def ratio(tensor):
        return (tensor.full_tensor() / expected).unique().tolist()

    def hidden_and_loss():
        hidden = (source * 2).redistribute(placements=whole)
        matrices = [
            vd.distribute_tensor(
                matrix, mesh, [Shard(0) if i == axis else Replicate() for i in range(4)]
            )
            for axis in range(5)  # the last one varies nowhere
        ]
        terms = [(x @ hidden).sum().redistribute(placements=whole) for x in matrices]
        return hidden, sum(terms)

    hidden, loss = hidden_and_loss()
    found["grad"] = ratio(torch.autograd.grad(loss, hidden)[0])
    hidden, loss = hidden_and_loss()
    hidden.register_hook(lambda gradient: found.update(hook=ratio(gradient)))
    hidden.retain_grad()
    loss.backward()
    found["retained"] = ratio(hidden.grad)
    found["leaf"] = ratio(source.grad / 2)
    hidden, loss = hidden_and_loss()
    loss.backward(inputs=[hidden])
    found["inputs"] = ratio(hidden.grad)
    return found


def test_four_replicated_axes():
    for found in on_mesh((2, 2, 2, 2), every_way):
        assert found == {k: [1.0] for k in ("grad", "hook", "retained", "leaf", "inputs")}
