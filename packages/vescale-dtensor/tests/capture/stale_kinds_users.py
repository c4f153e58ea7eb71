"""Kinds of state that users keep on libraries, in modules, tensors and objects of their own."""

import sys

import torch
import vescale_dtensor as vd
from stale_kinds import Settings, factor, in_place, kind, mutated
from stale_kinds_asked import asked, setting
from stale_kinds_world import KINDS as KINDS
from torch import fx, nn

# --- what users keep on libraries, and what they put in its place

KEPT, TABLE = Settings(), {"scale": 1.0}


def kept_there(number):
    KEPT.factor = TABLE["scale"] = number + 1.0


LIBRARIES = {"torch.nn": nn, "sys": sys, "tensors": torch.Tensor, "DTensors": vd.DTensor}
for title, holder in LIBRARIES.items():
    holder.stale_box, holder.stale_table = KEPT, TABLE
    asked(f"object kept on {title}", kept_there, lambda holder=holder: holder.stale_box.factor)
    asked(f"table kept on {title}", kept_there, lambda holder=holder: holder.stale_table["scale"])
setting(
    "method added to DTensors",
    lambda n: setattr(vd.DTensor, "stale_times", lambda self: self * (n + 1)),
    lambda x: x.stale_times(),
)


# --- modules and tensors


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def called(x, module):
    return module(x)


def maybe_scaled(x, module):
    return x * module.scale if hasattr(module, "scale") else x


kind(
    "buffer that is there later",
    linear,
    mutated(lambda v: v.register_buffer("scale", torch.full((4,), 3.0))),
    maybe_scaled,
)
kind(
    "view of a parameter whose data are swapped",
    lambda: (lambda module: (module, module.weight.detach()[0]))(linear()),
    mutated(lambda v: setattr(v[0].weight, "data", v[0].weight.data * 2)),
    lambda x, v: v[0](x) * v[1],
)


class Own(torch.Tensor):
    factor = 2.0


in_place(
    "class of an own tensor",
    lambda: (setattr(Own, "factor", 2.0), torch.ones(4).as_subclass(Own))[1],
    lambda v: setattr(Own, "factor", 3.0),
    factor,
)
TENSORS = {
    "resized": (lambda v: v.resize_(5 - v.numel()).fill_(3), lambda x, v: x * v.sum()),
    "set to another": (lambda v: v.set_(v.clone() * 3), lambda x, v: x * v),
    "of other data": (lambda v: setattr(v, "data", v.data.double() + 1), lambda x, v: x * v),
    "moved in its storage": (
        lambda v: v.set_(v.untyped_storage(), 1, (2,)),
        lambda x, v: x * (1 + v.storage_offset()),
    ),
    "of one more dim": (lambda v: v.unsqueeze_(0), lambda x, v: x * v.dim()),
}
for title, (change, use) in TENSORS.items():
    kind(f"tensor {title}", lambda: torch.ones(4), mutated(change), use)


class Doubling(nn.Module):
    def forward(self, x):
        return x * 2


def rewritten(module):
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.args = (node.args[0], node.args[1] + 1)
    module.recompile()


for title, use in {"called": called, "interpreted": lambda x, v: fx.Interpreter(v).run(x)}.items():
    kind(
        f"graph of a module, {title}",
        lambda: fx.symbolic_trace(Doubling()),
        mutated(rewritten),
        use,
    )
