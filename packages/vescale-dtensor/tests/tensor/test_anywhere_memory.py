"""What shares memory, what is a copy, and in what order elements lie: as on one device.

Each program runs wherever its tensors may lie; see `anywhere`.
"""

import numpy as np
import pytest
import torch
from anywhere import check
from named_cases import named_cases

A = torch.arange(24.0).reshape(6, 4)
COPIES = {
    "steps": lambda x: x[::2].contiguous(),
    "columns": lambda x: x[:, :2].contiguous(),
    "a column": lambda x: x[:, 0].contiguous(),
    "expanded": lambda x: x[:1].expand(3, 4).contiguous(),
    "transposed": lambda x: x.t().contiguous(),
    "a chunk": lambda x: x.chunk(2, 1)[1].contiguous(),
    "unfolded": lambda x: x.unfold(1, 2, 1).contiguous(),
    "a row of columns": lambda x: x[:, 1:][::2].contiguous(),
    "a slice, cloned": lambda x: x[:, 1:].clone(),
}
ALIASES = {
    "rows": lambda x: x[1:].contiguous(),
    "one row": lambda x: x[2].contiguous(),
    "part of a row": lambda x: x[2, 1:].contiguous(),
    "transposed twice": lambda x: x.t().t().contiguous(),
    "a piece": lambda x: x.split(2)[1].contiguous(),
    "cast to itself": lambda x: x[:, 1:].to(torch.float32),
    "the same shape": lambda x: x.reshape(6, 4),
}
VIEWS = [
    lambda x: x[::2],
    lambda x: x[:, 1:],
    lambda x: x[1:],
    lambda x: x[2],
    lambda x: x[:, 2],
    lambda x: x.expand(2, 6, 4),
    lambda x: x.t(),
    lambda x: x[:, 1:].t(),
    lambda x: x[:, 1:][1],
    lambda x: x[:, 1:][::2, 0],
    lambda x: x.unbind(1)[0],
    lambda x: x.split(2, 1)[1],
    lambda x: x[:, :2].detach(),
    lambda x: x[:, :2].clone(),
    lambda x: x[:, :2] + 1,
    lambda x: x[:, :2].view(3, 2, 2),
    lambda x: x.view(2, 3, 4)[:, 1:],
    lambda x: x[:, 1:].unsqueeze(-1),
    lambda x: x.diagonal(),
    lambda x: x.permute(1, 0)[1:],
    lambda x: x[:, 1:].sum(0),
]


def written(place, take):
    x = place(A)
    for _ in range(3):  # the first call, and calls that are known by then
        taken = take(x)
        taken.add_(100)
    return x, taken


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_one_on_every_rank(name):
    check(lambda place: written(place, COPIES[name]))


@pytest.mark.parametrize("name", ALIASES)
def test_what_shares_memory_is_written_through(name):
    check(lambda place: written(place, ALIASES[name]))


def test_strides_are_those_of_one_device():
    check(lambda p: [(v(x).stride(), v(x).is_contiguous()) for x in [p(A)] * 2 for v in VIEWS])


PROGRAMS, program = named_cases()


@program
def nothing_is_cached_past_a_write_to_data(place):
    rows = place(A).sin().sum(0)
    first = rows.cos().sum() + rows.exp().sum()
    rows.data.add_(1)
    return first, rows.cos(), rows.exp(), rows


@program
def nothing_is_cached_past_set(place):
    rows = place(A).sum(0)
    first = rows.sin()
    rows.set_(place(A[0]))
    second = rows.sin()
    rows.copy_(place(A[1]))
    return first, second, rows.sin()


@program
def inference_and_training_use_one_activation(place):
    x = place(A / 24, grad=True)
    inner = x.sin()
    with torch.inference_mode():
        seen = [inner @ place(A.t()), inner.softmax(0), inner.softmax(1)]
    ((inner @ place(A.t())).sum() + inner.softmax(0).square().sum()).backward()
    return seen, x.grad


@program
def numbers_of_numpy_are_numbers(place):
    x = place(A)
    one = np.float32(1)
    return [
        x + one,
        x - np.int64(2),
        one - x.sum(0),
        x.sum() * np.float64(2),
        torch.add(x, one, alpha=np.int32(3)),
        x.clamp(max=np.float32(5)),
    ]


@program
def arrays_index(place):
    x = place(A)
    taken = x[np.array([0, 2])], x[:, np.array([True, False, True, True])]
    x[np.array([1, 3])] = 7.0
    return taken, x


@program
def tensors_of_no_dims_index(place):
    x, at = place(A), place(torch.tensor(2))
    return x[at], x[at, at], x[at - 1, 1:], x[:, at]


@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_anywhere(name):
    check(PROGRAMS[name])
