"""Draws what functions would draw of a tensor with rows, where this rank has none.

torch's dropouts return an empty tensor before they draw, in C++ and unseen by any mode. The other
data ranks do draw, and this rank's generator has to move as far as theirs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

_aten = torch.ops.aten


class Draw(NamedTuple):
    """What is drawn, and what then becomes of the input.

    Attributes:
        func: an op of ATen.
        args: its arguments.
        scaled: what is multiplied by the noise, as torch does where there are rows; None: the
            function is called as it is.
        inplace: whether that is done in place.
    """

    func: Any
    args: tuple[Any, ...]
    scaled: torch.Tensor | None = None
    inplace: bool = False

    def result(self, drawn: Any) -> torch.Tensor:
        """Return what a dropout makes of its empty input.

        Not the input itself, as torch does: the product saves the noise for its backward, like that
        of the other ranks. Checkpointing recomputes as far as the last tensor that was saved, and
        this rank must not stop before the others' last draw.
        """
        assert self.scaled is not None
        noise = drawn[1] if isinstance(drawn, tuple) else drawn
        noise = noise.to(self.scaled.dtype)
        return self.scaled.mul_(noise) if self.inplace else self.scaled * noise


class Cannot(NamedTuple):
    """A function that draws inside of it what cannot be followed for this input."""

    name: str
    input: torch.Tensor


def draw_of_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | Cannot | None:
    """Return what a function draws of an input that is empty here, or None.

    Args:
        func: as a `TorchFunctionMode` sees it.
        args: its arguments.
        kwargs: its arguments by name.
    """
    look = _LOOKS.get(func)
    # In inference mode a dropout reaches the dispatch mode as one op, before it returns early.
    if look is None or torch.is_inference_mode_enabled():
        return None
    return look(*args, **kwargs)


def _drop(input: Any, p: float, train: bool, inplace: bool = False) -> Draw | None:
    if input.numel() or not train or not 0 < p < 1:
        return None
    return _elements(input, p)._replace(scaled=input, inplace=inplace)


def _elements(input: Any, p: float) -> Draw:
    if input.is_cuda:
        # A fused kernel, with a map of its own: what the other ranks draw by.
        return Draw(_aten.native_dropout.default, (input.detach(), p, True))
    return Draw(_aten.bernoulli_.float, (torch.empty_like(input, requires_grad=False), 1 - p))


def _drop_alpha(input: Any, p: float, train: bool, inplace: bool = False) -> Draw | None:
    if input.numel() or not train or not 0 < p < 1:
        return None
    noise = torch.empty_like(input, requires_grad=False)
    return Draw(_aten.bernoulli_.float, (noise, 1 - p), input, inplace)


def _drop_features(input: Any, p: float, train: bool, inplace: bool = False) -> Draw | None:
    if input.numel() or not train or not 0 < p < 1:
        return None
    shape = (*input.shape[:2], *(1 for _ in input.shape[2:]))
    noise = input.new_empty(shape, requires_grad=False)
    return Draw(_aten.bernoulli_.float, (noise, 1 - p), input, inplace)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return _drop(input, p, training, inplace)


def _alpha(input: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    return _drop_alpha(input, p, training, inplace)


def _features(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return _drop_features(input, p, training, inplace)


def _feature_alpha(
    input: Any, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Any:
    return _drop_features(input, p, training, inplace)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    *_: Any,
    **__: Any,
) -> Draw | None:
    if query.numel() or not 0 < dropout_p < 1:
        return None
    # The weights are what is dropped: (batch, heads, queries, keys).
    weights = query.new_empty((*query.shape[:-1], key.shape[-2]), requires_grad=False)
    return _elements(weights, dropout_p)


def _recurrent(name: str) -> Callable[..., Cannot | None]:
    """Make a look at a recurrent network: (input, hidden, weights, ...) or (input, sizes, ...)."""

    def look(input: Any, second: Any, *rest: Any, **_: Any) -> Cannot | None:
        drawn = any(isinstance(x, float) and x > 0 for x in rest)
        # Packed sequences are stored time by time, with all rows mixed: no rows of a batch.
        packed = isinstance(second, torch.Tensor) and not second.is_floating_point()
        return Cannot(name, input) if drawn and (packed or not input.numel()) else None

    return look


_LOOKS: dict[Any, Callable[..., Draw | Cannot | None]] = {
    F.dropout: _dropout,
    F.dropout1d: _features,
    F.dropout2d: _features,
    F.dropout3d: _features,
    F.alpha_dropout: _alpha,
    F.feature_alpha_dropout: _feature_alpha,
    torch.dropout: _drop,
    torch.dropout_: partial(_drop, inplace=True),
    torch.alpha_dropout: _drop_alpha,
    torch.alpha_dropout_: partial(_drop_alpha, inplace=True),
    torch.feature_dropout: _drop_features,
    torch.feature_dropout_: partial(_drop_features, inplace=True),
    torch.feature_alpha_dropout: _drop_features,
    torch.feature_alpha_dropout_: partial(_drop_features, inplace=True),
    F.scaled_dot_product_attention: _attention,
    torch.lstm: _recurrent("lstm"),
    torch.gru: _recurrent("gru"),
    torch.rnn_tanh: _recurrent("rnn_tanh"),
    torch.rnn_relu: _recurrent("rnn_relu"),
}
