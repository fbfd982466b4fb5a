"""Attention: ``F.scaled_dot_product_attention`` and the multi-head attention of PyTorch's modules."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dispatch
from ..axis import require_same
from ..kernels.attention import attention as attention_kernel
from ..tensor import PackedTensor, is_packed

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")
NO_SEED = torch.zeros((), dtype=torch.int64)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q: Any,
    k: Any,
    causal: bool,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Attention on payloads.

    Args:
        query, key, value: [Tq, H, D], [Tk, H, D], [Tk, H, Dv].
        q, k: the axes of queries and keys.

    Returns:
        [Tq, H, Dv].
    """
    device = query.device.type
    if device in AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        query, key, value = (t.to(torch.get_autocast_dtype(device)) for t in (query, key, value))
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    seed = torch.randint(0, 2**62, (), dtype=torch.int64) if dropout else NO_SEED.clone()
    return attention_kernel(query, key, value, q.lengths, k.lengths, causal, scale, dropout, seed)[0]


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> PackedTensor:
    """``F.scaled_dot_product_attention`` with each sample by itself.

    Args:
        query: (..., n, D) with the batch and static head dims in front, in any order.
        key, value: (..., m, D) and (..., m, Dv), over the samples of ``query``; ``m`` may be ``n``.

    Returns:
        (..., n, Dv) with the layout of ``query``; exactly 0 where a sample has no keys.

    Raises:
        NotImplementedError: an ``attn_mask``.
        ValueError: operands that do not fit each other.
    """
    if attn_mask is not None:
        raise NotImplementedError(
            "attn_mask with packed tensors is not available yet; padding needs no mask here, and "
            "is_causal=True gives the causal one"
        )
    if not (is_packed(query) and is_packed(key) and is_packed(value)):
        raise TypeError("scaled_dot_product_attention: query, key and value must all be packed")
    require_same(key.axes[0], value.axes[0], "attention: key against value")
    _require_batch(query, key)
    _require_same_dims(query, key, value)
    q, k, v = (_token_major(x) for x in (query, key, value))
    if enable_gqa:
        k, v = (t.repeat_interleave(max(q.shape[1] // max(t.shape[1], 1), 1), 1) for t in (k, v))
    if not q.shape[1] == k.shape[1] == v.shape[1] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"attention: query, key and value of {q.shape[1]}, {k.shape[1]} and {v.shape[1]} heads, query "
            f"and key of {q.shape[2]} and {k.shape[2]} features do not fit; enable_gqa=True shares heads"
        )
    out = attend(q, k, v, query.axes[0], key.axes[0], is_causal, scale, dropout_p)
    heads = [size for d, size in enumerate(query.shape[:-2]) if query.order[d] > 1]
    numbers = iter(range(2, 2 + len(query.order)))
    order = tuple(c if c <= 1 else next(numbers) for c in query.order)
    return PackedTensor(out.reshape(out.shape[0], *heads, out.shape[-1]), query.grid, order)


def _require_batch(query: PackedTensor, key: PackedTensor) -> None:
    if torch.compiler.is_compiling():
        torch._check(query.batch_size == key.batch_size)
    elif query.batch_size != key.batch_size:
        raise ValueError(f"attention: queries of {query.batch_size} samples, keys of {key.batch_size}")


def _require_same_dims(query: PackedTensor, key: PackedTensor, value: PackedTensor) -> None:
    kinds = [tuple(min(c, 2) for c in x.order) for x in (query, key, value)]
    if not kinds[0] == kinds[1] == kinds[2]:
        raise ValueError(
            "attention: query, key and value must have batch, heads, positions and features at the same "
            f"dims; got the orders {query.order}, {key.order} and {value.order}"
        )


def _token_major(x: PackedTensor) -> Tensor:
    """(..., n, D) -> [T, H, D]."""
    if len(x.axes) != 1 or len(x.order) < 3 or x.order[-2] != 1 or x.order[-1] < 2:
        raise ValueError(
            "scaled_dot_product_attention needs one ragged axis, at dim -2, and a static last dim; got "
            f"a packed tensor of shape {tuple(x.shape)} with the order {x.order}"
        )
    static = [c - 1 for c in x.order if c > 1]
    values = x.values.permute(0, *static)
    return values.unsqueeze(1) if values.dim() == 2 else values.flatten(1, -2)


def multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[PackedTensor, None]:
    """``F.multi_head_attention_forward``, what ``nn.MultiheadAttention`` calls: (n, B, E) -> (n, B, E).

    Raises:
        NotImplementedError: masks, ``need_weights=True``, ``bias_k``, ``add_zero_attn`` or static keys.
    """
    _refuse(
        {
            "key_padding_mask (packed samples have no padding)": key_padding_mask is not None,
            "attn_mask (is_causal=True gives the causal one)": attn_mask is not None and not is_causal,
            "need_weights=True": need_weights,
            "bias_k and bias_v": bias_k is not None or bias_v is not None,
            "add_zero_attn": add_zero_attn,
            "static_k and static_v": static_k is not None or static_v is not None,
        }
    )
    if not (is_packed(query) and is_packed(key) and is_packed(value)):
        raise TypeError("multi-head attention: query, key and value must all be packed, or none")
    _require_module_layout(query, key, value)
    heads = (num_heads, embed_dim_to_check // num_heads)
    if in_proj_weight is not None and query.values is key.values and key.values is value.values:
        q, k, v = F.linear(query.values, in_proj_weight, in_proj_bias).unflatten(-1, (3, *heads)).unbind(1)
    else:
        separate = (q_proj_weight, k_proj_weight, v_proj_weight)
        weights = separate if in_proj_weight is None else in_proj_weight.chunk(3)
        biases = in_proj_bias.chunk(3) if in_proj_bias is not None else (None, None, None)
        q, k, v = (
            F.linear(x.values, w, b).unflatten(-1, heads)  # type: ignore[arg-type]
            for x, w, b in zip((query, key, value), weights, biases)
        )
    out = attend(q, k, v, query.axes[0], key.axes[0], is_causal, None, dropout_p if training else 0.0)
    out = F.linear(out.flatten(1), out_proj_weight, out_proj_bias)
    return PackedTensor(out, query.grid, query.order), None


def _require_module_layout(query: PackedTensor, key: PackedTensor, value: PackedTensor) -> None:
    for x in (query, key, value):
        if x.order != (1, 0, 2):
            raise ValueError(
                "multi-head attention needs positions, batch, features: (n, B, E), or with batch_first=True "
                f"(B, n, E), one ragged axis among them; got the order {x.order} inside the module"
            )
    require_same(key.axes[0], value.axes[0], "attention: key against value")
    _require_batch(query, key)


def _refuse(reasons: dict[str, bool]) -> None:
    for name, given in reasons.items():
        if given:
            raise NotImplementedError(f"multi-head attention on packed tensors does not take {name} yet")


def _sdpa(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return scaled_dot_product_attention(*args, **kwargs)


def _mha(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return multi_head_attention(*args, **kwargs)


dispatch.register_function("attention", _sdpa, "scaled_dot_product_attention", F.scaled_dot_product_attention)
dispatch.register_function("attention", _mha, "multi_head_attention_forward", F.multi_head_attention_forward)
