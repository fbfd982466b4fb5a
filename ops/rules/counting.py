"""Counts over valid entries, bags of embeddings, and covariances of each sample's variables.

What PyTorch counts over a whole batch (``unique``, ``histc``, ``bincount``, ``histogram``) is counted over
the valid entries of all samples, and is dense; only what has an entry for every input entry is packed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dispatch
from ..align import Layout, packed_payload
from ..cells import static_dim
from ..matrices import apply, correlation, covariance
from ..tensor import ROWS, PackedTensor, is_packed, like
from .shape import on_tensor

# ------------------------------------------------------------------ over valid entries


def counted(weight: str = "") -> dispatch.Handler:
    """``histc``, ``bincount`` and ``histogram`` of all valid entries.

    Args:
        weight: how the weights are called, which are packed like the input, where it takes some.
    """

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = dispatch.name_of(func)
        dispatch.refuse_out(name, kwargs)
        x = args[0] if args else kwargs.pop("input")
        rest = list(args[1:])
        if weight == "weights" and rest:
            kwargs = {**kwargs, weight: rest.pop(0)}
        weights = kwargs.get(weight)
        if not is_packed(x) or not (weights is None or is_packed(weights)):
            raise TypeError(f"{name}: the input and its weights have to be packed, over the same samples")
        if weights is not None:
            kwargs = {**kwargs, weight: _beside(x, weights, name).flatten()}
        return func(x.values.flatten(), *rest, **kwargs)

    return handler


def _beside(x: PackedTensor, other: PackedTensor, what: str) -> Tensor:
    """The payload of an operand of the same dims and structure, laid out like ``x``."""
    if len(other.order) != len(x.order) or len(other.grid.axes) != len(x.grid.axes):
        raise ValueError(
            f"{what}: operands of shapes {tuple(x.shape)} and {tuple(other.shape)} have to be of one "
            "structure"
        )
    payload = packed_payload(what, other, Layout(x.grid, x.order))
    if payload.shape != x.values.shape:
        raise ValueError(f"{what}: operands of shapes {tuple(x.shape)} and {tuple(other.shape)} differ")
    return payload


def unique(
    x: PackedTensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """``torch.unique`` of all valid entries: dense, but for the inverse, which is packed like ``x``.

    With ``dim``, of valid rows (after ``x.flatten(0, 1)``) or of the entries of a static dim.
    """
    place = None if dim is None else static_dim(x, dim, "unique")
    found = torch.unique(x.values, sorted, return_inverse, return_counts, dim=place)
    return _distinct(x, found, return_inverse, dim)


def unique_consecutive(
    x: PackedTensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """``torch.unique_consecutive`` of all valid entries, one sample after the other.

    As in a dense batch, equal entries merge across the end of a sample. To collapse each sample by itself,
    compare neighbours: ``x.masked_select(keep)``.

    Raises:
        ValueError: entries do not lie in the order of the dims.
    """
    if x.order != tuple(range(len(x.order))) and ROWS not in x.order:
        raise ValueError(
            "unique_consecutive reads the entries in order, which here is not that of storage: permute the "
            f"batch to the front and static dims behind ragged ones; got the order {x.order}"
        )
    place = None if dim is None else static_dim(x, dim, "unique_consecutive")
    found = torch.unique_consecutive(x.values, return_inverse, return_counts, dim=place)
    return _distinct(x, found, return_inverse, dim)


def _distinct(x: PackedTensor, found: Any, inverse: bool, dim: int | None) -> Any:
    """Distinct entries, their inverse if asked for, and counts."""
    values, *rest = found if isinstance(found, tuple) else (found,)
    if inverse and (dim is None or x.order[x.dim_index(dim)] == ROWS):
        order = x.order if dim is None else (ROWS,)
        rest[0] = PackedTensor(rest[0], x.grid, order)
    if dim is not None and x.order[x.dim_index(dim)] == ROWS:
        k = len(x.grid.axes)
        values = values.permute([0 if c == ROWS else c - k for c in x.order])
    elif dim is not None:
        values = like(x, values)
    return (values, *rest) if rest else values


# ------------------------------------------------------------------ bags


def embedding_bag(
    input: Any,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """``F.embedding_bag``: each sample of indices (B, n) is a bag -> (B, C), dense; 0 for an empty sample.

    Raises:
        TypeError: not exactly the indices (and ``per_sample_weights``) are packed.
        ValueError: offsets, or other dims than (B, n).
    """
    weights = per_sample_weights
    if not is_packed(input) or is_packed(weight) or not (weights is None or is_packed(weights)):
        raise TypeError(
            "embedding_bag: indices (and per_sample_weights) have to be packed alike, the table dense"
        )
    if offsets is not None or input.order != (0, 1):
        raise ValueError(
            "embedding_bag takes packed indices (B, n) without offsets, each sample a bag; got a shape of "
            f"{tuple(input.shape)} with the order {input.order}"
        )
    if weights is not None:
        weights = _beside(input, weights, "embedding_bag")
    return F.embedding_bag(
        input.values,
        weight,
        input.offsets.to(input.dtype),
        max_norm,
        norm_type,
        scale_grad_by_freq,
        mode,
        sparse,
        weights,
        True,
        padding_idx,
    )


def _embedding_bag(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return embedding_bag(*args, **kwargs)


# ------------------------------------------------------------------ covariances


def cov(x: PackedTensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """``torch.cov`` of each matrix (..., variables, observations) -> (..., variables, variables)."""
    if fweights is not None or aweights is not None:
        raise NotImplementedError("cov of a packed tensor takes no weights; apply it to each of x.to_list()")
    return apply("cov", covariance(correction), "rc->rr", [x])


def corrcoef(x: PackedTensor) -> Any:
    """``torch.corrcoef`` of each matrix (..., variables, observations) -> (..., variables, variables)."""
    return apply("corrcoef", correlation, "rc->rr", [x])


dispatch.register("counting", on_tensor(unique), "unique")
dispatch.register("counting", on_tensor(unique_consecutive), "unique_consecutive")
dispatch.register("counting", counted("weights"), "bincount")
dispatch.register("counting", counted(), "histc")
dispatch.register("counting", counted("weight"), "histogram", compiles=False)  # has no fake form
dispatch.register("counting", on_tensor(cov), "cov")
dispatch.register("counting", on_tensor(corrcoef), "corrcoef")
dispatch.register_function("counting", _embedding_bag, "embedding_bag", F.embedding_bag)
