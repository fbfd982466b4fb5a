"""Pointwise operators: each output position reads the same position of every operand.

Adding one is adding its name below; ``NAME_`` and Python's operators follow by themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..align import align
from ..tensor import PackedTensor, like

NAMES = """
    abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
    arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip conj copysign cos cosh
    deg2rad digamma div divide elu eq erf erfc erfinv exp exp2 expm1 fix float_power floor floor_divide
    fmax fmin fmod frac ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh
    heaviside hypot i0 igamma igammac isclose isfinite isinf isnan isneginf isposinf isreal ldexp le
    leaky_relu lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and
    logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul multiply
    nan_to_num ne neg negative nextafter not_equal polygamma positive pow rad2deg real reciprocal relu
    relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus
    softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide trunc xlogy
    dropout bernoulli zeros_like ones_like full_like empty_like rand_like randn_like
    randint_like bool byte cdouble cfloat char double float half bfloat16 int long short
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t
    chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w complex conj_physical entr erfcx
    expit fill gammainc gammaincc gammaln gcd hermite_polynomial_h hermite_polynomial_he i0e i1 i1e imag
    laguerre_polynomial_l lcm legendre_polynomial_p log_ndtr modified_bessel_i0
    modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln mvlgamma ndtr ndtri normal
    poisson polar psi resolve_conj resolve_neg rrelu scaled_modified_bessel_k0
    scaled_modified_bessel_k1 shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
    shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w spherical_bessel_j0 xlog1py zeta
""".split()

#: What PyTorch cannot trace: alpha_dropout and dropout_ ask whether there is an entry, which a graph for any
#: lengths does not know; binomial has no fake implementation, and random_ is refused.
UNTRACED = ["alpha_dropout", "binomial"]
UNTRACED_INPLACE = ["alpha_dropout_", "dropout_", "random_"]

INPLACE_ONLY = "copy_ zero_ uniform_ exponential_ random_ cauchy_ geometric_ log_normal_".split()


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None = None) -> Any:
    """Apply ``func`` to the payloads; on one structure without any work on it.

    ``name`` is what errors call it, where Dynamo could not tell.
    """
    first = None
    for a in args:
        if type(a) is PackedTensor:
            if first is None:
                first = a
            elif (a.grid is not first.grid) or a.order != first.order:
                return _aligned(func, args, kwargs, name or dispatch.name_of(func))
        elif isinstance(a, Tensor) and a.dim():
            return _aligned(func, args, kwargs, name or dispatch.name_of(func))
    if first is None or kwargs:
        return _aligned(func, args, kwargs, name or dispatch.name_of(func))
    payloads = [a.values if type(a) is PackedTensor else a for a in args]
    values = func(*payloads)
    return first if values is first.values else PackedTensor(values, first.grid, first.order)


def _aligned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    dispatch.refuse_out(name, kwargs)
    payloads, layout = align(name, [*args, *kwargs.values()])
    values = func(*payloads[: len(args)], **dict(zip(kwargs, payloads[len(args) :])))
    target = args[0] if args else None
    if type(target) is PackedTensor and values is target.values:
        return target
    return layout.wrap(values)


def where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.where`` with a condition and two values."""
    if len(args) + len(kwargs) < 3:
        raise NotImplementedError(
            "torch.where(condition) of a packed tensor: give it values, or use x.values"
        )
    return pointwise(func, args, kwargs)


