"""What attention asks of its operands, and how it reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..axis import require_same
from ..tensor import PackedTensor
from .bias import WHAT

#: Said where some operands are packed and some are dense.
MIXED = (
    "query, key and value must all be packed, or none; a dense one is packed by "
    "PackedTensor.from_padded(y, lengths)"
)


def require_batch(query: PackedTensor, key: PackedTensor) -> None:
    """Raise ValueError where queries and keys are of different batches."""
    if torch.compiler.is_compiling():
        torch._check(query.batch_size == key.batch_size)
    elif query.batch_size != key.batch_size:
        raise ValueError(f"{WHAT}: queries of {query.batch_size} samples, keys of {key.batch_size}")


def require_same_dims(query: PackedTensor, key: PackedTensor, value: PackedTensor) -> None:
    """Raise ValueError unless the three have the same dims in the same places."""
    kinds = [tuple(min(c, 2) for c in x.order) for x in (query, key, value)]
    if not kinds[0] == kinds[1] == kinds[2]:
        raise ValueError(
            f"{WHAT}: query, key and value must have batch, heads, positions and features at the same "
            f"dims; got the orders {query.order}, {key.order} and {value.order}"
        )


def require_heads(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> None:
    """Raise ValueError where heads or features of queries, keys and values do not go together."""
    heads, shared = q.shape[1], k.shape[1]
    fits = heads == shared or (grouped and shared > 0 and heads % shared == 0)
    if not fits or shared != v.shape[1]:
        raise ValueError(
            f"{WHAT}: query, key and value of {heads}, {shared} and {v.shape[1]} heads do not fit; "
            "enable_gqa=True shares heads of keys and values among a multiple of them"
        )
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{WHAT}: query and key features of {q.shape[2]} and {k.shape[2]} differ; project one"
        )


def require_module_layout(query: PackedTensor, key: PackedTensor, value: PackedTensor) -> None:
    """Raise ValueError where a module would get its dims in another order than (n, B, E)."""
    for x in (query, key, value):
        if x.order != (1, 0, 2):
            raise ValueError(
                "multi-head attention needs positions, batch, features: (n, B, E), or with batch_first=True "
                f"(B, n, E), one ragged axis among them; got the order {x.order} inside the module"
            )
    require_same(key.axes[0], value.axes[0], f"{WHAT}: key against value")
    require_batch(query, key)


def token_major(x: PackedTensor) -> Tensor:
    """(..., n, D) -> [T, H, D]."""
    if len(x.axes) != 1 or len(x.order) < 3 or x.order[-2] != 1 or x.order[-1] < 2:
        raise ValueError(
            "scaled_dot_product_attention needs one ragged axis, at dim -2, and a static last dim; got "
            f"a packed tensor of shape {tuple(x.shape)} with the order {x.order}"
        )
    static = [c - 1 for c in x.order if c > 1]
    values = x.values.permute(0, *static)
    return values.unsqueeze(1) if values.dim() == 2 else values.flatten(1, -2)
