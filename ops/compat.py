"""Mends for what PyTorch's compiler cannot trace; each says what it mends and from when it can go.

Everything that depends on the version of torch lives here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _hardsigmoid(x: Tensor, inplace: bool = False) -> Tensor:
    return F.relu6(x + 3) / 6


def _hardswish(x: Tensor, inplace: bool = False) -> Tensor:
    return x * F.relu6(x + 3) / 6


#: Dynamo (2.11 to 2.14) does not make a proxy of these when they are called from a handler.
_IN_GRAPHS: dict[str, Callable[..., Any]] = {"hardsigmoid": _hardsigmoid, "hardswish": _hardswish}


def hard_activation(name: str) -> Callable[..., Any]:
    """``F.hardsigmoid`` or ``F.hardswish``: PyTorch's own, in a graph the formula."""
    function, formula = getattr(F, name), _IN_GRAPHS[name]

    def call(x: Tensor, inplace: bool = False) -> Tensor:
        return formula(x) if torch.compiler.is_compiling() else function(x, inplace)

    return call