def logsigmoid(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In a graph by its formula: PyTorch's gradient asks for the number of entries."""
    if not torch.compiler.is_compiling():
        return pointwise(func, args, kwargs)
    (x,) = (*args, *kwargs.values())
    least = torch.minimum(x.values, x.values.new_zeros(()))
    return like(x, least - torch.log1p(torch.exp(-x.values.abs())))


def pair(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Two results: mantissas and exponents, entries and those that were kept."""
    dispatch.refuse_out(dispatch.name_of(func), kwargs)
    x, rest = (args[0], args[1:]) if args else (kwargs["input"], ())
    return tuple(
        like(x, part) for part in func(x.values, *rest, **{k: kwargs[k] for k in kwargs if k != "input"})
    )


def type_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first operand with the second's dtype; the second's structure plays no part."""
    x, other = args
    dtype_of = other.values if type(other) is PackedTensor else other
    return x.to(dtype_of.dtype)


def pointwise_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None = None) -> Any:
    """The in-place form: the payload of the first operand changes, its structure stays.

    Raises:
        RuntimeError: the first operand is dense. (Not a TypeError: PyTorch would turn that into
            ``NotImplemented``, and Python would then rebind the name to a packed result.)
    """
    target = args[0]
    name = name or dispatch.name_of(func)
    if not isinstance(target, PackedTensor):
        raise RuntimeError(
            f"'{name}' would write packed values into a dense tensor of shape {tuple(target.shape)}; "
            "use the form that returns a new tensor, or x.to_padded()"
        )
    payloads, layout = align(name, [*args, *kwargs.values()])
    if layout.grid is not target.grid or layout.order != target.order:
        raise ValueError(f"'{name}' cannot add ragged dims to its first operand")
    keyed = dict(zip(kwargs, payloads[len(args) :]))
    if torch.compiler.is_compiling():
        target.values = _out_of_place(func, target, payloads[: len(args)], keyed)
    else:
        func(*payloads[: len(args)], **keyed)
    return target


def _out_of_place(func: Any, target: PackedTensor, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """In a graph the payload is replaced by a changed copy: payloads of one buffer must not meet there."""
    copy = target.values.clone()
    func(copy, *args[1:], **kwargs)
    return copy


def _method(name: str, func: Any, swapped: bool) -> Any:
    def method(self: PackedTensor, other: Any) -> Any:
        if type(other) is PackedTensor and other.grid is self.grid and other.order == self.order:
            return PackedTensor(func(self.values, other.values), self.grid, self.order)
        if isinstance(other, (int, float)):
            pair = (other, self.values) if swapped else (self.values, other)
            return PackedTensor(func(*pair), self.grid, self.order)
        if other is None or isinstance(other, (str, list, tuple, dict)):
            return NotImplemented
        return pointwise(func, (other, self) if swapped else (self, other), {}, name)

    return method


def _unary(func: Any) -> Any:
    def method(self: PackedTensor) -> Any:
        return PackedTensor(func(self.values), self.grid, self.order)

    return method


def _inplace(name: str, func: Any) -> Any:
    def method(self: PackedTensor, other: Any) -> Any:
        return pointwise_(func, (self, other), {}, name)

    return method


def _install_operators() -> None:
    unary = {"__neg__", "__pos__", "__invert__", "__abs__"}
    for name, (func, swapped) in dispatch.OPERATORS.items():
        _install(name, _unary(func) if name in unary else _method(name, func, swapped), pointwise)
    for name, func in dispatch.INPLACE_OPERATORS.items():
        _install(name, _inplace(name, func), pointwise_)
    _install("__rdiv__", None, pointwise)


def _install(name: str, method: Any, handler: dispatch.Handler) -> None:
    """Python's operator on packed tensors, and the dense tensor's with a packed operand."""
    if method is not None:
        method.__name__ = method.__qualname__ = name
        setattr(PackedTensor, name, method)
    dense = getattr(Tensor, name, None)
    if dense is not None:
        dispatch.PYTHON[name] = dispatch.PYTHON[dense.__name__] = handler


dispatch.register("pointwise", pointwise, NAMES)
dispatch.register("pointwise", pointwise, UNTRACED, compiles=False)
dispatch.register("pointwise", where, "where")
dispatch.register("pointwise", type_as, "type_as")
dispatch.register("pointwise", logsigmoid, "logsigmoid")
dispatch.register("pointwise", pair, "frexp native_dropout")
_inplace_names = [f"{name}_" for name in NAMES if list(dispatch.spellings(f"{name}_"))]
_compiled = [name for name in _inplace_names + INPLACE_ONLY if name not in UNTRACED_INPLACE]
dispatch.register("pointwise", pointwise_, _compiled)
dispatch.register("pointwise", pointwise_, UNTRACED_INPLACE, compiles=False)
_install_operators()
