"""The native calls for a decoder layer of few rows, against plain torch: weights in three formats, on each instruction set."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

native = pytest.importorskip("vera._native")

FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ISAS = native.available_isas()
EPS, QK_EPS = 1e-5, 1e-6


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv("VERA_CPU_ISA", request.param)
    return request.param


@pytest.fixture(params=FORMATS, ids=str)
def dtype(request):
    return request.param


def address(tensor: Tensor | None) -> int:
    assert tensor is None or tensor.is_contiguous()
    return 0 if tensor is None else tensor.data_ptr()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, threads: int = 2) -> Tensor:
    output = torch.full((len(x), len(weight)), torch.nan)
    sizes = len(x), weight.shape[1], len(weight)
    native.linear(address(x), address(weight), address(bias), address(output), *sizes, threads, FORMATS[weight.dtype])
    return output


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@dataclass(frozen=True)
class Layer:
    """Random parameters of a decoder layer; biases and norms of heads may be missing."""

    query_heads: int
    kv_heads: int
    head_dim: int
    weights: dict[str, Tensor]
    extras: dict[str, Tensor | None]

    @property
    def hidden_size(self) -> int:
        return self.weights["q"].shape[1]

    def to(self, dtype: torch.dtype) -> "Layer":
        weights = {name: weight.to(dtype) for name, weight in self.weights.items()}
        return Layer(self.query_heads, self.kv_heads, self.head_dim, weights, self.extras)

    def before(self, hidden: Tensor, cos: Tensor, sin: Tensor, *, threads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
        rows, weights, extras = len(hidden), self.weights, self.extras
        query = torch.full((rows, self.query_heads, self.head_dim), torch.nan)
        key, value = (torch.full((rows, self.kv_heads, self.head_dim), torch.nan) for _ in range(2))
        native.before_attention(
            address(hidden),
            address(extras["norm"]),
            EPS,
            *(address(weights[name]) for name in ("q", "k", "v")),
            *(address(extras[f"{name}_bias"]) for name in ("q", "k", "v")),
            address(extras["q_norm"]),
            address(extras["k_norm"]),
            QK_EPS,
            *(address(tensor) for tensor in (cos, sin, query, key, value)),
            FORMATS[weights["q"].dtype],
            rows,
            self.hidden_size,
            self.query_heads,
            self.kv_heads,
            self.head_dim,
            threads,
        )
        return query, key, value

    def after(self, attended: Tensor, hidden: Tensor, *, output: Tensor | None = None, threads: int = 2) -> Tensor:
        weights, extras = self.weights, self.extras
        output = torch.full_like(hidden, torch.nan) if output is None else output
        native.after_attention(
            address(attended),
            address(weights["o"]),
            address(extras["o_bias"]),
            address(hidden),
            address(extras["norm"]),
            EPS,
            *(address(weights[name]) for name in ("gate", "up", "down")),
            *(address(extras[f"{name}_bias"]) for name in ("gate", "up", "down")),
            address(output),
            FORMATS[weights["o"].dtype],
            len(hidden),
            self.hidden_size,
            attended.shape[1],
            len(weights["gate"]),
            threads,
        )
        return output

    def between(
        self, attended: Tensor, hidden: Tensor, following: "Layer", cos: Tensor, sin: Tensor, *, threads: int = 2
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What flows into the `following` layer, and its query, key and value."""
        rows, weights, extras = len(hidden), self.weights, self.extras
        output = torch.full_like(hidden, torch.nan)
        query = torch.full((rows, self.query_heads, self.head_dim), torch.nan)
        key, value = (torch.full((rows, self.kv_heads, self.head_dim), torch.nan) for _ in range(2))
        native.between_attention(
            address(attended),
            address(weights["o"]),
            address(extras["o_bias"]),
            address(hidden),
            address(extras["norm"]),
            EPS,
            *(address(weights[name]) for name in ("gate", "up", "down")),
            *(address(extras[f"{name}_bias"]) for name in ("gate", "up", "down")),
            address(output),
            FORMATS[weights["o"].dtype],
            address(following.extras["norm"]),
            EPS,
            *(address(following.weights[name]) for name in ("q", "k", "v")),
            *(address(following.extras[f"{name}_bias"]) for name in ("q", "k", "v")),
            address(following.extras["q_norm"]),
            address(following.extras["k_norm"]),
            QK_EPS,
            *(address(tensor) for tensor in (cos, sin, query, key, value)),
            FORMATS[following.weights["q"].dtype],
            rows,
            self.hidden_size,
            len(weights["gate"]),
            self.query_heads,
            self.kv_heads,
            self.head_dim,
            threads,
        )
        return output, query, key, value

    def project(self, name: str, x: Tensor) -> Tensor:
        bias = self.extras[f"{name}_bias"]
        return F.linear(x, self.weights[name].double(), None if bias is None else bias.double())

    def before_in_torch(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = rms_norm(hidden.double(), self.extras["norm"].double(), EPS)
        heads = [self.project(name, normed).view(len(hidden), -1, self.head_dim) for name in ("q", "k", "v")]
        for i, name in enumerate(("q_norm", "k_norm")):
            if self.extras[name] is not None:
                heads[i] = rms_norm(heads[i], self.extras[name].double(), QK_EPS)
            heads[i] = heads[i] * cos.double()[:, None] + rotate_half(heads[i]) * sin.double()[:, None]
        return heads[0], heads[1], heads[2]

    def after_in_torch(self, attended: Tensor, hidden: Tensor) -> Tensor:
        residual = hidden.double() + self.project("o", attended.double())
        normed = rms_norm(residual, self.extras["norm"].double(), EPS)
        return residual + self.project("down", F.silu(self.project("gate", normed)) * self.project("up", normed))


@dataclass(frozen=True)
class Sizes:
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


SIZES = [
    Sizes(hidden=48, query_heads=2, kv_heads=1, head_dim=24, intermediate=24),
    Sizes(hidden=17, query_heads=3, kv_heads=3, head_dim=6, intermediate=29),
    Sizes(hidden=1, query_heads=1, kv_heads=1, head_dim=2, intermediate=1),
    Sizes(hidden=576, query_heads=9, kv_heads=3, head_dim=64, intermediate=803),
]


def make_layer(sizes: Sizes, *, bias: bool = False, head_norms: bool = False, seed: int = 0) -> Layer:
    torch.manual_seed(seed)
    query, kv = sizes.query_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes = {
        "q": (query, sizes.hidden),
        "k": (kv, sizes.hidden),
        "v": (kv, sizes.hidden),
        "o": (sizes.hidden, query),
        "gate": (sizes.intermediate, sizes.hidden),
        "up": (sizes.intermediate, sizes.hidden),
        "down": (sizes.hidden, sizes.intermediate),
    }
    weights = {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    extras = {f"{name}_bias": torch.randn(shape[0]) if bias else None for name, shape in shapes.items()}
    extras["norm"] = 1 + torch.randn(sizes.hidden) / 4
    for name in ("q_norm", "k_norm"):
        extras[name] = 1 + torch.randn(sizes.head_dim) / 4 if head_norms else None
    return Layer(sizes.query_heads, sizes.kv_heads, sizes.head_dim, weights, extras)


def make_rows(rows: int, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, attended values, cos and sin."""
    angles = torch.rand(rows, sizes.head_dim) * 6
    return torch.randn(rows, sizes.hidden), torch.randn(rows, sizes.query_heads * sizes.head_dim), angles.cos(), angles.sin()


def assert_close(actual: Tensor, exact: Tensor) -> None:
    assert actual.shape == exact.shape
    assert (actual - exact).abs().max() <= 1e-5 * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 33, 64])
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"),
    [(1, 1, True), (17, 5, False), (100, 49, True), (576, 192, False), (1603, 23, True), (4500, 13, False)],
)
def test_linear_equals_torch(isa, dtype, rows, inputs, outputs, bias):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs).to(dtype)
    shift = torch.randn(outputs) if bias else None
    exact = F.linear(x.double(), weight.double(), shift.double() if bias else None)
    assert_close(linear(x, weight, shift), exact)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 6, 16])
@pytest.mark.parametrize("inputs", [21, 576, 1603])
def test_half_weights_give_the_bits_of_the_same_weights_in_float32(isa, half, rows, inputs):
    torch.manual_seed(0)
    # The smallest ones are denormal in float16.
    x, weight = torch.randn(rows, inputs), (torch.randn(100, inputs) * torch.logspace(-7, 3, 100)[:, None]).to(half)
    assert torch.equal(linear(x, weight), linear(x, weight.float()))


@pytest.mark.parametrize("inputs", [21, 576, 1603, 4500])
def test_a_row_of_linear_has_the_same_bits_in_every_batch_and_on_any_number_of_threads(isa, dtype, inputs):
    torch.manual_seed(0)
    x, weight = torch.randn(23, inputs), torch.randn(301, inputs).to(dtype)
    together = linear(x, weight, threads=1)
    assert torch.equal(linear(x, weight, threads=3), together)
    for row in range(23):
        assert torch.equal(linear(x[row : row + 1], weight), together[row : row + 1])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize(("bias", "head_norms"), [(False, False), (True, False), (False, True)])
def test_before_attention_equals_torch(isa, dtype, sizes, rows, bias, head_norms):
    layer = make_layer(sizes, bias=bias, head_norms=head_norms).to(dtype)
    hidden, _, cos, sin = make_rows(rows, sizes)
    for actual, exact in zip(layer.before(hidden, cos, sin), layer.before_in_torch(hidden, cos, sin), strict=True):
        assert_close(actual, exact)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_after_attention_equals_torch(isa, dtype, sizes, rows, bias):
    layer = make_layer(sizes, bias=bias).to(dtype)
    hidden, attended, _, _ = make_rows(rows, sizes)
    assert_close(layer.after(attended, hidden), layer.after_in_torch(attended, hidden))


def test_after_attention_may_overwrite_its_hidden_states(isa):
    layer = make_layer(SIZES[0])
    hidden, attended, _, _ = make_rows(5, SIZES[0])
    apart = layer.after(attended, hidden)
    assert torch.equal(layer.after(attended, hidden, output=hidden), apart)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_row_of_a_layer_has_the_same_bits_in_every_batch_and_on_any_number_of_threads(isa, dtype, sizes):
    layer = make_layer(sizes, head_norms=True).to(dtype)
    hidden, attended, cos, sin = make_rows(11, sizes)
    before, after = layer.before(hidden, cos, sin, threads=1), layer.after(attended, hidden, threads=1)
    for threads in (2, 5):
        for one, other in zip(layer.before(hidden, cos, sin, threads=threads), before, strict=True):
            assert torch.equal(one, other)
        assert torch.equal(layer.after(attended, hidden, threads=threads), after)
    for row in range(11):
        only = slice(row, row + 1)
        for one, other in zip(layer.before(hidden[only], cos[only], sin[only]), before, strict=True):
            assert torch.equal(one, other[only])
        assert torch.equal(layer.after(attended[only], hidden[only]), after[only])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_between_two_attentions_come_the_bits_of_the_two_calls(isa, dtype, sizes, rows, bias, threads):
    layer = make_layer(sizes, bias=bias).to(dtype)
    following = make_layer(sizes, bias=not bias, head_norms=True, seed=1)
    hidden, attended, cos, sin = make_rows(rows, sizes)
    output = layer.after(attended, hidden)
    expected = output, *following.before(output, cos, sin)
    for one, other in zip(layer.between(attended, hidden, following, cos, sin, threads=threads), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_layer_of_half_weights_gives_the_bits_of_the_same_weights_in_float32(isa, half):
    layer = make_layer(SIZES[3]).to(half)
    hidden, attended, cos, sin = make_rows(7, SIZES[3])
    for narrow, wide in zip(layer.before(hidden, cos, sin), layer.to(torch.float32).before(hidden, cos, sin), strict=True):
        assert torch.equal(narrow, wide)
    assert torch.equal(layer.after(attended, hidden), layer.to(torch.float32).after(attended, hidden))


def test_phases_wait_for_each_other_in_many_calls():
    """A thread that began a phase too early would read what the last call left behind."""
    layer = make_layer(SIZES[0])
    calls = [make_rows(3, SIZES[0]) for _ in range(2)]
    expected = [layer.after(attended, hidden, threads=1) for hidden, attended, _, _ in calls]
    for step in range(400):
        hidden, attended, _, _ = calls[step % 2]
        assert torch.equal(layer.after(attended, hidden, threads=2 + step % 3), expected[step % 2])


def test_gate_far_from_zero_neither_overflows_nor_turns_into_nan(isa):
    layer = make_layer(Sizes(hidden=16, query_heads=1, kv_heads=1, head_dim=16, intermediate=32))
    layer.extras["gate_bias"] = torch.linspace(-3e4, 3e4, 32)
    hidden, attended = torch.randn(2, 16), torch.randn(2, 16)
    assert_close(layer.after(attended, hidden), layer.after_in_torch(attended, hidden))


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("size", [1, 24, 47, 576])
def test_rms_norm_equals_torch(isa, rows, size):
    torch.manual_seed(0)
    x, weight, output = torch.randn(rows, size), torch.randn(size), torch.full((rows, size), torch.nan)
    native.rms_norm(address(x), address(weight), EPS, address(output), rows, size, 2)
    assert_close(output, rms_norm(x.double(), weight.double(), EPS))
    native.rms_norm(address(x), address(weight), EPS, address(x), rows, size, 2)
    assert torch.equal(x, output)


REFUSALS_OF_LINEAR = {
    "rows=0: it must be at least 1": {"rows": 0},
    "inputs=-1: it must be at least 1": {"inputs": -1},
    "outputs=0: it must be at least 1": {"outputs": 0},
    r"weight_format=3: it must be 0 \(float32\), 1 \(float16\) or 2 \(bfloat16\)": {"weight_format": 3},
}


@pytest.mark.parametrize(("message", "wrong"), REFUSALS_OF_LINEAR.items())
def test_what_linear_cannot_take_is_refused(message, wrong):
    sizes = {"rows": 1, "inputs": 1, "outputs": 1, "weight_format": 0}
    with pytest.raises(ValueError, match=message):
        native.linear(x=0, weight=0, bias=0, y=0, num_threads=1, **(sizes | wrong))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", 0),
        ("hidden_size", 0),
        ("query_heads", -2),
        ("kv_heads", 0),
        ("head_dim", 7),
        ("head_dim", 0),
        ("weight_format", -1),
    ],
)
def test_what_before_attention_cannot_take_is_refused(name, value):
    sizes = {"rows": 1, "hidden_size": 4, "query_heads": 1, "kv_heads": 1, "head_dim": 4, "weight_format": 0}
    pointers = ["hidden", "norm_weight", "q_weight", "k_weight", "v_weight", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm"]
    pointers += ["cos", "sin", "query", "key", "value"]
    with pytest.raises(ValueError, match=f"{name}={value}: it must be"):
        native.before_attention(**dict.fromkeys(pointers, 0), eps=EPS, qk_norm_eps=EPS, num_threads=1, **(sizes | {name: value}))


@pytest.mark.parametrize(
    ("name", "value"), [("rows", -1), ("hidden_size", 0), ("query_size", 0), ("intermediate_size", -5), ("weight_format", 9)]
)
def test_what_after_attention_cannot_take_is_refused(name, value):
    sizes = {"rows": 1, "hidden_size": 4, "query_size": 4, "intermediate_size": 4, "weight_format": 0}
    pointers = ["attended", "o_weight", "o_bias", "hidden", "norm_weight", "gate_weight", "up_weight", "down_weight"]
    pointers += ["gate_bias", "up_bias", "down_bias", "output"]
    with pytest.raises(ValueError, match=f"{name}={value}: it must be"):
        native.after_attention(**dict.fromkeys(pointers, 0), eps=EPS, num_threads=1, **(sizes | {name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [("rows", 0), ("hidden_size", -1), ("query_heads", 0), ("intermediate_size", 0), ("head_dim", 3), ("weight_format", 3)],
)
def test_what_between_attention_cannot_take_is_refused(name, value):
    sizes = {"rows": 1, "hidden_size": 4, "intermediate_size": 4, "query_heads": 1, "kv_heads": 1, "head_dim": 4}
    pointers = ["attended", "o_weight", "o_bias", "hidden", "norm_weight", "gate_weight", "up_weight", "down_weight", "gate_bias"]
    pointers += ["up_bias", "down_bias", "output", "next_norm_weight", "q_weight", "k_weight", "v_weight", "q_bias", "k_bias"]
    pointers += ["v_bias", "q_norm", "k_norm", "cos", "sin", "query", "key", "value"]
    numbers = {"eps": EPS, "next_eps": EPS, "qk_norm_eps": EPS, "weight_format": 0, "next_weight_format": 0, "num_threads": 1}
    with pytest.raises(ValueError, match=f"{'query_size' if name == 'query_heads' else name}={value}: it must be"):
        native.between_attention(**dict.fromkeys(pointers, 0), **(numbers | sizes | {name: value}))
