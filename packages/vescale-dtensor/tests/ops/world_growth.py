"""Counts the Python calls that known calls make on one rank of a large world.

The world is torch's fake process group: nothing is sent, and what would arrive is whatever memory
holds. A process of its own runs this, so that its memory is filled with zeros (`MALLOC_PERTURB_`)
and the fake world is nobody else's. It prints one line of JSON: {case: [calls on each world]}.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
import warnings
import zlib

import torch
import torch.distributed as dist
import vescale_dtensor as vd
from rule_cases import CASES
from rule_fuzz import tensors, values
from torch.testing._internal.distributed.fake_pg import FakeStore
from vescale_dtensor import DTensor, Partial, RaggedShard, Replicate, Shard
from vescale_dtensor._layout.layout import Layout
from vescale_dtensor._layout.local_shards import box_of
from vescale_dtensor._layout.spec import order_of

# On both, the last rank holds nothing of the dims that the cases have, and rank 0 one index.
WORLDS = (64, 1024)


def counts(names, seed, timeout):
    """Per case the calls in its second call, on each world; where it raised, the error's name."""
    environment = {**os.environ, "MALLOC_PERTURB_": "255", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(seed)]
    done = subprocess.run(
        command,
        input=json.dumps(names),
        env=environment,
        timeout=timeout,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    return json.loads(done.stdout.splitlines()[-1])


def python_calls(work):
    """How many functions are called, Python's and C's, but for those that send a message.

    A collective of unequal parts has a message for each rank, which torch is called with.
    """
    count, sending = 0, None

    def note(frame, event, argument):
        nonlocal count, sending
        if sending is not None:
            if event == "return" and frame is sending:
                sending = None
        elif event in ("call", "c_call"):
            count += 1
            code = frame.f_code
            if event == "call" and code.co_name == "launch" and "vescale_comm" in code.co_filename:
                sending = frame

    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def layout_words(op, ndim, chosen):
    """For each operand what each mesh axis does with it, in words that fit a mesh of any size."""
    found = []
    for operand in op.operands:
        dims = range(len(operand.shape))
        options = ["replicated", *(("shard", d) for d in dims), *(("ragged", d) for d in dims)]
        if operand.kind != "b" and operand.partial:
            options.append("partial")
        words = []
        for _ in range(ndim):
            word = chosen.choice(options)
            # What a ragged shard leaves need not be divisible again.
            taken = [each[1] for each in words if word[0] == "ragged" or each[0] == "ragged"]
            words.append("replicated" if word[1] in taken else word)
        found.append(words)
    return found


def placement(word, shape, count):
    """The placement of one axis: ragged ones give the first and the last coordinate something."""
    if word == "replicated":
        return Replicate()
    if word == "partial":
        return Partial()
    kind, dim = word
    if kind == "shard" or not shape[dim]:
        return Shard(dim)
    first = shape[dim] // 3
    return RaggedShard((dim,), [first, *[0] * (count - 2), shape[dim] - first])


def operands(op, words, mesh, seed):
    """DTensors of the values that a case has, in these layouts. Nothing is sent."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for operand, each in zip(op.operands, words, strict=True):
        x = values(operand, generator)
        placements = [placement(w, x.shape, n) for w, n in zip(each, mesh.shape, strict=True)]
        layout = Layout.of(mesh, placements, order_of(tuple(x.shape), x.stride()))
        local = x
        for dim, (low, high) in enumerate(box_of(layout, tuple(x.shape), layout.coordinate)):
            local = local.narrow(dim, low, high - low)
        wants = operand.grad and x.is_floating_point()
        shape, stride = tuple(x.shape), x.stride()
        whole = DTensor.from_local(local.clone(), mesh, placements, shape=shape, stride=stride)
        found.append(whole.requires_grad_(wants))
    return found


def forward_and_backward(op, leaves):
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(0)
    # Not the leaves themselves: cases write in place.
    got = op.call(*[leaf * 1 if leaf.requires_grad else leaf.clone() for leaf in leaves])
    roots = [x for x in tensors(got) if x.requires_grad and x.numel()]
    if roots:
        torch.autograd.backward(roots, [torch.ones(x.shape, dtype=x.dtype) for x in roots])


def measured(name, mesh, seed):
    """Calls of the second call of one case; the name of the error, if something was raised."""
    op, chosen = CASES[name], random.Random(zlib.crc32(f"{name} {seed} {mesh.ndim}".encode()))
    try:
        leaves = operands(op, layout_words(op, mesh.ndim, chosen), mesh, seed)
        forward_and_backward(op, leaves)
        return python_calls(lambda: forward_and_backward(op, leaves))
    except Exception as error:  # zeros that are refused, or a layout
        return type(error).__name__


def on_world(world, names, seed):
    """Measure cases on the first rank for even seeds, on the last for odd ones."""
    rank = (world - 1) * (seed % 2)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    inner = 1 << (world.bit_length() - 1) // 2
    meshes = [
        vd.init_device_mesh("cpu", (world,), mesh_dim_names=("x",)),
        vd.init_device_mesh("cpu", (world // inner, inner), mesh_dim_names=("x", "y")),
    ]
    found = {f"{name}, {m.ndim}": measured(name, m, seed) for name in names for m in meshes}
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    asked = json.loads(sys.stdin.read())
    by_world = [on_world(world, asked, int(sys.argv[1])) for world in WORLDS]
    print(json.dumps({case: [each[case] for each in by_world] for case in by_world[0]}))
