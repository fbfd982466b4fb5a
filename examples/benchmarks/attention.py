"""Attention on samples of many lengths: ``python -m examples.benchmarks.attention``.

First `scaled_dot_product_attention` alone, 32 samples of log-normal lengths (mean 178, at most 512), 8 heads
of 32 features: on a `PackedTensor`, on each sample of one split, on padded batches with a mask, also with a
bias for each pair, and in fewer rounds on `torch.nested`; on long samples with a window. Then a training step
(without the optimiser) of unmodified `nn.TransformerEncoder`, `nn.Transformer` and `nn.TransformerDecoder`:
packed, padded with a mask, packed by hand from the same weights, and where the package is installed danling.
All sides take turns; a figure is the median of the ratios of the rounds.
"""

import argparse
import importlib.util
import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from examples.benchmarks._timing import Case, interleaved, threads
from ops import PackedTensor
from ops.nn import attention
from packload.demo.data import load_reviews

HEADS, HEAD_DIM, WIDTH = 8, 32, 256
sdpa: Callable[..., Any] = F.scaled_dot_product_attention
Sides = Mapping[str, Callable[[], Any]]


def lognormal_lengths(count: int, mean: float, most: int, seed: int, sigma: float = 0.8) -> list[int]:
    """Lengths from 1 to ``most`` whose mean is close to ``mean``."""
    drawn = torch.randn(4096, generator=torch.Generator().manual_seed(seed)).mul(sigma).exp()
    low, high = 0.0, float(most)
    for _ in range(40):  # the scale at which the cut lengths have that mean
        middle = (low + high) / 2
        low, high = (middle, high) if (drawn * middle).clamp(1, most).mean() < mean else (low, middle)
    return (drawn[:count] * low).clamp(1, most).int().tolist()


