"""One door for attention backends: a table of what each can do, a setting, and the choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from . import flash, flex, loop, varlen
from .call import Call


class Backend(NamedTuple):
    """A way to compute attention.

    Attributes:
        refuses: why it cannot do a call, or None.
        run: a settled call -> [Tq, H, Dv].
        summary: one line for the docs.
    """

    refuses: Callable[[Call], str | None]
    run: Callable[[Call], Tensor]
    summary: str


def _no_triton(call: Call) -> str | None:
    return "this version has no Triton kernel for attention"


#: Every backend by name.
TABLE: dict[str, Backend] = {
    "loop": Backend(
        loop.refuses,
        loop.run,
        "everything, on every device: one operator that computes each sample by itself; on a CPU with "
        "PyTorch's fused kernel, several samples at a time",
    ),
    "flash": Backend(
        flash.refuses,
        flash.run,
        "the package flash-attn: CUDA, float16 and bfloat16, no mask or bias, head dims up to 256",
    ),
    "varlen": Backend(
        varlen.refuses,
        varlen.run,
        "torch.nn.attention.varlen: as flash, without dropout; grouped heads from torch 2.13 on",
    ),
    "flex": Backend(
        flex.refuses,
        flex.run,
        "torch.nn.attention.flex_attention: masks and biases on CUDA, without dropout; on a CPU forward only",
    ),
    "triton": Backend(_no_triton, loop.run, "a name kept for a kernel to come; refuses everything"),
}
#: What ``auto`` tries in turn, by the type of device; any other device has ``loop``.
AUTO: dict[str, tuple[str, ...]] = {"cuda": ("flash", "varlen", "loop")}


class attention_backend:
    """Choose the backend of attention: for good, or inside a ``with`` block.

    >>> with ops.attention_backend("loop"):
    ...     model(batch)

    Args:
        name: ``"auto"`` takes the first backend that can do a call, by device; see docs/attention.md. Any
            other name takes that one, and a call it cannot do raises.

    Raises:
        ValueError: no backend of that name.
    """

    name = "auto"

    def __init__(self, name: str) -> None:
        if name != "auto" and name not in TABLE:
            raise ValueError(f"no attention backend '{name}'; there are auto, {', '.join(TABLE)}")
        self.before = attention_backend.name
        attention_backend.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        attention_backend.name = self.before


def attend(call: Call) -> Tensor:
    """Attention by the backend that is set: a settled call -> [Tq, H, Dv].

    Raises:
        NotImplementedError: the backend that is set cannot do it; names those that can.
    """
    name = attention_backend.name
    if name == "auto":
        for candidate in AUTO.get(call.query.device.type, ()):
            if TABLE[candidate].refuses(call) is None:
                return TABLE[candidate].run(call)
        return loop.run(call)
    reason = TABLE[name].refuses(call)
    if reason is not None:
        able = ", ".join(other for other, backend in TABLE.items() if backend.refuses(call) is None)
        raise NotImplementedError(
            f"attention backend '{name}' cannot do this: {reason}. Those that can: {able}"
        )
    return TABLE[name].run(call)


def markdown() -> str:
    """The table of backends as the docs print it."""
    lines = ["| backend | what it does |", "| --- | --- |"]
    lines += [f"| `{name}` | {backend.summary} |" for name, backend in TABLE.items()]
    chosen = "; ".join(f"on `{device}` {', '.join(names)}" for device, names in AUTO.items())
    return "\n".join([*lines, f"| `auto` | the first that can do the call: {chosen}; elsewhere loop |"])
