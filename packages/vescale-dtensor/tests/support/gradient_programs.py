"""Random programs that handle gradients by hand, on one device and on DTensors.

A program is a list of steps (an action's name, and numbers that choose its operands). `run` plays
it and returns what it read. On one device this is the oracle. An action that torch refuses ends the
program on both sides; one that only DTensors refuse ends it, and is counted.
"""

import random

import torch
import vescale_dtensor as vd
from vescale_dtensor import Replicate, Shard, UnsupportedError

W = torch.linspace(-1, 1.5, 6).reshape(3, 2)
X = torch.linspace(-2, 3, 15).reshape(5, 3)
PLACEMENTS = (Replicate(), Replicate(), Shard(0), Shard(1))


class Player:
    """The state of one run: two leaves, and what the program has kept."""

    def __init__(self, place):
        self.x = place(X, "x")
        self.w = [place(W * (i + 1), "w").requires_grad_() for i in range(2)]
        self.kept, self.read, self.handles = [], [], []

    def loss(self, w, kind):
        used = (
            lambda: (self.x @ w).sum(),
            lambda: (self.x @ w).square().sum(),
            lambda: w.sum() * 3,
            lambda: (self.x @ w).sin().sum() + (w * w).sum(),
        )
        return used[kind % 4]()

    def see(self, tensor):
        whole = tensor.full_tensor() if isinstance(tensor, vd.DTensor) else tensor
        self.read.append(whole.detach().clone())

    def keep(self, tensor):
        self.kept.append(tensor)
        del self.kept[:-6]

    def pick(self, number):
        return self.kept[number % len(self.kept)] if self.kept else None


ACTIONS = {}


def action(weight):
    def add(function):
        ACTIONS[function.__name__] = function, weight
        return function

    return add


@action(8)
def backward(p, w, n):
    p.loss(w, n).backward()


@action(1)
def backward_recorded(p, w, n):
    p.loss(w, 1).backward(create_graph=True)


@action(2)
def backward_of_inputs(p, w, n):
    hidden = w * 2
    p.loss(hidden, n).backward(inputs=[w, hidden] if n % 2 else [w])
    if n % 2:
        p.keep(hidden.grad)


