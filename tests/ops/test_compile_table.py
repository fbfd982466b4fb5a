"""Every row of the operator table that is said to compile, compiled, and compared with eager.

Rows are compiled in groups, since a graph of many operators costs little more than one of a single one; a
group that fails is taken apart, so that the failing rows are named. Which rows do not compile is a fact of
the table, ``Row.compiles``; the reason stands where the row is filed, or in ``ops.compat`` where it is the
version of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch._dynamo.utils import counters

import ops
from ops import compat, dispatch, is_packed
from ops.testing import pack
from tests.strategies import make

GROUP = 24
BATCHES = ([3, 5, 2], [4, 4], [6, 2, 3, 7])
#: Rows whose results are random or uninitialised: structures are compared, values are not.
RANDOM = set(
    """dropout alpha_dropout bernoulli rand_like randn_like randint_like empty_like new_empty
    new_empty_strided
    multinomial normal poisson binomial gumbel_softmax dropout1d dropout2d dropout3d feature_dropout
    feature_alpha_dropout feature_dropout_ feature_alpha_dropout_
    rrelu bernoulli_ dropout_ alpha_dropout_ normal_ uniform_ exponential_ random_
    cauchy_ geometric_ log_normal_ rrelu_ native_dropout""".split()
)


class Operands:
    """What calls are made of: floats in (0, 1), integers, booleans, and a pair, over one axis."""

    def __init__(self, lengths: list[int]) -> None:
        samples = [make(lengths, dtype=torch.float32, seed=k) for k in range(4)]
        packed = pack(*samples, make(lengths, "n n 4", dtype=torch.float32, seed=5))
        self.x, self.y, self.z, self.w = (p.sigmoid() for p in packed[:4])
        self.pair = packed[4]
        self.i, self.j = ((p * 5).to(torch.int64) + 1 for p in (self.x, self.y))
        self.b = self.x > 0.5
        self.c = torch.complex(self.x, self.y)
        self.tokens = self.i[..., 0]
        self.by_sample = torch.arange(float(len(lengths)))

    def marked(self) -> Operands:
        for value in vars(self).values():
            ops.mark_dynamic(value)
        return self


#: Arguments tried in turn for a pointwise row; the first that eager takes is the row's call.
ARGUMENTS: tuple[Callable[[Any], tuple[Any, ...]], ...] = (
    lambda t: (t.x,),
    lambda t: (t.x, t.y),
    lambda t: (t.i, t.j),
    lambda t: (t.x, t.y, t.z),
    lambda t: (t.b, t.x, t.y),
    lambda t: (t.x, t.b, 0.5),
    lambda t: (t.x, 0.5),
    lambda t: (t.x, 0.1, 0.5),
    lambda t: (t.i, 2),
    lambda t: (2, t.x),
    lambda t: (t.x, 0, 5),
    lambda t: (t.x, 0.5, True),
    lambda t: (t.x.double(), t.y.double()),
    lambda t: (t.c,),
    lambda t: (t.i,),
)


def function_of(name: str) -> Callable[..., Any]:
    """How a row is called: a function that it is filed under where there is one, else a method."""
    for function in dispatch.spellings(name):
        if function in dispatch.TABLE and not hasattr(function, "__objclass__"):
            return function
    return lambda x, *rest: getattr(x, name)(*rest)


def fresh(argument: Any) -> Any:
    """A copy, for the forms that write into it."""
    return argument.clone() if is_packed(argument) or isinstance(argument, Tensor) else argument


def pointwise_call(name: str) -> Callable[[Any], Any]:
    """The call of a pointwise row."""
    function, operands = function_of(name), Operands([3, 2])
    for arguments in ARGUMENTS:
        try:
            out = function(*[fresh(a) for a in arguments(operands)])
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
            continue
        if any(is_packed(leaf) for leaf in pytree.tree_leaves(out, is_leaf=is_packed)):
            copied = name.endswith("_")
            return lambda t: function(*[fresh(a) if copied else a for a in arguments(t)])
    raise AssertionError(f"no arguments for '{name}'")


WEIGHT, TABLE, SQUARE = torch.randn(3, 4), torch.randn(7, 4), torch.randn(4, 4)
ENDS = ("", "_")


def rows(t: Operands) -> Any:
    """All valid positions, (T, 4)."""
    return t.x.flatten(0, 1)


def column(t: Operands) -> Any:
    """One feature of all valid positions, (T,)."""
    return rows(t)[:, 0]


CALLS: dict[str, Callable[[Any], Any]] = {
    # contraction
    "matmul": lambda t: t.x @ t.y.mT,
    "linalg_matmul": lambda t: torch.linalg.matmul(t.x, WEIGHT.T),
    "bmm": lambda t: torch.bmm(t.x, t.y.mT),
    "mm": lambda t: torch.mm(rows(t), WEIGHT.T),
    "mv": lambda t: torch.mv(rows(t), WEIGHT[0]),
    "dot": lambda t: torch.dot(column(t), rows(t)[:, 1]),
    "vdot": lambda t: torch.vdot(column(t), rows(t)[:, 1]),
    **{name: lambda t, f=name: function_of(f)(column(t), WEIGHT[0]) for name in ("outer", "ger")},
    "inner": lambda t: torch.inner(t.x, WEIGHT),
    "tensordot": lambda t: torch.tensordot(t.x, WEIGHT.T, 1),
    "kron": lambda t: torch.kron(t.x, WEIGHT[:1, None]),
    "einsum": lambda t: torch.einsum("bikc,bjkc->bijc", t.pair, t.pair),
    "bilinear": lambda t: F.bilinear(t.x, t.y, torch.ones(2, 4, 4)),
    "cdist": lambda t: torch.cdist(t.x, t.y),
    "linalg_vecdot": lambda t: torch.linalg.vecdot(t.x, t.y),
    "chain_matmul": lambda t: torch.chain_matmul(rows(t), WEIGHT.T, WEIGHT),
    "linalg_multi_dot": lambda t: torch.linalg.multi_dot([rows(t), WEIGHT.T, WEIGHT]),
    "addbmm": lambda t: torch.addbmm(torch.eye(4), t.x.mT, t.y),
    **{
        f"baddbmm{end}": lambda t, e=end: function_of(f"baddbmm{e}")(t.pair[..., 0] * 1, t.x, t.y.mT)
        for end in ENDS
    },
    **{
        f"addmm{end}": lambda t, e=end: function_of(f"addmm{e}")(rows(t) * 1, rows(t), SQUARE) for end in ENDS
    },
    **{
        f"addmv{end}": lambda t, e=end: function_of(f"addmv{e}")(column(t) * 1, rows(t), SQUARE[0])
        for end in ENDS
    },
    **{
        f"addr{end}": lambda t, e=end: function_of(f"addr{e}")(rows(t) * 1, column(t), SQUARE[0])
        for end in ENDS
    },
    # attention
    "scaled_dot_product_attention": lambda t: F.scaled_dot_product_attention(*[t.x[:, None]] * 3),
    "multi_head_attention_forward": lambda t: F.multi_head_attention_forward(
        *[t.x.transpose(0, 1)] * 3,
        4,
        2,
        torch.ones(12, 4),
        None,
        None,
        None,
        False,
        0.0,
        torch.eye(4),
        None,
        need_weights=False,
    )[0],
    # shape
    "permute": lambda t: t.x.permute(1, 0, 2),
    "transpose": lambda t: t.x.transpose(0, 1),
    "swapaxes": lambda t: t.x.swapaxes(1, 2),
    "swapdims": lambda t: t.x.swapdims(1, 2),
    "movedim": lambda t: t.x.movedim(1, 2),
    "moveaxis": lambda t: t.x.moveaxis(1, 2),
    "unsqueeze": lambda t: t.x.unsqueeze(1),
    "squeeze": lambda t: t.x.unsqueeze(1).squeeze(1),
    "flatten": lambda t: t.pair.flatten(1, 2),
    "unflatten": lambda t: t.x.unflatten(2, (2, 2)),
    "ravel": lambda t: t.x.ravel(),
    "reshape": lambda t: t.x.reshape(*t.x.shape[:2], 2, 2),
    "select": lambda t: t.x.select(1, 0),
    "narrow": lambda t: t.x.narrow(1, 0, 2),
    "view": lambda t: t.x.view(*t.x.shape[:2], 2, 2),
    "view_as": lambda t: t.x.flatten(0, 1).view_as(t.y),
    "reshape_as": lambda t: t.x.flatten(0, 1).reshape_as(t.y),
    "expand": lambda t: t.x[..., None].expand(-1, -1, -1, 3),
    "t": lambda t: t.x[..., 0].t().t(),
    "adjoint": lambda t: t.c.adjoint(),
    "broadcast_to": lambda t: torch.broadcast_to(t.x[..., None], (-1, -1, -1, 3)),
    **{
        f"{name}_": lambda t, f=f"{name}_": getattr(t.x * 1, f)(1, 2)
        for name in ("transpose", "swapaxes", "swapdims")
    },
    "t_": lambda t: (t.x[..., 0] * 1).t_().t_(),
    "unsqueeze_": lambda t: (t.x * 1).unsqueeze_(1),
    "squeeze_": lambda t: (t.x[:, None] * 1).squeeze_(1),
    # planes
    "tril_": lambda t: (t.pair * 1).movedim(-1, 1).tril_(),
    "triu_": lambda t: (t.pair * 1).movedim(-1, 1).triu_(),
    "diagonal_scatter": lambda t: t.pair.diagonal_scatter(t.pair.diagonal(0, 1, 2) * 2, 0, 1, 2),
    "diag_embed": lambda t: (t.x.diag_embed(), t.x.transpose(1, 2).diag_embed(1)),
    "unfold": lambda t: (t.x.unfold(1, 2, 1), t.x.unfold(2, 2, 2)),
    # copies
    "alias_copy": lambda t: torch.alias_copy(t.x),
    "detach_copy": lambda t: torch.detach_copy(t.x),
    "detach_": lambda t: (t.x * 1).detach_(),
    "diagonal_copy": lambda t: torch.diagonal_copy(t.pair, 0, 1, 2),
    "expand_copy": lambda t: torch.expand_copy(t.x[..., None], (-1, -1, -1, 3)),
    "narrow_copy": lambda t: torch.narrow_copy(t.x, 2, 1, 2),
    "permute_copy": lambda t: torch.permute_copy(t.x, (0, 2, 1)),
    "select_copy": lambda t: torch.select_copy(t.x, 2, 0),
    "slice_copy": lambda t: torch.slice_copy(t.x, 1, 1, -1),
    "split_copy": lambda t: torch.split_copy(t.x, 2, 2),
    "split_with_sizes_copy": lambda t: torch.split_with_sizes_copy(t.x, (1, 3), 2),
    "squeeze_copy": lambda t: torch.squeeze_copy(t.x[:, None], 1),
    "t_copy": lambda t: torch.t_copy(t.x[..., 0]).t(),
    "transpose_copy": lambda t: torch.transpose_copy(t.x, 1, 2),
    "unbind_copy": lambda t: torch.unbind_copy(t.x, 2),
    "unfold_copy": lambda t: torch.unfold_copy(t.x, 1, 2, 1),
    "unsqueeze_copy": lambda t: torch.unsqueeze_copy(t.x, 1),
    "view_as_complex_copy": lambda t: torch.view_as_complex_copy(t.x.unflatten(2, (2, 2))),
    "view_as_real_copy": lambda t: torch.view_as_real_copy(t.c),
    "view_copy": lambda t: torch.view_copy(t.x, t.x.shape),
    # creation
    "new_empty_strided": lambda t: t.x.new_empty_strided((2, 3), (3, 1)),
    "new_zeros": lambda t: t.x.new_zeros(t.x.shape),
    "new_ones": lambda t: t.x.new_ones(t.x.shape),
    "new_full": lambda t: t.x.new_full(t.x.shape, 2.0),
    "new_empty": lambda t: t.x.new_empty(t.x.shape),
    "new_tensor": lambda t: t.x.new_tensor([1.0, 2.0]),
    "dropout1d": lambda t: F.dropout1d(t.x.transpose(1, 2)),
    "dropout2d": lambda t: F.dropout2d(t.pair.movedim(-1, 1)),
    "dropout3d": lambda t: F.dropout3d(t.pair.movedim(-1, 1)[..., None]),
    "feature_dropout": lambda t: torch.feature_dropout(t.x.transpose(1, 2), 0.5, True),
    "feature_dropout_": lambda t: torch.feature_dropout_((t.x * 1).transpose(1, 2), 0.5, True),
    "feature_alpha_dropout_": lambda t: torch.feature_alpha_dropout_((t.x * 1).transpose(1, 2), 0.5, True),
    "feature_alpha_dropout": lambda t: F.feature_alpha_dropout(t.x.transpose(1, 2), 0.5, True),
    "multinomial": lambda t: t.x.flatten(0, 1).multinomial(2),
    # feature
    "linear": lambda t: F.linear(t.x, WEIGHT),
    "layer_norm": lambda t: F.layer_norm(t.x, (4,)),
    "rms_norm": lambda t: F.rms_norm(t.x, (4,), torch.ones(4)),
    "glu": lambda t: F.glu(t.x),
    "prelu": lambda t: F.prelu(t.x - 0.5, torch.tensor([0.2])),
    "embedding": lambda t: F.embedding(t.tokens, TABLE),
    "one_hot": lambda t: F.one_hot(t.tokens, 7),
    "isin": lambda t: torch.isin(t.i, torch.tensor([1, 3])),
    "bucketize": lambda t: torch.bucketize(t.x, torch.tensor([0.2, 0.7])),
    "searchsorted": lambda t: torch.searchsorted(torch.tensor([0.2, 0.7]), t.x),
    "view_as_real": lambda t: torch.view_as_real(t.c),
    "view_as_complex": lambda t: torch.view_as_complex(t.x.unflatten(2, (2, 2))),
    # query
    "is_conj": lambda t: t.c.is_conj(),
    "is_neg": lambda t: t.x.is_neg(),
    "nelement": lambda t: t.x.sum() / t.x.nelement(),
    "equal": lambda t: t.x.sum(),
    "is_same_size": lambda t: t.x.is_same_size(t.y),
    "clone": lambda t: t.x.clone(),
    "detach": lambda t: t.x.detach(),
    "contiguous": lambda t: t.x.contiguous(),
    "is_floating_point": lambda t: t.x.is_floating_point(),
    "is_complex": lambda t: t.x.is_complex(),
    "is_signed": lambda t: t.x.is_signed(),
    "numel": lambda t: t.x.sum() / t.x.numel(),
    # indexing
    "getitem": lambda t: (t.x[:, 1:, 0], t.x[:, -3:2]),
    "setitem": lambda t: _assigned(t.x * 1),
    "gather": lambda t: t.x.gather(2, t.i % 4),
    "take_along_dim": lambda t: t.x.take_along_dim(t.i % 4, 2),
    "index_select": lambda t: t.x.index_select(2, torch.tensor([0, 2])),
    "index_put": lambda t: t.x.index_put((t.b,), torch.tensor(0.0), accumulate=True),
    "index_put_": lambda t: (t.x * 1).index_put_((t.b,), torch.tensor(0.0)),
    "select_scatter": lambda t: t.x.select_scatter(t.y[..., 0], 2, 1),
    "slice_scatter": lambda t: t.x.slice_scatter(t.y[..., :2], 2, 0, 2),
    "scatter": lambda t: t.x.scatter(2, t.i % 4, t.y),
    "scatter_": lambda t: (t.x * 1).scatter_(2, t.i % 4, t.y),
    "scatter_add": lambda t: t.x.scatter_add(2, t.i % 4, t.y),
    "scatter_add_": lambda t: (t.x * 1).scatter_add_(2, t.i % 4, t.y),
    "scatter_reduce": lambda t: t.x.scatter_reduce(2, t.i % 4, t.y, "amax"),
    "scatter_reduce_": lambda t: (t.x * 1).scatter_reduce_(2, t.i % 4, t.y, "amax"),
    "index_add": lambda t: t.x.index_add(2, torch.tensor([0, 2]), t.y[..., :2]),
    "index_add_": lambda t: (t.x * 1).index_add_(2, torch.tensor([0, 2]), t.y[..., :2]),
    "index_copy": lambda t: t.x.index_copy(2, torch.tensor([0, 2]), t.y[..., :2]),
    "index_copy_": lambda t: (t.x * 1).index_copy_(2, torch.tensor([0, 2]), t.y[..., :2]),
    "index_fill": lambda t: t.x.index_fill(2, torch.tensor([0, 2]), 0.5),
    "index_fill_": lambda t: (t.x * 1).index_fill_(2, torch.tensor([0, 2]), 0.5),
    "index_reduce": lambda t: t.x.index_reduce(2, torch.tensor([0, 2]), t.y[..., :2], "amax"),
    "index_reduce_": lambda t: (t.x * 1).index_reduce_(2, torch.tensor([0, 2]), t.y[..., :2], "amax"),
    "take": lambda t: t.x.take(t.i),
    "masked_scatter": lambda t: t.x.masked_scatter(t.b, t.y.reshape(-1)[t.b.reshape(-1)]),
    "masked_scatter_": lambda t: (t.x * 1).masked_scatter_(t.b, t.y.reshape(-1)[t.b.reshape(-1)]),
    "masked_select": lambda t: t.x.masked_select(t.b),
    "nonzero": lambda t: t.b.nonzero(),
    "argwhere": lambda t: t.b.argwhere(),
    # join
    **{name: lambda t, f=name: function_of(f)([t.x, t.y], 2) for name in ("cat", "concat", "concatenate")},
    "stack": lambda t: torch.stack([t.x, t.y], 2),
    "hstack": lambda t: torch.hstack([t.x, t.y]),
    "dstack": lambda t: torch.dstack([t.x, t.y]),
    "column_stack": lambda t: torch.column_stack([t.x, t.y]),
    "vstack": lambda t: torch.vstack([t.x, t.y]),
    "row_stack": lambda t: torch.row_stack([t.x, t.y]),
    "broadcast_tensors": lambda t: torch.broadcast_tensors(t.x, t.x.mean(1, keepdim=True)),
    "expand_as": lambda t: t.x.mean(2, keepdim=True).expand_as(t.x),
    "split": lambda t: t.x.split(2, 2),
    "split_with_sizes": lambda t: t.x.split_with_sizes([1, 3], 2),
    "unsafe_split": lambda t: t.x.unsafe_split(2, 2),
    "unsafe_split_with_sizes": lambda t: t.x.unsafe_split_with_sizes([1, 3], 2),
    "unsafe_chunk": lambda t: t.x.unsafe_chunk(2, -1),
    "chunk": lambda t: t.x.chunk(2, -1),
    "tensor_split": lambda t: t.x.tensor_split(2, -1),
    "unbind": lambda t: t.x.unbind(-1),
    "hsplit": lambda t: t.x.transpose(1, 2).hsplit(2),
    "vsplit": lambda t: t.x.transpose(0, 2).vsplit(2),
    "dsplit": lambda t: t.x.dsplit(2),
    **{name: lambda t, f=name: function_of(f)(t.x) for name in ("atleast_1d", "atleast_2d", "atleast_3d")},
    "repeat": lambda t: t.x.repeat(1, 1, 2),
    "tile": lambda t: t.x.tile(1, 1, 2),
    "repeat_interleave": lambda t: t.x.repeat_interleave(2, -1),
    "pad": lambda t: F.pad(t.x, (1, 2)),
    "constant_pad_nd": lambda t: torch.constant_pad_nd(t.x, (1, 2)),
    "tril": lambda t: t.pair.movedim(-1, 1).tril(),
    "triu": lambda t: t.pair.movedim(-1, 1).triu(),
    "diagonal": lambda t: (t.pair.diagonal(dim1=1, dim2=2), _rectangle(t).diagonal(dim1=1, dim2=2)),
    # linalg
    "linalg_solve": lambda t: torch.linalg.solve(square(t), square(t)),
    "linalg_solve_ex": lambda t: torch.linalg.solve_ex(square(t), square(t)),
    "linalg_solve_triangular": lambda t: torch.linalg.solve_triangular(square(t), square(t), upper=True),
    "linalg_lstsq": lambda t: torch.linalg.lstsq(square(t), square(t)),
    "linalg_lu_solve": lambda t: torch.linalg.lu_solve(*torch.linalg.lu_factor(square(t)), square(t)),
    "lu_solve": lambda t: torch.lu_solve(square(t), *torch.linalg.lu_factor(square(t))),
    "lu_unpack": lambda t: torch.lu_unpack(*torch.linalg.lu_factor(square(t))),
    "cholesky_solve": lambda t: torch.cholesky_solve(square(t), square(t)),
    "linalg_ldl_solve": lambda t: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(square(t)), square(t)),
    "linalg_householder_product": lambda t: torch.linalg.householder_product(square(t), t.x[..., :2]),
    "orgqr": lambda t: torch.orgqr(square(t), t.x[..., :2]),
    "matrix_power": lambda t: torch.matrix_power(square(t), 2),
    "linalg_matrix_power": lambda t: torch.linalg.matrix_power(square(t), 2),
    "linalg_vander": lambda t: (torch.linalg.vander(t.x), torch.linalg.vander(t.x, N=3)),
    "cross": lambda t: torch.cross(t.x[..., :3], t.y[..., :3], dim=2),
    "linalg_cross": lambda t: torch.linalg.cross(t.x[..., :3], t.y[..., :3]),
    "linalg_matrix_norm": lambda t: (torch.linalg.matrix_norm(t.pair, dim=(1, 2)), square(t).mT),
    # counting
    "unique": lambda t: t.i.unique(),
    "unique_consecutive": lambda t: t.i.unique_consecutive(),
    "bincount": lambda t: t.i.bincount(),
    "histc": lambda t: t.x.histc(4, 0, 1),
    "histogram": lambda t: torch.histogram(t.x, 4, range=(0.0, 1.0)),
    "cov": lambda t: torch.cov(square(t)),
    "corrcoef": lambda t: torch.corrcoef(square(t)),
    "embedding_bag": lambda t: F.embedding_bag(t.tokens, TABLE),
    # recurrent
    **{
        name: lambda t, f=name: function_of(f)(
            t.x, recurrent_state(f, t.x.batch_size), recurrent_weights(f), True, 1, 0.0, True, False, True
        )
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
    **{
        name: lambda t, f=name: function_of(f)(
            t.x, (t.x, t.y) if f == "lstm_cell" else t.y, *recurrent_weights(f)[:2]
        )
        for name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
    },
    # normalisation
    "batch_norm": lambda t: F.batch_norm(t.x.transpose(1, 2), None, None, WEIGHT[0], WEIGHT[1], True),
    "group_norm": lambda t: F.group_norm(t.x.transpose(1, 2), 2, WEIGHT[0], WEIGHT[1]),
    "instance_norm": lambda t: F.instance_norm(t.x.transpose(1, 2), None, None, WEIGHT[0], WEIGHT[1]),
    "local_response_norm": lambda t: F.local_response_norm(t.x.transpose(1, 2), 3),
    "native_layer_norm": lambda t: torch.native_layer_norm(t.x, (4,), WEIGHT[0], WEIGHT[1], 1e-5),
    "native_dropout": lambda t: torch.native_dropout(t.x, 0.5, True),
    "channel_shuffle": lambda t: F.channel_shuffle(t.x.transpose(1, 2), 2),
    # loss
    "cross_entropy": lambda t: F.cross_entropy(t.x.view(-1, 4), t.tokens.view(-1) % 4),
    **{
        name: lambda t, f=name: getattr(F, f)(t.x, t.tokens % 4) for name in ("nll_loss", "multi_margin_loss")
    },
    "multilabel_margin_loss": lambda t: F.multilabel_margin_loss(t.x, t.i % 5 - 1, reduction="none"),
    "linear_cross_entropy": lambda t: F.linear_cross_entropy(t.x, WEIGHT, t.tokens % 3),
    "cosine_embedding_loss": lambda t: F.cosine_embedding_loss(t.x, t.y, t.tokens % 2 * 2 - 1),
    **{
        name: lambda t, f=name: getattr(F, f)(t.x, t.y, t.z)
        for name in (
            *("triplet_margin_loss", "triplet_margin_with_distance_loss"),
            *("gaussian_nll_loss", "margin_ranking_loss"),
        )
    },
    "poisson_nll_loss": lambda t: F.poisson_nll_loss(t.x, t.y),
    "ctc_loss": lambda t: F.ctc_loss(t.x.log_softmax(-1), t.tokens[:, 1:] % 3 + 1, None, None),
    # reduction
    "kthvalue": lambda t: t.x.kthvalue(2, -1),
    "quantile": lambda t: t.x.quantile(0.5, -1),
    "nanquantile": lambda t: t.x.nanquantile(0.5, -1),
    "dist": lambda t: torch.dist(t.x, t.y),
    "pairwise_distance": lambda t: F.pairwise_distance(t.x, t.y),
    "cosine_similarity": lambda t: F.cosine_similarity(t.x, t.y, -1),
    "aminmax": lambda t: t.x.aminmax(dim=1),
    "linalg_vector_norm": lambda t: (torch.linalg.vector_norm(t.x, dim=1), torch.linalg.vector_norm(t.x)),
    "all": lambda t: t.b.all(1),
    "any": lambda t: t.b.any(1),
    # scan
    "topk": lambda t: t.x.topk(2, 1),
    "roll": lambda t: t.x.roll(1, 1),
    "flip": lambda t: t.x.flip(1),
    "flipud": lambda t: t.x.transpose(0, 1).flipud(),
    "cumsum_": lambda t: (t.x * 1).cumsum_(1),
    "cumprod_": lambda t: (t.x * 1).cumprod_(1),
    **{
        name: lambda t, f=name: (function_of(f)(t.x, dim=1), function_of(f)(t.x, dim=2))
        for name in ("trapezoid", "trapz", "cumulative_trapezoid")
    },
    "fliplr": lambda t: t.x.fliplr(),
    "rot90": lambda t: t.pair.rot90(2, (1, 2)),
}
CALLS["polygamma_"] = lambda t: (t.x * 1).polygamma_(1)
CALLS["mvlgamma_"] = lambda t: (t.x + 3).mvlgamma_(2)
CALLS["equal"] = lambda t: torch.equal(t.x, t.x)
CALLS["allclose"] = lambda t: torch.allclose(t.x, t.x)


def _rectangle(t: Any) -> Any:
    return t.x[:, :, None] + t.y[:, None, 1:]


def _assigned(x: Any) -> Any:
    x[..., 0] = 1.0
    return x


def recurrent_state(name: str, batch: int) -> Any:
    """Zeros for 4 hidden features."""
    zeros = torch.zeros(1, batch, 4)
    return (zeros, zeros) if name.startswith("lstm") else zeros


def recurrent_weights(name: str) -> list[Tensor]:
    """Weights and biases for 4 features and 4 hidden ones."""
    rows = 4 * {"lstm": 4, "gru": 3}.get(name.removesuffix("_cell"), 1)
    return [torch.ones(rows, 4), torch.ones(rows, 4), torch.ones(rows), torch.ones(rows)]


def square(t: Any) -> Any:
    """Matrices of a fixed size, symmetric enough for any operator."""
    return t.x.unflatten(2, (2, 2)) + 2 * torch.eye(2)


def call_of(row: dispatch.Row) -> Callable[[Any], Any]:
    """The call of a row: its own, or what all rows of its kind have in common."""
    if row.name in CALLS:
        return CALLS[row.name]
    if row.kind in ("pointwise",):
        return pointwise_call(row.name)
    function = function_of(row.name)
    if row.kind == "linalg":
        inside = getattr(torch.linalg, row.name.removeprefix("linalg_"), None)
        function = inside if row.name.startswith("linalg_") else function_of(row.name)
        return lambda t: function(square(t))
    if row.kind == "loss":
        return lambda t: function(t.x, t.y)
    if row.kind in ("reduction", "scan"):
        return lambda t: (function(t.x, 1), function(t.x, 2))
    raise AssertionError(f"no call for '{row.name}', of kind '{row.kind}'")


def groups() -> list[list[str]]:
    """The names of rows that compile with this version of torch, kind by kind."""
    kinds: dict[str, list[str]] = {}
    for row in dispatch.ROWS.values():
        if row.compiles and compat.COMPILES_SINCE.get(row.name, (0,)) <= compat.TORCH:
            kinds.setdefault(row.kind, []).append(row.name)
    return [names[k : k + GROUP] for names in kinds.values() for k in range(0, len(names), GROUP)]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def failures(calls: dict[str, Callable[[Any], Any]]) -> dict[str, str]:
    """Compile the calls as one graph; what went wrong, by name."""
    torch._dynamo.reset()
    counters.clear()

    def program(t: Operands) -> dict[str, Any]:
        return {name: call(t) for name, call in calls.items()}

    compiled = torch.compile(program, fullgraph=True, backend="eager")
    wrong: dict[str, str] = {}
    for lengths in BATCHES:
        t = Operands(lengths).marked()
        try:
            got = compiled(t)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the finding
            return {", ".join(calls): f"{lengths}: {type(error).__name__} {error}"[:1500]}
        for name, call in calls.items():
            try:
                compare(got[name], call(t), name not in RANDOM)
            except AssertionError as error:
                wrong[name] = f"{lengths}: {error}"[:300]
    if counters["stats"]["unique_graphs"] > 1:
        wrong[", ".join(calls)] = f"{counters['stats']['unique_graphs']} graphs"
    return wrong


def compare(got: Any, want: Any, values: bool) -> None:
    """The same structure and, unless random, the same values."""
    pairs = [pytree.tree_leaves(out, is_leaf=is_packed) for out in (got, want)]
    assert len(pairs[0]) == len(pairs[1])
    for a, b in zip(*pairs):
        assert type(a) is type(b)
        if is_packed(b):
            assert a.order == b.order
            assert [p.lengths.tolist() for p in a.axes] == [p.lengths.tolist() for p in b.axes]
            a, b = a.values, b.values
        if values:
            torch.testing.assert_close(a, b, equal_nan=True)
        else:
            assert not isinstance(b, Tensor) or (a.shape == b.shape and a.dtype == b.dtype)


@pytest.mark.parametrize("names", groups(), ids=lambda names: f"{names[0]}-{names[-1]}")
def test_rows_that_compile_are_one_graph_and_equal_eager(names: list[str]) -> None:
    calls = {name: call_of(dispatch.ROWS[name]) for name in names}
    wrong = failures(calls)
    if any("," in name for name in wrong) and len(names) > 1:
        wrong = {name: text for one in names for name, text in failures({one: calls[one]}).items()}
    assert not wrong, "\n\n".join(f"{name}: {text}" for name, text in wrong.items())


@pytest.mark.parametrize("name", [row.name for row in dispatch.ROWS.values() if not row.compiles])
def test_rows_that_do_not_compile_raise_in_a_graph(name: str) -> None:
    """Nothing is compiled by accident, nor run one sample at a time."""
    with pytest.raises(AssertionError):
        wrong = failures({name: call_of(dispatch.ROWS[name])})
        assert not wrong
