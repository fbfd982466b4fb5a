"""What compiled packed programs cost: ``python -m examples.benchmarks.compiled``.

Beside them stands explicit packing, compiled too, and danling where it is installed. Three tables.

* Call overhead: a tiny model, where a call's time is its overhead, on a packed tensor and on the plain
  tensors that one would carry by hand.
* The pair program: single to pair to single, large enough to take milliseconds, compiled and eager.
* Compile seconds: the first call, with nothing in Inductor's cache.

By hand, index tensors are ready before the clock starts. "delivered" means that the batch brings its maps
(``ops.deliver``); "built inside" means that every call computes them.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._dynamo.decorators import mark_unbacked
from torch._inductor.utils import fresh_cache

import ops
from examples.benchmarks._timing import Case, interleaved, median_difference, threads
from ops import PackedTensor

try:
    from danling import NestedTensor as DanlingTensor
except ImportError:
    DanlingTensor = None

TINY_LENGTHS = (3, 1, 5, 2, 4, 6, 2, 3)
TINY_FEATURES = 16
FEATURES, PAIR_FEATURES = 64, 32
OVERHEAD_BUDGET = 10.0
"""Microseconds that a compiled call may take over explicit packing."""
BASE = "by hand, compiled"
RATIO_BUDGET = 1.05
"""Time that a compiled program of 1 ms and above may take, over compiled explicit packing."""

Seconds = dict[str, list[float]]


class Tiny(nn.Module):
    """Two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(TINY_FEATURES, TINY_FEATURES) for _ in range(2))

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(self.up(x)))


class TinyMean(Tiny):
    """Two linear maps and the mean over each sample."""

    def forward(self, x: Any) -> Any:
        return super().forward(x).mean(1)


class TinyMeanByHand(Tiny):
    """The same on rows of all samples, which sample each is of, and how many there are."""

    def forward(self, x: Any, *maps: Tensor) -> Any:
        sample_ids, counts = maps
        hidden = super().forward(x)
        sums = hidden.new_zeros(counts.shape[0], hidden.shape[1]).index_add(0, sample_ids, hidden)
        return sums / counts[:, None]


class Pair(nn.Module):
    """Single to pair to single."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = (nn.Linear(FEATURES, PAIR_FEATURES) for _ in range(2))
        self.norm, self.h = nn.LayerNorm(PAIR_FEATURES), nn.Linear(PAIR_FEATURES, PAIR_FEATURES)
        self.g = nn.Linear(PAIR_FEATURES, FEATURES)

    def forward(self, x: Any) -> Any:
        p = self.u(x)[:, :, None] + self.v(x)[:, None, :]
        p = p + self.h(self.norm(p))
        return x + self.g(p.mean(2))


class PairByHand(Pair):
    """The same on rows, the row and column of every pair, and each row's number of pairs."""

    def forward(self, x: Any, *maps: Tensor) -> Any:
        rows, columns, counts = maps
        p = self.u(x).index_select(0, rows) + self.v(x).index_select(0, columns)
        p = p + self.h(self.norm(p))
        sums = p.new_zeros(x.shape[0], p.shape[1]).index_add(0, rows, p)
        return x + self.g(sums / counts[:, None])


class PeerPair(Pair):
    """The pair program for danling: code of its own, which the compiler may give up without harm to ours."""

    def forward(self, x: Any) -> Any:
        p = self.u(x)[:, :, None] + self.v(x)[:, None, :]
        p = p + self.h(self.norm(p))
        return x + self.g(p.mean(2))


