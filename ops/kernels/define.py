"""How a kernel becomes an operator: one definition, two ways to call it.

In eager a kernel is called directly, or through an ``autograd.Function`` when a gradient is needed:
1-4 us. In a graph it is a ``torch.library`` operator of the namespace ``packed`` with a fake
implementation and an autograd formula, so that the compiler sees one opaque node. Both ways share the
same forward, setup and backward functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "packed"
_library = torch.library.Library(NAMESPACE, "DEF")


def define(
    schema: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    differentiable: int = 1,
    transparent: bool = False,
) -> Callable[..., Any]:
    """Register a kernel and return the function that calls it.

    Args:
        schema: the operator's schema, e.g. ``"sum_rows(Tensor values, Tensor index) -> Tensor"``.
        forward: the kernel; plain tensors in, new plain tensors out (never an alias of an input).
        fake: computes the outputs' shapes and dtypes on fake tensors.
        setup: ``setup(ctx, inputs, output)`` saves what backward needs.
        backward: ``backward(ctx, *grads)`` returns one gradient per input; None: no gradient.
        differentiable: how many leading inputs can carry a gradient.
        transparent: the kernel is made of PyTorch's own operators for tensors of any kind. Below autograd
            a compiler then sees these, and can fuse them with what stands around; ``fake`` is not needed.
    """
    name = schema.split("(", 1)[0]
    qualified = f"{NAMESPACE}::{name}"
    _library.define(schema)
    _library.impl(name, forward, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=_library)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    if backward is None:
        return _plain_call(name, operator, forward)
    torch.library.register_autograd(qualified, backward, setup_context=setup, lib=_library)
    function = _function(name, forward, setup, backward)
    if transparent:
        return _transparent_call(name, operator, forward, function, differentiable)
    return _differentiable_call(name, operator, forward, function, differentiable)


def mark_effectful(name: str) -> None:
    """Keep an operator that returns nothing in every graph, in order, although nobody reads it."""
    torch.library._register_effectful_op(f"{NAMESPACE}::{name}", _ordered_effect())


def _ordered_effect() -> Any:
    return torch._library.effects.EffectType.ORDERED


def _function(name: str, forward: Any, setup: Any, backward: Any) -> type[torch.autograd.Function]:
    members = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup),
        "backward": staticmethod(backward),
    }
    return type(f"Packed_{name}", (torch.autograd.Function,), members)


def recorded(values: torch.Tensor) -> bool:
    """Whether autograd records what happens to ``values``."""
    return values.requires_grad and torch.is_grad_enabled()


def _is_plain(operand: Any) -> bool:
    """False for the fake and functional tensors with which a compiler traces a backward formula."""
    tensor = operand[0] if isinstance(operand, (list, tuple)) and operand else operand
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) or isinstance(tensor, (list, tuple))


def _plain_call(name: str, operator: Any, forward: Any) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_plain(args[0]):
            return operator(*args)
        return forward(*args)

    call.__name__ = call.__qualname__ = name
    return call


def _differentiable_call(
    name: str, operator: Any, forward: Any, function: type[torch.autograd.Function], leading: int
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_plain(args[0]):
            return operator(*args)
        if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in args[:leading]):
            return function.apply(*args)
        return forward(*args)

    call.__name__ = call.__qualname__ = name
    return call


def _transparent_call(
    name: str, operator: Any, forward: Any, function: type[torch.autograd.Function], leading: int
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if not torch.is_grad_enabled() or not any(a.requires_grad for a in args[:leading]):
            return forward(*args)
        if torch.compiler.is_compiling() or _is_plain(args[0]):
            return function.apply(*args)
        return operator(*args)

    call.__name__ = call.__qualname__ = name
    return call
