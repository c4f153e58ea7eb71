"""A program that is written once and runs on one device and on a mesh, and what must then agree.

A program takes a `Place`: called with a tensor, it gives the tensor itself or a DTensor of it.
"""

from __future__ import annotations

import logging
import warnings

import torch
import vescale_dtensor as vd
from torch import nn
from vescale_comm.testing import device_mesh
from vescale_dtensor import Shard


class Place:
    """Where tensors go: `mesh` is None for one device."""

    def __init__(self, mesh=None):
        self.mesh = mesh

    def __call__(self, tensor, dp=None, tp=None, grad=False):
        if self.mesh is None:
            return tensor.clone().requires_grad_(grad)
        placements = [dp or Shard(0), tp or Shard(1)]
        leaf = tensor.clone().requires_grad_(grad)
        return vd.distribute_tensor(leaf, self.mesh, placements, src_data_rank=None)

    def parameter(self, tensor, dp=None, tp=None):
        return nn.Parameter(self(tensor, dp, tp))


def full_tensors(value):
    """Plain tensors in place of DTensors, at any depth."""
    if isinstance(value, vd.DTensor):
        return value.detach().full_tensor()
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {name: full_tensors(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [full_tensors(item) for item in value]
    return value


def differences(ours, dense, path="result", rtol=1e-4, atol=1e-5):
    """Where two results differ, in words."""
    if isinstance(dense, torch.Tensor):
        if not isinstance(ours, torch.Tensor) or ours.shape != dense.shape:
            return [f"{path}: {ours!r} is not {dense!r}"]
        try:
            torch.testing.assert_close(ours, dense, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as problem:
            return [f"{path}: {problem}"]
        return []
    if isinstance(dense, dict):
        ours, dense = list(ours.items()), list(dense.items())
    if isinstance(dense, list | tuple):
        if len(ours) != len(dense):
            return [f"{path}: {len(ours)} items, not {len(dense)}"]
        pairs = enumerate(zip(ours, dense, strict=True))
        found = [differences(*pair, f"{path}[{i}]", rtol, atol) for i, pair in pairs]
        return [words for each in found for words in each]
    if isinstance(dense, float):
        return [] if abs(ours - dense) < 1e-4 else [f"{path}: {ours} is not {dense}"]
    return [] if ours == dense else [f"{path}: {ours!r} is not {dense!r}"]


def check(program, **tolerance):
    """Run a program on one device and on the mesh dp=2 x tp=2, and compare what it returns."""
    mesh = device_mesh((2, 2), ("dp", "tp"))
    results = []
    for place in (Place(), Place(mesh)):
        torch.manual_seed(0)
        # torch deprecates some of what is run here itself; notes of ours tell nothing new.
        logging.disable(logging.WARNING)
        try:
            with warnings.catch_warnings(action="ignore"):
                results.append(full_tensors(program(place)))
        finally:
            logging.disable(logging.NOTSET)
    found = differences(results[1], results[0], **tolerance)
    assert not found, "\n".join(found)
