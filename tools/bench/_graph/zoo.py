"""Nine models of ROAM's evaluation, at their real sizes, and a training step of each as a graph.

Their layers are those of the papers; no weights are stored: parameters, moments and batches are
fake tensors. Forward, cross-entropy, backward, and Adam in place once all gradients are there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tools.bench._graph.models import Block, update


def _conv(before: int, after: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(after)]


def _alexnet() -> nn.Module:
    layers: list[nn.Module] = []
    before = 3
    for width, size, stride, pool in (
        *((64, 11, 4, True), (192, 5, 1, True), (384, 3, 1, False), (256, 3, 1, False)),
        (256, 3, 1, True),
    ):
        layers += [nn.Conv2d(before, width, size, stride, 2 if size > 3 else 1), nn.ReLU()]
        layers += [nn.MaxPool2d(3, 2)] if pool else []
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(6), nn.Flatten(), *_classifier(9216))


def _classifier(wide: int) -> list[nn.Module]:
    return [
        *(nn.Dropout(), nn.Linear(wide, 4096), nn.ReLU()),
        *(nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)),
    ]


def _vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    before = 3
    for width, times in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(times):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2, 2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *_classifier(25088))


class _Squeeze(nn.Module):
    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, narrow, 1), nn.Conv2d(narrow, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1))))
        made: Tensor = x * scale.sigmoid()
        return made


class _Inverted(nn.Module):
    """An inverted residual; with `squeeze` as in EfficientNet."""

    def __init__(self, shape: _Stage, before: int, stride: int, act: Any, squeeze: bool) -> None:
        super().__init__()
        wide = before * shape.expand
        layers = [*_conv(before, wide, 1), act()] if shape.expand > 1 else []
        layers += [*_conv(wide, wide, shape.size, stride, wide), act()]
        layers += [_Squeeze(wide, max(1, before // 4))] if squeeze else []
        self.layers = nn.Sequential(*layers, *_conv(wide, shape.width, 1))
        self.adds = stride == 1 and before == shape.width

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return x + made if self.adds else made


class _Stage(NamedTuple):
    expand: int
    width: int
    times: int
    stride: int
    size: int


def _stages(*rows: tuple[int, int, int, int, int]) -> list[_Stage]:
    return [_Stage(*row) for row in rows]


def _inverted(
    stem: list[nn.Module], before: int, stages: list[_Stage], act: Any, last: int, squeeze: bool
) -> nn.Module:
    layers = stem
    for stage in stages:
        for at in range(stage.times):
            stride = stage.stride if at == 0 else 1
            layers = [*layers, _Inverted(stage, before, stride, act, squeeze)]
            before = stage.width
    end = [*_conv(before, last, 1), act(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *end, nn.Dropout(0.2), nn.Linear(last, 1000))


def _mobilenet_v2() -> nn.Module:
    stages = _stages(
        *((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3)),
        *((6, 96, 3, 1, 3), (6, 160, 3, 2, 3), (6, 320, 1, 1, 3)),
    )
    return _inverted([*_conv(3, 32, 3, 2), nn.ReLU6()], 32, stages, nn.ReLU6, 1280, False)


def _efficientnet_b0() -> nn.Module:
    stages = _stages(
        *((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3)),
        *((6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)),
    )
    return _inverted([*_conv(3, 32, 3, 2), nn.SiLU()], 32, stages, nn.SiLU, 1280, True)


def _mnasnet() -> nn.Module:
    stem = [*_conv(3, 32, 3, 2), nn.ReLU(), *_conv(32, 32, 3, 1, 32), nn.ReLU(), *_conv(32, 16, 1)]
    stages = _stages(
        *((3, 24, 3, 2, 3), (3, 40, 3, 2, 5), (6, 80, 3, 2, 5)),
        *((6, 96, 2, 1, 3), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)),
    )
    return _inverted(stem, 16, stages, nn.ReLU, 1280, False)


class _Transformer(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, causal: bool) -> None:
        super().__init__()
        blocks = (Block(width, heads, causal=causal) for _ in range(layers))
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(self.blocks(x))
        return made


class _Text(nn.Module):
    def __init__(
        self, width: int, heads: int, layers: int, length: int, words: int, causal: bool
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.body = _Transformer(width, heads, layers, causal)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.body(self.tokens(x) + self.places.weight))
        return made


class _ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.places = nn.Parameter(torch.zeros(1, 196, 768))
        self.body, self.head = _Transformer(768, 12, 12, False), nn.Linear(768, 1000)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.body(self.patches(x).flatten(2).mT + self.places).mean(1))
        return made


def _pictures(batch: int) -> tuple[Tensor, Tensor]:
    return torch.empty(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)


def _words(length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def make(batch: int) -> tuple[Tensor, Tensor]:
        x, y = (torch.zeros(batch, length, dtype=torch.long) for _ in range(2))
        return x, y

    return make


Make = tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]
ZOO: dict[str, Make] = {
    "AlexNet": (_alexnet, _pictures),
    "VGG-16": (_vgg16, _pictures),
    "MobileNet-v2": (_mobilenet_v2, _pictures),
    "EfficientNet-B0": (_efficientnet_b0, _pictures),
    "MNasNet": (_mnasnet, _pictures),
    "ViT-B": (_ViT, _pictures),
    "BERT-base": (lambda: _Text(768, 12, 12, 512, 30522, False), _words(512)),
    "GPT-2": (lambda: _Text(768, 12, 12, 1024, 50257, True), _words(1024)),
    "GPT2-XL": (lambda: _Text(1600, 25, 48, 1024, 50257, True), _words(1024)),
}


def traced_step(name: str, batch: int) -> fx.GraphModule:
    """The step's graph; its placeholders say what they are."""
    make, give = ZOO[name]
    with FakeTensorMode():
        model = make()
        parameters = [one.detach() for one in model.parameters()]
        moments = [(torch.empty_like(one), torch.empty_like(one)) for one in parameters]
        buffers = [one.detach() for one in model.buffers()]
        names = [one for one, _ in itertools.chain(model.named_parameters(), model.named_buffers())]

        def step(parameters: Any, moments: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
            leaves = [one.detach().requires_grad_() for one in parameters]
            state = dict(zip(names, [*leaves, *buffers], strict=True))
            out = torch.func.functional_call(model, state, (x,))
            loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
            update(parameters, torch.autograd.grad(loss, leaves), moments)
            return loss.detach()

        return make_fx(step)(parameters, moments, buffers, *give(batch))