def parallel_lengths(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Lengths of sentences and of their translations: log-normal around 30 and 38, correlation 0.88."""
    noise = torch.randn(2, count, generator=torch.Generator().manual_seed(seed))
    other = 0.88 * noise[0] + math.sqrt(1 - 0.88**2) * noise[1]
    sizes = [(0.45 * n + math.log(m)).exp().clamp(4, 160) for n, m in ((noise[0], 30), (other, 38))]
    return sizes[0].int().tolist(), sizes[1].int().tolist()


# ---------------------------------------------------------------- the function alone


def attention_sides(
    lengths: list[int], dtype: torch.dtype, *, bias: bool = False, backward: bool, nested: bool = False
) -> Sides:
    """Calls that attend, and with ``backward`` compute the gradients of all operands.

    ``nested`` sets the packed side against `torch.nested` alone, which takes minutes.
    """
    torch.manual_seed(0)
    shape = (HEADS, HEAD_DIM)
    samples = [[torch.randn(n, *shape, dtype=dtype) for n in lengths] for _ in range(3)]
    pairs = [torch.randn(n, n, HEADS, dtype=dtype) for n in lengths]
    packed = [PackedTensor.from_list(one, "n _ _") for one in samples]
    pair = PackedTensor.from_list(pairs, "n n _")
    padded = [x.to_padded().transpose(1, 2).contiguous() for x in packed]
    seen = packed[0].mask()[:, None, None]
    hidden = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -math.inf)
    padded_pair = pair.to_padded().movedim(-1, 1).contiguous()
    rows, cells = [x.values.clone() for x in packed], pair.values.clone()
    squares = [n * n for n in lengths]

    def on_packed(leaves: list[Any]) -> Any:
        q, k, v = (PackedTensor(x, packed[0].grid, (0, 1, 2, 3)).transpose(1, 2) for x in leaves[:3])
        mask = PackedTensor(leaves[3], pair.grid, pair.order).movedim(-1, 1) if bias else None
        return sdpa(q, k, v, attn_mask=mask).values

    def on_split(leaves: list[Any]) -> Any:
        parts = [x.split(lengths) for x in leaves[:3]]
        masks: Any = leaves[3].split(squares) if bias else [None] * len(lengths)
        outs = []
        for q, k, v, m, n in zip(*parts, masks, lengths):
            mask = m.view(n, n, HEADS).movedim(-1, 0)[None] if bias else None
            one = (t.transpose(0, 1)[None] for t in (q, k, v))
            outs.append(sdpa(*one, attn_mask=mask)[0].transpose(0, 1))
        return torch.cat(outs)

    def on_padded(leaves: list[Any]) -> Any:
        return sdpa(*leaves[:3], attn_mask=leaves[3] + hidden if bias else seen)

    def on_nested(leaves: list[Any]) -> Any:
        q, k, v = (torch.nested.nested_tensor_from_jagged(x, offsets) for x in leaves)
        return sdpa(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).values()

    offsets = packed[0].offsets.long()
    sides = {
        "packed": (on_packed, [*rows, cells]),
        "each sample": (on_split, [*rows, cells]),
        "padded": (on_padded, [*padded, padded_pair]),
    }
    if nested:
        sides = {"packed": sides["packed"], "torch.nested": (on_nested, rows)}
    return {name: _call(fn, leaves[: 4 if bias else 3], backward) for name, (fn, leaves) in sides.items()}


def window_sides(lengths: list[int], reach: int, *, backward: bool) -> Sides:
    """Queries see ``reach`` keys before and behind them: packed, and each sample with a mask."""
    torch.manual_seed(0)
    rows = [torch.randn(sum(lengths), HEADS, HEAD_DIM) for _ in range(3)]
    grid = PackedTensor.from_list(list(rows[0].split(lengths)), "n _ _").grid
    places = torch.arange(max(lengths))
    seen = (places - places[:, None]).abs() <= reach

    def on_packed(leaves: list[Any]) -> Any:
        q, k, v = (PackedTensor(x, grid, (0, 1, 2, 3)).transpose(1, 2) for x in leaves)
        return attention(q, k, v, window=(reach, reach)).values

    def on_split(leaves: list[Any]) -> Any:
        outs = []
        for n, *one in zip(lengths, *(x.split(lengths) for x in leaves)):
            q, k, v = (t.transpose(0, 1)[None] for t in one)
            outs.append(sdpa(q, k, v, attn_mask=seen[:n, :n])[0].transpose(0, 1))
        return torch.cat(outs)

    sides = {"packed": on_packed, "each sample": on_split}
    return {name: _call(fn, rows, backward) for name, fn in sides.items()}


def _call(fn: Callable[[list[Any]], Any], leaves: list[Tensor], backward: bool) -> Callable[[], Any]:
    if not backward:

        def forward() -> None:
            with torch.no_grad():
                fn(leaves)

        return forward
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    cotangent = torch.randn_like(fn(leaves))
    return lambda: torch.autograd.grad(fn(leaves), leaves, cotangent)


# ---------------------------------------------------------------- modules


def encoder_sides(lengths: list[int], layers: int) -> Sides:
    """Forward and backward of `nn.TransformerEncoder`."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    x = PackedTensor.from_list([torch.randn(n, WIDTH) for n in lengths], "n _")
    padded, padding = x.to_padded(), ~x.mask()
    sides = {
        "packed": lambda: model(x).values,
        "by hand": lambda: _encoded_by_hand(model, x.values, lengths),
        "padded": lambda: model(padded, src_key_padding_mask=padding)[~padding],
    }
    nested = _danling(x.to_list())
    if nested is not None:
        sides["danling"] = lambda: model(nested).concat
    return {name: _step(model, fn) for name, fn in sides.items()}


def transformer_sides(sources: list[int], targets: list[int], layers: int) -> Sides:
    """Forward and backward of `nn.Transformer`, the target side causal."""
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, HEADS, layers, layers, 4 * WIDTH, dropout=0.0, batch_first=True)
    x = PackedTensor.from_list([torch.randn(n, WIDTH) for n in sources], "n _")
    y = PackedTensor.from_list([torch.randn(n, WIDTH) for n in targets], "m _")
    inputs, outputs, hidden, padding = x.to_padded(), y.to_padded(), ~x.mask(), ~y.mask()
    causal = nn.Transformer.generate_square_subsequent_mask(outputs.shape[1]).isinf()

    def padded() -> Tensor:
        masks = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden, "tgt_mask": causal}
        return model(inputs, outputs, tgt_key_padding_mask=padding, **masks)[~padding]

    def by_hand() -> Tensor:
        memory = _encoded_by_hand(model.encoder, x.values, sources)
        return _decoded_by_hand(model.decoder, y.values, memory, targets, sources)

    sides = {
        "packed": lambda: model(x, y, tgt_is_causal=True).values,
        "by hand": by_hand,
        "padded": padded,
    }
    return {name: _step(model, fn) for name, fn in sides.items()}


def decoder_sides(sources: list[int], targets: list[int], layers: int) -> Sides:
    """Forward and backward of `nn.TransformerDecoder`: causal over the targets, then over the sources."""
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.TransformerDecoder(layer, layers)
    memory = PackedTensor.from_list([torch.randn(n, WIDTH) for n in sources], "n _")
    y = PackedTensor.from_list([torch.randn(n, WIDTH) for n in targets], "m _")
    inputs, outputs, hidden, padding = memory.to_padded(), y.to_padded(), ~memory.mask(), ~y.mask()
    causal = nn.Transformer.generate_square_subsequent_mask(outputs.shape[1]).isinf()
    masks = {"memory_key_padding_mask": hidden, "tgt_key_padding_mask": padding, "tgt_mask": causal}
    sides = {
        "packed": lambda: model(y, memory, tgt_is_causal=True).values,
        "by hand": lambda: _decoded_by_hand(model, y.values, memory.values, targets, sources),
        "padded": lambda: model(outputs, inputs, **masks)[~padding],
    }
    return {name: _step(model, fn) for name, fn in sides.items()}


