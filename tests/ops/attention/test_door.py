"""The door for attention backends: who can do what, the setting, and each backend against the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import ops
from ops import Axis
from ops.attention import AUTO, TABLE, Call, attend, attention_backend, flash, flex, markdown, varlen
from ops.rules.attention import packed_attention
from ops.testing import Dense, Ragged, check, pack, per_sample
from tests.strategies import make

sdpa = F.scaled_dot_product_attention
DOCS = Path(__file__).parents[3] / "docs" / "attention.md"


def test_the_setting_is_a_context_and_for_good() -> None:
    assert attention_backend.name == "auto"
    with ops.attention_backend("loop"):
        assert attention_backend.name == "loop"
        with ops.attention_backend("flex"):
            assert attention_backend.name == "flex"
        assert attention_backend.name == "loop"
    assert attention_backend.name == "auto"
    ops.attention_backend("loop")
    assert attention_backend.name == "loop"
    ops.attention_backend("auto")
    with pytest.raises(ValueError, match="no attention backend 'fast'; there are auto, loop, flash"):
        ops.attention_backend("fast")


@pytest.mark.parametrize("name", [name for name in TABLE if name not in ("loop", "flex")])
def test_a_backend_that_cannot_says_so_and_names_one_that_can(name: str) -> None:
    (x,) = pack(make([3, 5], "2 n 4"))
    with ops.attention_backend(name), pytest.raises(NotImplementedError, match=f"'{name}' cannot.*can: loop"):
        sdpa(x, x, x)


def test_triton_says_that_it_has_no_kernel() -> None:
    (x,) = pack(make([3, 5], "2 n 4"))
    with ops.attention_backend("triton"), pytest.raises(NotImplementedError, match="no Triton kernel"):
        sdpa(x, x, x)


def test_the_docs_print_the_table() -> None:
    assert markdown() in DOCS.read_text()


# ---------------------------------------------------------------- flex, forward on a CPU


BIASES: dict[str, Any] = {
    "none": lambda: None,
    "bias": lambda: make([3, 0, 5], "2 n n", dtype=torch.float32, seed=3),
    "shared_heads": lambda: make([3, 0, 5], "1 n n", dtype=torch.float32, seed=3),
    "mask": lambda: Ragged(
        [s > -0.3 for s in make([3, 0, 5], "2 n n", dtype=torch.float32, seed=3).samples], "2 n n"
    ),
    "by_position": lambda: Dense(torch.randn(2, 5, 5), "2 n n"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", list(BIASES))
@pytest.mark.parametrize("causal", [False, True])
def test_flex_gives_what_the_formula_gives(kind: str, causal: bool) -> None:
    x, bias = make([3, 0, 5], "2 n 16", dtype=torch.float32), BIASES[kind]()

    def fn(x: Any, b: Any = None) -> Any:
        if isinstance(x, Tensor) and causal and b is not None:
            below = torch.ones(b.shape[-2:], dtype=torch.bool).tril()
            b = b & below if b.dtype == torch.bool else b.masked_fill(~below, -torch.inf)
            return sdpa(x, x, x, attn_mask=b)
        return sdpa(x, x, x, attn_mask=b, is_causal=causal)

    def reference(*args: Any) -> list[Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            return per_sample(fn, *args)

    operands = (x,) if bias is None else (x, bias)
    with ops.attention_backend("flex"), torch.no_grad():
        check(fn, *operands, reference=reference, grad=False, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_flex_over_two_axes_with_groups_and_a_window() -> None:
    q = make({"n": [2, 3, 2]}, "4 n 16", dtype=torch.float32)
    k, v = (make({"m": [0, 4, 1]}, "2 m 16", dtype=torch.float32, seed=s) for s in (1, 2))
    packed = pack(q, k, v)
    found = {}
    for name in ("flex", "loop"):
        with ops.attention_backend(name), torch.no_grad():
            found[name] = packed_attention(*packed, window=(1, 1), grouped=True).values
    torch.testing.assert_close(found["flex"], found["loop"], rtol=1e-4, atol=1e-5)
    assert torch.equal(found["flex"][:2], torch.zeros(2, 4, 16))


def test_flex_refuses_a_backward_on_a_cpu() -> None:
    (x,) = pack(make([3, 5], "2 n 16", dtype=torch.float32))
    with ops.attention_backend("flex"), pytest.raises(NotImplementedError, match="no backward on a CPU"):
        sdpa(*[x.requires_grad_()] * 3)


# ---------------------------------------------------------------- devices that are not here


def call(device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Call:
    """Fake operands on a device that need not be there; 5 queries, 4 heads, 32 features."""
    n = Axis([3, 2], name="n")
    offsets = torch.empty(3, dtype=torch.int32, device=device)
    q = Axis(n.lengths, offsets, name="n", sizes=(n.extent, n.peak))
    heads = options.pop("shared", 4)
    query = torch.empty(5, 4, 32, dtype=dtype, device=device)
    key, value = (torch.empty(5, heads, 32, dtype=dtype, device=device) for _ in range(2))
    return Call(query, key, value, q, options.pop("k", q), **options).settled()


def on_cuda() -> FakeTensorMode:
    if not torch.backends.cuda.is_built():
        pytest.skip("this build of PyTorch knows no CUDA device, not even for fake tensors")
    return FakeTensorMode()


REFUSED = {
    "float32": ({"dtype": torch.float32}, "float16 and bfloat16"),
    "bias": ({"bias": True}, "no mask and no bias"),
    "causal_over_two_axes": ({"causal": True, "k": Axis([3, 2])}, "one axis for both"),
    "window_over_two_axes": ({"left": 2, "k": Axis([3, 2])}, "one axis for both"),
}


@pytest.mark.parametrize("name", list(REFUSED))
@pytest.mark.parametrize("module", [flash, varlen])
def test_kernels_of_packed_sequences_refuse_what_they_cannot(
    name: str, module: Any, monkeypatch: Any
) -> None:
    options, reason = REFUSED[name]
    monkeypatch.setattr(flash, "function", lambda *args, **kwargs: None)
    with on_cuda():
        given = dict(options)
        if given.pop("bias", None):
            given["bias"] = torch.empty(13, 4, device="cuda")
        assert reason in module.refuses(call("cuda", **given))
        assert module.refuses(call("cuda", causal=True, left=3)) is None


def test_varlen_gives_the_right_shape_on_a_fake_device() -> None:
    with on_cuda(), ops.attention_backend("varlen"):
        for options in ({}, {"causal": True}, {"left": 3, "right": 0}, {"scale": 0.3}):
            out = attend(call("cuda", **options))
            assert (out.shape, out.dtype, out.device.type) == ((5, 4, 32), torch.bfloat16, "cuda")
        if varlen._GROUPS:
            assert attend(call("cuda", shared=2)).shape == (5, 4, 32)
        else:
            assert "2.13" in str(varlen.refuses(call("cuda", shared=2)))
        assert "no dropout" in str(varlen.refuses(call("cuda", dropout=0.1)))


def by_sample(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """What flash-attn's function of packed sequences computes, by its documented arguments."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert dropout_p == 0.0 and window_size == (-1, -1)
    assert max_seqlen_q == max(cu_seqlens_q.diff()) and max_seqlen_k == max(cu_seqlens_k.diff())
    parts = []
    for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:]):
        one = (t.transpose(0, 1) for t in (q[a:b], k[c:d], v[c:d]))
        parts.append(sdpa(*one, is_causal=causal, scale=softmax_scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [2, 4])
def test_what_is_handed_to_flash_attn(causal: bool, shared: int, monkeypatch: Any) -> None:
    """A stand-in with flash-attn's arguments, on a CPU."""
    monkeypatch.setattr(flash, "function", by_sample)
    monkeypatch.setitem(TABLE, "flash", TABLE["flash"]._replace(refuses=lambda call: None))
    q = make([3, 1, 5], "4 n 8", dtype=torch.float32)
    k, v = (make([3, 1, 5], f"{shared} n 8", dtype=torch.float32, seed=s) for s in (1, 2))
    with ops.attention_backend("flash"):
        check(
            lambda q, k, v: sdpa(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True),
            q, k, v, rtol=1e-5, atol=1e-5,
        )  # fmt: skip


def test_auto_takes_the_first_that_can(monkeypatch: Any) -> None:
    taken = []

    def noted(name: str) -> Any:
        return lambda call: taken.append(name) or call.query

    for name in TABLE:
        monkeypatch.setitem(TABLE, name, TABLE[name]._replace(run=noted(name)))
    monkeypatch.setattr("ops.attention.loop.run", noted("loop"))
    monkeypatch.setattr(flash, "function", by_sample)
    attend(call("cpu"))
    with on_cuda():
        attend(call("cuda"))
        attend(call("cuda", dtype=torch.float32))
        monkeypatch.setattr(flash, "function", None)
        attend(call("cuda"))
        attend(call("cuda", dropout=0.1))
    assert taken == ["loop", "flash", "loop", "varlen", "loop"]
    assert set(AUTO["cuda"]) <= set(TABLE)


def test_flex_traces_on_a_fake_device() -> None:
    assert flex.refuses(call("cpu", dropout=0.1)) == "it has no dropout"
    with on_cuda():
        assert flex.refuses(call("cuda", bias=torch.empty(13, 4, device="cuda"))) is None
        assert "meta" in str(flex.refuses(call("meta")))
