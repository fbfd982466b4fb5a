"""Rotary position embedding (Su et al., RoFormer, 2021): features turned by angles that grow by position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..axis import require_same
from ..layout import positions_of
from ..tensor import PackedTensor, is_packed, like


def rotary(
    x: Any, positions: Any = None, *, base: float = 10000.0, interleaved: bool = False, dim: int = -2
) -> Any:
    """Turn pairs of features of ``x`` (..., n, D) by ``position * base ** (-2 i / D)``.

    Args:
        x: packed or dense, e.g. (B, H, n, D) or (B, n, H, D) with ``dim=1``; D is even and the last dim.
        positions: of every entry along ``dim``: packed (B, n), dense (n,) or (B, n); by default 0, 1, ...
            from each sample's first.
        base: the largest wavelength is 2 pi times that.
        interleaved: pair features 0 with 1, 2 with 3, ...; else i with i + D / 2.
        dim: the dim of positions.

    Returns:
        As ``x``, in its dtype; computed in at least float32.

    Raises:
        ValueError: D is odd or ragged, ``dim`` is static in a packed tensor, or positions do not fit.
    """
    if x.shape[-1] % 2 or (is_packed(x) and x.order[-1] <= len(x.axes)):
        raise ValueError(f"rotary: the last dim of {tuple(x.shape)} must be static and even")
    if not is_packed(x):
        return _turned(
            x, _angles(_dense_positions(x, positions, dim), x.shape[-1], base, x.dtype), interleaved
        )
    k = x.order[x.dim_index(dim)] - 1
    if not 0 <= k < len(x.axes):
        raise ValueError(
            f"rotary: dim {dim} of a packed tensor of shape {tuple(x.shape)} and order {x.order} is not a "
            "ragged axis; give the dim of positions"
        )
    feature = x.order[-1] - len(x.axes)
    values = x.values.movedim(feature, -1)
    angles = _angles(_cell_positions(x, positions, k), values.shape[-1], base, x.dtype)
    angles = angles.view(angles.shape[0], *[1] * (values.dim() - 2), angles.shape[1])
    return like(x, _turned(values, angles, interleaved).movedim(-1, feature))


def _cell_positions(x: PackedTensor, positions: Any, k: int) -> Tensor:
    """The position of every cell along axis ``k``: [cells]."""
    if positions is None:
        return positions_of(x.grid, k)
    if is_packed(positions):
        if positions.order != (0, 1):
            raise ValueError(f"rotary: positions of order {positions.order}; they must be packed as (B, n)")
        require_same(positions.axes[0], x.axes[k], "rotary: positions")
        rows = positions.values
        return rows if len(x.axes) == 1 else rows.index_select(0, x.grid.coordinates(k))
    if positions.dim() not in (1, 2):
        raise ValueError(f"rotary: positions of shape {tuple(positions.shape)}; they must be (n,) or (B, n)")
    index = positions_of(x.grid, k)
    return positions[index] if positions.dim() == 1 else positions[x.grid.sample_ids, index]


def _dense_positions(x: Tensor, positions: Any, dim: int) -> Tensor:
    """Positions that broadcast against ``x`` without its last dim."""
    place = dim % x.dim()
    if positions is None:
        positions = torch.arange(x.shape[place], device=x.device)
    lead = x.shape[:1] if positions.dim() == 2 else ()
    return positions.view(*lead, *[1] * (place - len(lead)), -1, *[1] * (x.dim() - place - 2))


def _angles(positions: Tensor, features: int, base: float, dtype: torch.dtype) -> Tensor:
    """[...] -> [..., features / 2], in at least float32."""
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    steps = torch.arange(0, features, 2, device=positions.device, dtype=dtype) / features
    return positions.to(dtype).unsqueeze(-1) * base**-steps


def _turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    cos, sin = angles.cos().to(wide.dtype), angles.sin().to(wide.dtype)
    if interleaved:
        a, b = wide[..., ::2], wide[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)
    a, b = wide.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """:func:`rotary` as a module: (..., n, D) -> (..., n, D)."""

    def __init__(self, base: float = 10000.0, interleaved: bool = False, dim: int = -2) -> None:
        super().__init__()
        self.base, self.interleaved, self.dim = base, interleaved, dim

    def forward(self, x: Any, positions: Any = None) -> Any:
        """See :func:`rotary`."""
        return rotary(x, positions, base=self.base, interleaved=self.interleaved, dim=self.dim)