def _encoded_by_hand(model: Any, x: Tensor, lengths: list[int]) -> Tensor:
    for layer in model.layers:
        x = layer.norm1(x + _attended_by_hand(layer.self_attn, x, x, lengths, lengths))
        x = layer.norm2(x + layer.linear2(layer.activation(layer.linear1(x))))
    return x if model.norm is None else model.norm(x)


def _decoded_by_hand(model: Any, y: Tensor, memory: Tensor, targets: list[int], sources: list[int]) -> Tensor:
    for layer in model.layers:
        y = layer.norm1(y + _attended_by_hand(layer.self_attn, y, y, targets, targets, causal=True))
        y = layer.norm2(y + _attended_by_hand(layer.multihead_attn, y, memory, targets, sources))
        y = layer.norm3(y + layer.linear2(layer.activation(layer.linear1(y))))
    return y if model.norm is None else model.norm(y)


def _attended_by_hand(
    module: Any, x: Tensor, y: Tensor, queries: list[int], keys: list[int], causal: bool = False
) -> Tensor:
    heads = module.num_heads
    if x is y:
        qkv = F.linear(x, module.in_proj_weight, module.in_proj_bias)
        q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(1)
    else:
        weights, biases = (t.split([WIDTH, 2 * WIDTH]) for t in (module.in_proj_weight, module.in_proj_bias))
        q = F.linear(x, weights[0], biases[0]).unflatten(-1, (heads, -1))
        k, v = F.linear(y, weights[1], biases[1]).unflatten(-1, (2, heads, -1)).unbind(1)
    outs = [
        sdpa(*(t.transpose(0, 1)[None] for t in one), is_causal=causal)[0].transpose(0, 1)
        for one in zip(q.split(queries), k.split(keys), v.split(keys))
    ]
    return module.out_proj(torch.cat(outs).flatten(1))


def _step(model: nn.Module, fn: Callable[[], Tensor]) -> Callable[[], Any]:
    def step() -> None:
        model.zero_grad()
        fn().square().mean().backward()

    return step


def _danling(samples: list[Tensor]) -> Any:
    if importlib.util.find_spec("danling") is None:
        return None
    return importlib.import_module("danling.tensors").NestedTensor(samples)


# ---------------------------------------------------------------- the report


def report(title: str, sides: Sides, rounds: int) -> Table:
    """Milliseconds of every side, and how many times the packed one is as fast."""
    seconds = interleaved({name: Case(_ignoring(call)) for name, call in sides.items()}, rounds=rounds)
    table = Table(title=title)
    for column in ("", "ms, median", "packed is faster by"):
        table.add_column(column, justify="right")
    for name, one in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(one, seconds["packed"], strict=True))
        table.add_row(name, f"{statistics.median(one) * 1e3:.1f}", f"{ratio:.2f}")
    return table


def _ignoring(call: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda _: call()


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=9, help="rounds of the modules' training steps")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="titles that contain this")
    given = parser.parse_args()
    console = Console(width=110)
    for title, make, rounds in programs(given):
        if given.only in title:
            with threads(given.threads):
                console.print(report(title, make(), rounds))


def programs(given: Any) -> list[tuple[str, Callable[[], Sides], int]]:
    """What is measured: titles, the sides, and how many rounds."""
    lengths = lognormal_lengths(given.samples, 178, 512, given.seed)
    found: list[tuple[str, Callable[[], Sides], int]] = []
    for dtype, bias in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)):
        for backward in (False, True):
            what = "forward and backward" if backward else "forward"
            name = f"attention{' with pair bias' if bias else ''}, {str(dtype)[6:]}, {what}"
            make = partial(attention_sides, lengths, dtype, bias=bias, backward=backward)
            found.append((name, make, given.rounds))
    for backward in (False, True):
        name = f"against torch.nested, {'forward and backward' if backward else 'forward'}"
        make = partial(attention_sides, lengths, torch.float32, backward=backward, nested=True)
        found.append((name, make, 3))
    for backward in (False, True):
        name = f"a window of 257 keys, {'forward and backward' if backward else 'forward'}"
        long = [8 * n for n in lengths[:8]]
        found.append((name, partial(window_sides, long, 128, backward=backward), 5))
    reviews = load_reviews(limit=1000 + given.samples, seed=given.seed).train
    words = reviews.lengths.clip(max=512).tolist()
    found.append(("encoder on reviews", partial(encoder_sides, words, given.layers), given.steps))
    pairs = parallel_lengths(given.samples, given.seed)
    both = partial(transformer_sides, *pairs, given.layers)
    found.append(("encoder-decoder on parallel text", both, given.steps))
    found.append(("decoder on parallel text", partial(decoder_sides, *pairs, given.layers), given.steps))
    return found


if __name__ == "__main__":
    main()
