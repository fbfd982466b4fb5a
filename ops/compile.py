"""What ``torch.compile`` needs to know: pytree nodes, and which sizes vary from batch to batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.export
import torch.utils._pytree as pytree
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

from .axis import BATCH, Axis, Grid, Partition
from .tensor import PackedTensor, is_packed, mark_rows


def mark_dynamic(tree: Any, batch: str = BATCH) -> Any:
    """Mark every size that varies from batch to batch, for one graph over any lengths and batch sizes.

    Args:
        tree: packed tensors and tensors of one batch in any pytree (a ``Batch`` is one). Dim 0 of a dense
            tensor is the batch.
        batch: a name for the batch size. A graph takes sizes of one name for equal; give batches of
            different size that meet in one graph (an anchor and its candidates, say) different names.

    Returns:
        ``tree`` itself; its tensors carry the marks.

    Raises:
        ValueError: the tree holds different batch sizes.
    """
    leaves = [x for x in pytree.tree_leaves(tree, is_leaf=is_packed) if is_packed(x) or _has_dims(x)]
    sizes = {x.batch_size if is_packed(x) else x.shape[0] for x in leaves}
    if len(sizes) > 1:
        raise ValueError(
            f"mark_dynamic: batch sizes {sorted(sizes)} in one tree. Mark what belongs to one batch by "
            "itself; where batches of different size meet in one graph, give each a name: batch='other'"
        )
    for leaf in leaves:
        if is_packed(leaf):
            _mark_packed(leaf, batch)
        else:
            mark_unbacked(leaf, 0, shape_id=batch)
    return tree


def deliver(tree: Any) -> Any:
    """Make what has been computed from a batch's structure so far a part of the batch.

    A graph builds coordinate maps and derived structures each time it runs, since it cannot see what eager
    code has kept; what was delivered it reads. A loader's worker asks a batch for what the model will need
    (running the model's code on it once does too), and calls this. Every batch has to bring the same:
    another set is another graph.

    Returns:
        ``tree`` itself.
    """
    for leaf in pytree.tree_leaves(tree, is_leaf=is_packed):
        if is_packed(leaf):
            for part in (*leaf.grid.axes, leaf.grid.part):
                part.deliver()
    return tree


def dynamic_shapes(tree: Any) -> Any:
    """What ``torch.export.export(dynamic_shapes=)`` wants for an argument that holds packed tensors.

    >>> x = PackedTensor.from_list([torch.randn(3, 4), torch.randn(5, 4)], "n _")
    >>> torch.export.export(module, (x,), dynamic_shapes=(dynamic_shapes(x),))  # doctest: +SKIP

    Args:
        tree: packed tensors and tensors in any pytree; dim 0 of a dense tensor is the batch.

    Returns:
        For a packed tensor a list with an entry for each of its tensors; containers as they are.
    """
    if isinstance(tree, Tensor):
        return {0: torch.export.Dim.AUTO} if tree.dim() else None
    if isinstance(tree, dict):
        return {name: dynamic_shapes(child) for name, child in tree.items()}
    children, spec = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    return None if spec.is_leaf() else [dynamic_shapes(child) for child in children]


def _has_dims(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _mark_packed(x: PackedTensor, batch: str) -> None:
    for part in (*x.grid.axes, x.grid.part):
        part.mark_dynamic(batch)
    mark_rows(x.values)


# ------------------------------------------------------------------ pytree


def _flatten(x: PackedTensor) -> tuple[list[Any], Any]:
    leaves: list[Any] = [x.values]
    seen: dict[Axis, int] = {}
    described = []
    for axis in x.grid.axes:
        if axis not in seen:
            seen[axis] = len(seen)
            leaves += [axis.lengths, axis.offsets, axis.extent, axis.peak, *axis.maps.values()]
            described.append((axis.name, tuple(axis.maps)))
    part_maps: tuple[str, ...] | None = None
    if len(x.grid.axes) > 1:
        part = x.grid.part
        leaves += [part.lengths, part.offsets, part.extent, *part.maps.values()]
        part_maps = tuple(part.maps)
    return leaves, (x.order, tuple(seen[a] for a in x.grid.axes), tuple(described), part_maps)


def _unflatten(leaves: Any, context: Any) -> PackedTensor:
    order, places, described, part_maps = context
    stream = iter(leaves)
    values = next(stream)
    axes = []
    for name, maps in described:
        lengths, offsets, extent, peak = (next(stream) for _ in range(4))
        delivered = {key: next(stream) for key in maps}
        axes.append(Axis(lengths, offsets, name=name, maps=delivered, sizes=(extent, peak)))
    part: Partition | None = axes[0] if len(places) == 1 else None
    if part_maps is not None:
        lengths, offsets, extent = (next(stream) for _ in range(3))
        part = Partition(lengths, offsets, extent, {key: next(stream) for key in part_maps})
    return PackedTensor(values, Grid([axes[i] for i in places], part), order)


def _flatten_with_keys(x: PackedTensor) -> tuple[list[tuple[Any, Any]], Any]:
    leaves, context = _flatten(x)
    names = ["values"]
    for name, maps in context[2]:
        names += [f"{name}.{part}" for part in ("lengths", "offsets", "extent", "peak", *maps)]
    if context[3] is not None:
        names += [f"grid.{part}" for part in ("lengths", "offsets", "extent", *context[3])]
    return [(pytree.MappingKey(name), leaf) for name, leaf in zip(names, leaves)], context


pytree.register_pytree_node(
    PackedTensor,
    _flatten,
    _unflatten,
    serialized_type_name="ops.PackedTensor",
    flatten_with_keys_fn=_flatten_with_keys,
)