def marked(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Plain tensors whose dim 0 varies from batch to batch, marked as packed ones are."""
    for tensor in tensors:
        mark_unbacked(tensor, 0)
    return tensors


def packed(samples: list[Tensor], grad: bool = False) -> PackedTensor:
    """A packed batch whose maps are built in every call."""
    return ops.mark_dynamic(PackedTensor.from_list(samples, "n _").requires_grad_(grad))


def delivered(samples: list[Tensor], model: nn.Module, grad: bool = False) -> PackedTensor:
    """A packed batch that brings the maps that ``model`` needs."""
    x = PackedTensor.from_list(samples, "n _").requires_grad_(grad)
    model(x)
    return ops.mark_dynamic(ops.deliver(x))


# ------------------------------------------------------------------ a tiny model


def overheads(rounds: int, calls: int) -> dict[str, Seconds]:
    """Seconds a call of the tiny models: "by hand" and "packed", for each row of the table."""
    samples = [torch.randn(n, TINY_FEATURES) for n in TINY_LENGTHS]
    lengths = torch.tensor(TINY_LENGTHS)
    ids = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    by_hand = marked(torch.cat(samples), ids, lengths.float())
    mean = TinyMean()
    batches = {
        "two linear maps": (Tiny(), packed(samples), Tiny(), by_hand[:1]),
        "and a mean, maps delivered": (mean, delivered(samples, mean), TinyMeanByHand(), by_hand),
        "and a mean, maps built inside": (mean, packed(samples), TinyMeanByHand(), by_hand),
    }
    found = {}
    for name, (model, x, plain, tensors) in batches.items():
        torch._dynamo.reset()
        on_packed, on_plain = (torch.compile(m, fullgraph=True) for m in (model, plain))
        cases = {
            "by hand": Case(_spread(on_plain), _constant(tensors)),
            "packed": Case(on_packed, _constant(x)),
        }
        found[name] = interleaved(cases, rounds=rounds, calls=calls, warm_up=2)
    return found


def _spread(fn: Callable[..., Any]) -> Callable[[tuple[Any, ...]], Any]:
    return lambda arguments: fn(*arguments)


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def overhead_table(found: dict[str, Seconds]) -> Table:
    """Microseconds a call."""
    table = Table(title="microseconds a call of a tiny compiled model, inference, 1 thread")
    table.add_column("model")
    for column in ("by hand", "packed", "over by hand", f"within {OVERHEAD_BUDGET:.0f} us"):
        table.add_column(column, justify="right")
    for name, seconds in found.items():
        over = median_difference(seconds["packed"], seconds["by hand"]) * 1e6
        medians = (f"{statistics.median(seconds[side]) * 1e6:.1f}" for side in ("by hand", "packed"))
        verdict = "[green]yes" if over <= OVERHEAD_BUDGET else "[red]no"
        table.add_row(name, *medians, f"{over:+.1f}", verdict)
    return table


# ------------------------------------------------------------------ the pair program


class PairBatch:
    """One batch for every side, and models of equal weights."""

    def __init__(self, shortest: int, longest: int, training: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(shortest, longest, (8,), generator=generator).tolist()
        self.samples = [torch.randn(n, FEATURES, generator=generator) for n in lengths]
        self.training = training
        self.model, self.hand_model = Pair(), PairByHand()
        self.hand_model.load_state_dict(self.model.state_dict())

    def by_hand(self) -> tuple[Tensor, ...]:
        """Rows, and three index tensors."""
        x = PackedTensor.from_list(self.samples, "n _")
        pairs = (x[:, :, None] * x[:, None]).grid
        counts = x.axes[0].lengths.index_select(0, x.axes[0].sample_ids).float()
        rows, columns = pairs.coordinates(0).clone(), pairs.coordinates(1).clone()
        return marked(x.values.detach().requires_grad_(self.training), rows, columns, counts)

    def step(self, fn: Callable[..., Any]) -> Callable[[Any], None]:
        """Forward, and in training backward, as a function of one argument."""

        def run(argument: Any) -> None:
            out = fn(*argument) if isinstance(argument, tuple) else fn(argument)
            if self.training:
                (out.values if ops.is_packed(out) else out).square().sum().backward()

        return run

    def cases(self) -> dict[str, tuple[Callable[..., Any], Callable[[], Any]]]:
        """Function and argument of each side."""
        model, hand = self.model, self.hand_model
        torch._dynamo.reset()
        building, reading, by_hand = (torch.compile(m, fullgraph=True) for m in (model, model, hand))
        return {
            BASE: (by_hand, self.by_hand),
            "packed, compiled, maps delivered": (
                reading,
                lambda: delivered(self.samples, model, self.training),
            ),
            "packed, compiled, maps built inside": (building, lambda: packed(self.samples, self.training)),
            "packed, eager": (model, lambda: PackedTensor.from_list(self.samples, "n _")),
            "by hand, eager": (hand, self.by_hand),
        }

    def measure(self, rounds: int) -> dict[str, tuple[float, float]]:
        """Seconds a call of each side, and the median over the rounds of its ratio to the base.

        Eager sides run in rounds of their own: after them caches are cold and memory is returned.
        """
        cases = {name: Case(self.step(fn), prepare) for name, (fn, prepare) in self.cases().items()}
        if DanlingTensor is not None:
            peer = Case(self.step(torch.compile(PeerPair())), lambda: DanlingTensor(self.samples))
            if _works(peer):
                cases["danling, compiled"] = peer
        found: dict[str, tuple[float, float]] = {}
        for eager in (False, True):
            group = {name: case for name, case in cases.items() if name == BASE or ("eager" in name) == eager}
            seconds = interleaved(group, rounds=rounds, calls=2, warm_up=2)
            for name in group:
                ratios = [a / b for a, b in zip(seconds[name], seconds[BASE], strict=True)]
                found.setdefault(name, (statistics.median(seconds[name]), statistics.median(ratios)))
        return found


def _works(case: Case) -> bool:
    """Whether a peer runs the program, more than once."""
    try:
        for _ in range(2):
            case.call(case.prepare())
    except Exception as error:  # noqa: BLE001 - whatever a peer's compiler raises
        print(f"danling: {type(error).__name__}: {str(error).splitlines()[0]}")
        return False
    return True


def pair_table(found: dict[str, dict[str, tuple[float, float]]]) -> Table:
    """Milliseconds a call, and the ratio to compiled explicit packing."""
    table = Table(title=f"the pair program, milliseconds, 8 samples; at most {RATIO_BUDGET} over by hand")
    table.add_column("side")
    for name in found:
        table.add_column(name, justify="right")
        table.add_column("over by hand", justify="right")
    for side in dict.fromkeys(side for sides in found.values() for side in sides):
        row = [side]
        for sides in found.values():
            median, ratio = sides.get(side, (float("nan"), float("nan")))
            row += [f"{median * 1e3:.2f}", f"{ratio:.2f}"]
        table.add_row(*row)
    return table


def compile_seconds() -> dict[str, float]:
    """Seconds of the first training step, with nothing in Inductor's cache."""
    batch = PairBatch(21, 60, training=True)
    found = {}
    for name, (fn, prepare) in batch.cases().items():
        if "compiled" in name:
            found[name] = _first_call(batch.step(fn), prepare())
    if DanlingTensor is not None:
        fn = torch.compile(PeerPair())
        for count in (8, 7):
            argument = DanlingTensor(batch.samples[:count])
            name = "danling, compiled" if count == 8 else "danling, another batch size"
            try:
                found[name] = _first_call(batch.step(fn), argument)
            except Exception as error:  # noqa: BLE001 - whatever a peer's compiler raises
                print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    return found


def _first_call(call: Callable[[Any], object], argument: Any) -> float:
    with fresh_cache():
        start = time.perf_counter()
        call(argument)
        return time.perf_counter() - start


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=200, help="calls a round of the tiny model")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    console = Console(width=110)
    with threads(arguments.threads):
        with torch.no_grad():
            console.print(overhead_table(overheads(arguments.rounds, arguments.calls)))
            inference = PairBatch(40, 120, training=False).measure(arguments.rounds)
        training = PairBatch(40, 120, training=True).measure(arguments.rounds)
        shorter = PairBatch(21, 60, training=True).measure(arguments.rounds)
        columns = {"inference": inference, "training": training, "shorter samples": shorter}
        console.print(pair_table(columns))
        for name, seconds in compile_seconds().items():
            console.print(f"compile seconds, {name}: {seconds:.1f}")


if __name__ == "__main__":
    main()
