"""What capture refuses: for each row of the guide's table the functions that show it."""

import codecs
import datetime
import os
import random
import sys
import threading
import time
import uuid
import weakref
from functools import partial
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import vescale_dtensor as vd
import vescale_dtensor._capture
from capture_guards import spread
from function_cases import Gathered, Listed, Returned, one_after_the_other
from state_keepers import KEEPERS, Keeper, keep_buffer, keep_global, keep_nonlocal, keeping
from torch import nn
from torch.utils.checkpoint import checkpoint
from vescale_dtensor import Replicate

codecs.register_error("refused", lambda error: ("?", error.end))


def with_backward_hook():
    model = nn.Identity()
    model.register_full_backward_hook(lambda module, inward, outward: None)
    return model


COUNTED = torch.zeros(1)


def _counted(x):
    COUNTED.add_(1)
    return x.sin() + COUNTED


class Row:
    """A row of the table: what is refused, the words of the error, and what to write instead."""

    def __init__(self, what, words, instead, *functions):
        self.what, self.words, self.instead, self.functions = what, words, instead, functions

    def __str__(self):
        return f"| {self.what} | {self.words} | {self.instead} |"


class Built:
    """A function that is made where it runs: it needs a mesh."""

    def __init__(self, make):
        self.make = make


def reading(iterator):
    return lambda x: x * next(iterator)


def given(x, more):
    return x


def stepping():
    weight = nn.Parameter(spread(torch.ones(4)))
    optimizer = torch.optim.LBFGS([weight])

    def step(x):
        def closure():
            loss = (x * weight).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    return step


def weakly_held():
    keeper = Keeper()
    reference = weakref.ref(keeper)
    KEPT.append(keeper)
    return lambda x: x if reference() is None else x * 2


KEPT = []


def with_another_method(x):
    original = torch.Tensor.relu
    torch.Tensor.relu = lambda self: original(self) * 2
    try:
        return x.relu()
    finally:
        del torch.Tensor.relu