@action(1)
def backward_of_both(p, w, n):
    (p.loss(p.w[0], n) + p.loss(p.w[1], n // 4)).backward()


@action(5)
def keep_gradient(p, w, n):
    if w.grad is not None:
        p.keep(w.grad)


@action(5)
def keep_view(p, w, n):
    source = w.grad if n % 3 else p.pick(n)
    if source is not None and source.ndim == 2:
        views = (
            lambda: source[0],
            lambda: source.t(),
            lambda: source.detach(),
            lambda: source.data,
            lambda: source.view(-1) if source.is_contiguous() else source,
            lambda: source[:, 1:],
            lambda: source.unsqueeze(0),
        )
        p.keep(views[n % 7]())


@action(2)
def keep_clone(p, w, n):
    if w.grad is not None:
        p.keep(w.grad.clone() if n % 2 else w.grad * 2)


@action(4)
def drop(p, w, n):
    if n % 3 == 0:
        w.grad = None
    elif n % 3 == 1:
        torch.optim.SGD([w], lr=0.1).zero_grad(set_to_none=bool(n & 4))
    else:
        del w.grad


@action(4)
def assign(p, w, n):
    value = p.pick(n)
    if value is not None and value.shape == w.shape:
        w.grad = value
        # What is partial gets the total, in new memory: other tensors of the former are not linked.
        p.kept = [value]


@action(2)
def assign_own(p, w, n):
    if w.grad is not None:
        w.grad = (w.grad, w.grad.detach(), w.grad.clone(), w.grad.data)[n % 4]


@action(1)
def assign_other(p, w, n):
    other = p.w[1 if w is p.w[0] else 0]
    if other.grad is not None:
        w.grad = other.grad


@action(1)
def assign_new(p, w, n):
    w.grad = torch.ones_like(w) * 3


@action(1)
def set_data_of_gradient(p, w, n):
    value = p.pick(n)
    if w.grad is not None and value is not None and value.shape == w.shape:
        w.grad.data = value
        p.kept = [value]


@action(4)
def write(p, w, n):
    target = w.grad if n % 2 else p.pick(n)
    if target is not None:
        with torch.no_grad():
            (target.zero_, lambda: target.mul_(0.5), lambda: target.add_(1.0), target.sin_)[
                n // 2 % 4
            ]()


@action(4)
def read(p, w, n):
    source = w.grad if n % 2 else p.pick(n)
    if source is not None:
        p.see(source * source if n % 4 < 2 else source)


@action(3)
def total(p, w, n):
    """The gradient stays what it is to read; what it owes is summed, or is not."""
    if isinstance(w, vd.DTensor):
        vd.gradient_total(w)


@action(1)
def float_and_back(p, w, n):
    gradient = w.grad
    w.data = w.data.double().float()
    w.grad = gradient


@action(2)
def step(p, w, n):
    torch.optim.SGD(p.w, lr=0.01, momentum=0.9 if n % 2 else 0.0).step()


@action(1)
def clip(p, w, n):
    torch.nn.utils.clip_grad_norm_(p.w, 1.0)


@action(2)
def hook(p, w, n):
    def reads(gradient):
        if w.grad is not None and n % 3 == 0:
            p.see(w.grad * w.grad)
        p.see(gradient)
        return gradient * 2 if n % 2 else None

    p.handles.append(w.register_hook(reads))


@action(1)
def post_hook(p, w, n):
    p.handles.append(w.register_post_accumulate_grad_hook(lambda v: p.see(v.grad)))


@action(2)
def unhook(p, w, n):
    if p.handles:
        p.handles.pop(n % len(p.handles)).remove()


@action(3)
def retain(p, w, n):
    hidden = w * 2
    hidden.retain_grad()
    loss = p.loss(hidden, n)
    if n % 2:
        hidden.register_hook(lambda g: p.see(g))
        loss.backward(retain_graph=True)
    loss.backward()
    p.keep(hidden.grad)


@action(2)
def ask(p, w, n):
    hidden = w * 2
    found = torch.autograd.grad(p.loss(hidden, n), [w, hidden], retain_graph=True)
    for gradient in found:
        p.keep(gradient)


@action(1)
def freeze(p, w, n):
    w.requires_grad_(False)
    if n % 2 and w.grad is not None:
        w.grad = w.grad * 2
    w.requires_grad_()


@action(1)
def data_of_leaf(p, w, n):
    w.data = (w * 0.5).detach()


def random_program(seed):
    rng = random.Random(seed)
    names = list(ACTIONS)
    weights = [ACTIONS[name][1] for name in names]
    chosen = rng.choices(names, weights, k=rng.randint(4, 16))
    return [("backward", 0, rng.randrange(84))] + [
        (name, rng.choice((0, 0, 0, 1)), rng.randrange(84)) for name in chosen
    ]


def random_placements(seed, ndim):
    rng = random.Random(seed)
    return {
        "w": [rng.choice(PLACEMENTS) for _ in range(ndim)],
        "x": [rng.choice(PLACEMENTS) for _ in range(ndim)],
    }


def run(program, place):
    """What a program reads, step by step; the exception that ended it, or None; where it ended."""
    player = Player(place)
    seen, error = [], None
    for name, which, number in program:
        try:
            ACTIONS[name][0](player, player.w[which], number)
        except (RuntimeError, UnsupportedError, TypeError) as raised:
            error = raised
            break
        seen.append(player.read)
        player.read = []
    if error is None:
        for tensor in (*player.kept, *(w.grad for w in player.w)):
            if tensor is not None:
                player.see(tensor)
        seen.append(player.read)
    return seen, error


def difference(program, ours, dense):
    """In which step a program differs from one device, in words; None: in none."""
    (seen, error), (expected, dense_error) = ours, dense
    if error is not None and dense_error is None and not isinstance(error, UnsupportedError):
        return f"step {len(seen)} {program[len(seen)]} raised {error!r}"
    if error is not None and dense_error is not None and len(seen) > len(expected):
        return f"one device refused step {len(expected)}"
    for index, (mine, theirs) in enumerate(zip(seen, expected, strict=False)):
        step = program[index] if index < len(program) else "the end"
        if len(mine) != len(theirs):
            return f"step {index} {step} read {len(mine)} tensors, not {len(theirs)}"
        for one, two in zip(mine, theirs, strict=True):
            if one.shape != two.shape or not torch.allclose(one, two, rtol=1e-4, atol=1e-4):
                return f"step {index} {step}: {one.tolist()}, not {two.tolist()}"
    return None


def check_seeds(rank, world, sizes, seeds):
    """Differences of the programs of these seeds on this rank, and how many ended in refusals."""
    mesh = vd.init_device_mesh("cpu", sizes)
    found, refused = [], {}
    for seed in seeds:
        program, placements = random_program(seed), random_placements(seed, len(sizes))

        def place(tensor, role, placements=placements):
            return vd.distribute_tensor(tensor.clone(), mesh, placements[role], src_data_rank=None)

        ours = run(program, place)
        dense = run(program, lambda tensor, role: tensor.clone())
        if ours[1] is not None and dense[1] is None:
            what = f"{program[len(ours[0])][0]}: {str(ours[1])[:110]}"
            refused[what] = refused.get(what, 0) + 1
        if (words := difference(program, ours, dense)) is not None:
            found.append((seed, sizes, placements, words, program))
    return found, refused


MESHES = ((2,), (3,), (2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2, 2))