def scaling():
    weights = [nn.Parameter(spread(torch.ones(4), Replicate())) for _ in range(2)]
    optimizers = [torch.optim.Adam([w], fused=bool(i)) for i, w in enumerate(weights)]
    scaler = torch.amp.GradScaler("cpu")

    def step(x):
        scaler.scale((x * weights[0] * weights[1]).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    return step


def hooked(x):
    hidden, total = x * torch.ones(4, requires_grad=True), x.sum()
    hidden.register_hook(lambda gradient: gradient * total)
    return hidden


def unhooked(x):
    hidden = x * torch.ones(4, requires_grad=True)
    hidden.register_hook(lambda gradient: gradient * 2).remove()
    return hidden


def retained(x):
    hidden = x * torch.ones(4, requires_grad=True)
    hidden.retain_grad()


def with_history():
    hidden = spread(torch.ones(4)).requires_grad_() * 2
    return lambda x: x * hidden


def storing_a_gathered_parameter():
    stored = spread(torch.ones(4)).requires_grad_()

    def function(x):
        leaf = vd.local_leaf(stored)
        given = vd.gathered(stored, leaf.clone(), stored.device_mesh, stored.placements)
        vd.Gathering.watch_data([given], [])
        with torch.no_grad():
            given.data = given.detach() * 2
        return x * given

    return function


def returning_a_gradient():
    weight = spread(torch.ones(4)).requires_grad_()

    def function(x):
        (x * weight).sum().backward()
        return weight.grad

    return function


def inference(x):
    with torch.inference_mode():
        return x + 1


def leaving(change, new, old):
    """A function that leaves a setting changed, which the next call finds as it was."""

    def function(x):
        change(old)
        y = x * 2
        change(new)
        return y

    return function


def in_a_thread(x):
    found = []
    thread = threading.Thread(target=lambda: found.append(2.0))
    thread.start()
    thread.join()
    return x * found[0]


def tagged(x):
    y = x * 2
    y.tag = 3
    return y


CLOCK = partial(time.time)
GENERATOR = random.Random(0)
ROWS = [
    Row(
        "values of tensors in Python: `item()`, `float()`, `tolist()`, `numpy()`, `if loss > 3`",
        "reads the value of a tensor",
        "keep a tensor (`torch.where`, `masked_fill`), or read it outside",
        lambda x: x.sum().item(),
        lambda x: x if x.sum() > 3 else -x,
    ),
    Row(
        "the text of a plain tensor: `str(x)`",
        "the text of a tensor has its values",
        "`print(x)`, or log `x` itself",
        lambda x: x * len(str(x.to_local())),
    ),
    Row(
        "optimizers that call a closure (`LBFGS`)",
        "reads the value of a tensor",
        "`optimizer.step()` outside, or another optimizer",
        Built(stepping),
    ),
    Row(
        "a `GradScaler` with fused optimizers and others that count steps in Python",
        "some read values",
        "make all of them fused, or call the scaler outside",
        Built(scaling),
    ),
    Row(
        "gradient hooks that hold tensors or lists of one call, or assign variables around them",
        "replays would keep the first",
        "a tensor from outside, written in place (`copy_`)",
        hooked,
    ),
    Row(
        "gradient hooks that are registered and removed inside",
        "registered and removed inside",
        "register and remove them outside",
        unhooked,
    ),
    Row(
        "shapes that depend on values: `x[x > 0]`, `nonzero`, `unique`",
        "depends on values",
        "a mask (`torch.where`, `masked_fill`), or a call outside",
        lambda x: x[x > 0],
        lambda x: x.unique(),
    ),
    Row(
        "Python state that changes at every call: `self.last = loss`, `log.append(loss)`, "
        "counters, averages and recurrent state that are assigned",
        "in call after call",
        "return it, and keep it outside; or write in place: `self.average.lerp_(loss, 0.1)`",
        *map(keeping, KEEPERS),
        Built(keep_nonlocal),
        Built(keep_buffer),
        keep_global,
    ),
    Row(
        "iterators, generators, coroutines, frames, storages, `random.Random`, numpy generators, "
        "numpy arrays of more than 64 KiB, objects of C extensions",
        "whose state a replay would not see",
        "pass what is needed of it as an argument: `next(batches)`",
        reading(iter(range(9))),
        reading(number for number in range(9)),
        lambda x: x * len(str(GENERATOR)),
        lambda x: x * CLOCK(),
    ),
    Row(
        "functions that C calls and no variable holds: a handler of `codecs.register_error`",
        "called by code in C",
        "call it by a name",
        lambda x: x * len("ä".encode("ascii", "refused")),
    ),
    Row(
        "numpy arrays and iterators as arguments",
        "an argument is a",
        "`torch.as_tensor(array)`, `next(iterator)`",
        partial(given, more=numpy.ones(3)),
        partial(given, more=iter([1])),
    ),
    Row(
        "clocks, random numbers of Python and numpy, files, `input`, processes, the network, "
        "callers' frames, counts of references, `pickle.loads`, libraries and memory of `ctypes`",
        "gives another value each time",
        "call it outside, and pass what it gives as a tensor",
        lambda x: x * time.time(),
        lambda x: x * random.random(),
        lambda x: x * random.randint(1, 3),
        lambda x: x * (uuid.uuid4().int % 7),
        lambda x: x * datetime.datetime.today().second,
        lambda x: x * float(numpy.random.rand()),
        lambda x: x * float(numpy.random.default_rng().random()),
        lambda x: x * len(Path(__file__).read_text()),
        lambda x: x * len(os.listdir(".")),
        lambda x: x * os.system("true"),
        lambda x: x * len(sys._getframe(1).f_locals),
        lambda x: x * sys.getrefcount(CLOCK),
        lambda x: x * next(iter(time.time, None)),
    ),
    Row(
        "custom `autograd.Function`s that return their arguments, are defined inside, get DTensors "
        "in a list or return plain tensors for them, or get the result of another one together "
        "with what that one got",
        "custom autograd.Function",
        "`x.clone()`; an op between the two; `local_map(F.apply, …)`, which gives it local tensors",
        lambda x: Returned.apply(x) * 2,
        lambda x: Gathered.apply(x) * 2,
        lambda x: Listed.apply([x]) * 2,
        lambda x: one_after_the_other(x * torch.ones(4, requires_grad=True)),
    ),
    Row(
        "full backward hooks of modules",
        "custom autograd.Function",
        "hooks of tensors (`x.register_hook`); `torch.library.custom_op`",
        lambda x: with_backward_hook()(x * torch.ones(4, requires_grad=True)) * 2,
    ),
    Row(
        "tensors made where torch's overrides do not see it: `torch.from_numpy`, C++ extensions",
        "that torch's overrides do not see",
        "`torch.library.custom_op`, or pass the tensor as an argument",
        lambda x: x + torch.from_numpy(numpy.ones(4, dtype="f")),
    ),
    Row(
        "`torch.func`, `vmap`, forward mode, `make_fx`, `torch.jit.trace`, fake tensors",
        "is active inside",
        "call it outside, and pass what it gives",
        lambda x: x * torch.func.grad(torch.sum)(torch.ones(4)),
        lambda x: x * torch.vmap(torch.neg)(torch.ones(4)),
    ),
    Row(
        "sparse tensors, and others without strides",
        "that is not strided",
        "call it outside, and pass what it gives",
        lambda x: x * torch.eye(4).to_sparse().to_dense().sum(0),
    ),
    Row(
        "collectives of `torch.distributed`",
        "raw collectives",
        "those of `vescale_comm`, or `redistribute`",
        lambda x: dist.all_reduce(x.to_local().clone()),
    ),
    Row(
        "seeds that are set inside",
        "a random generator was moved",
        "set them outside",
        lambda x: torch.nn.functional.dropout(x + torch.manual_seed(3).initial_seed()),
        lambda x: (x * 2, torch.manual_seed(3))[0],
    ),
    Row(
        "torch's activation checkpointing inside",
        "saved-tensor hooks",
        "`vescale_dtensor.checkpoint(f, x)`, a plan's `checkpoint=`, `checkpoint(capture(f), x)`",
        lambda x: checkpoint(torch.sin, x * torch.ones(4, requires_grad=True), use_reentrant=False),
    ),
    Row(
        "writes to tensors from outside, in what backward computes again",
        "that backward computes again",
        "write outside of the region",
        lambda x: vd.checkpoint(_counted, x * torch.ones(4, requires_grad=True)),
    ),
    Row(
        "inference mode, grad mode, default dtype, policy of random numbers, choice of kernels "
        "that the function leaves changed",
        "Change it outside",
        "change it around the captured function",
        inference,
        leaving(torch.set_grad_enabled, False, True),
        leaving(torch.set_default_dtype, torch.float64, torch.float32),
        leaving(torch.use_deterministic_algorithms, True, False),
        leaving(torch.set_num_threads, 2, 1),
    ),
    Row(
        "threads that start inside",
        "a thread is started inside",
        "start it outside, and pass what it gives",
        in_a_thread,
    ),
    Row(
        "profilers that start or stop inside",
        "a profiler is switched on or off inside",
        "profile around the captured function",
        lambda x: (sys.setprofile(None), x * 2)[1],
    ),
    Row(
        "what no guard compares of a tensor: `_version`, `_base`, `output_nr`, `is_shared()`, "
        "`is_conj()`",
        "that a replay would not renew",
        "ask outside, and pass the answer",
        lambda x: x * x.to_local()._version,
        lambda x: x * x.to_local().is_shared(),
    ),
    Row(
        "parameters of lazy modules that are not initialized",
        "before it is initialized",
        "call the function itself once before",
        Built(lambda: nn.LazyLinear(4)),
    ),
    Row(
        "objects that only a weak reference leads to",
        "only the weak reference",
        "hold them by a reference that is not weak, where the function sees it",
        Built(weakly_held),
    ),
    Row(
        "functions that torch has written in Python, and methods of `torch.Tensor`, that have been "
        "replaced",
        "has been replaced",
        "call the function that replaces it by its own name",
        with_another_method,
    ),
    Row(
        "attributes that are set on a result",
        "on which the function sets",
        "return them beside the tensor",
        tagged,
    ),
    Row(
        "`retain_grad()` of a tensor inside",
        "a replay makes no such tensor",
        "return the tensor, and call `retain_grad()` on what is returned",
        retained,
    ),
    Row(
        "tensors from outside with an autograd history",
        "Pass it as an argument",
        "pass it as an argument, or `detach()` it",
        Built(with_history),
    ),
    Row(
        "`p.data = value` of a parameter that ZeRO gathers for each call",
        "Write into it: p",
        "`p.copy_(value)` under `no_grad`",
        Built(storing_a_gathered_parameter),
    ),
    Row(
        "`p.grad` as a result",
        "read p.grad after",
        "read it after the call",
        Built(returning_a_gradient),
    ),
    Row(
        "results of a class that neither pytree knows nor attributes make up: an iterator, a set, "
        "an exception, a list of a class of your own",
        "is returned, of which each call",
        "a tuple, list, dict or dataclass",
        lambda x: {x.dim()},
        lambda x: iter([x]),
        lambda x: [x].__getitem__,
        lambda x: lambda: x.dim(),
        ValueError,
    ),
    Row(
        "one list, dict or dataclass in two places of the result",
        "is returned in two places",
        "return it once",
        lambda x: [[x * 2]] * 2,
    ),
]
