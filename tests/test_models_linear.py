"""The linear kernel for few rows."""

import pytest
import torch
from torch import nn

from vera.models.linear import MAX_ROWS, KernelLinear, speed_up_linear

pytest.importorskip("vera._native")


def linear(inputs, outputs, *, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias)
    assert speed_up_linear(layer) == 1
    return layer


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 16, 33, MAX_ROWS, MAX_ROWS + 1])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 1), (17, 5), (64, 48), (100, 49), (576, 192), (1536, 100)])
@pytest.mark.parametrize("bias", [True, False])
def test_kernel_equals_torch(rows, inputs, outputs, bias):
    layer, x = linear(inputs, outputs, bias=bias), torch.randn(rows, inputs)
    exact = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    with torch.inference_mode():
        assert (layer(x) - exact).abs().max() < 1e-5


def test_leading_dimensions_are_kept():
    with torch.inference_mode():
        assert linear(8, 5)(torch.randn(2, 3, 8)).shape == (2, 3, 5)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_s_result_is_the_same_in_every_batch(threads):
    layer, x = linear(100, 200), torch.randn(16, 100)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            together = layer(x)
            for row in range(16):
                assert torch.equal(layer(x[row : row + 1]), together[row : row + 1])
    finally:
        torch.set_num_threads(before)


def test_rows_that_are_apart_in_memory_are_read_rightly():
    layer, x = linear(64, 10), torch.randn(4, 128)[:, ::2]
    with torch.inference_mode():
        assert torch.allclose(layer(x), nn.functional.linear(x, layer.weight, layer.bias), atol=1e-6)


def test_default_dtype_of_the_process_does_not_matter():
    layer, x = linear(64, 10), torch.randn(4, 64)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode():
            assert torch.allclose(layer(x), nn.functional.linear(x, layer.weight, layer.bias), atol=1e-6)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("shape", [(1, 2, 6), (1, 2, 3), (3,)])
def test_input_of_another_width_is_refused_as_torch_does(shape):
    with torch.inference_mode(), pytest.raises(RuntimeError, match="shapes"):
        linear(4, 5)(torch.randn(shape))


def test_weight_that_was_replaced_by_a_smaller_one_is_read_rightly():
    layer, x = linear(8, 5, bias=False), torch.randn(2, 8)
    layer.weight = nn.Parameter(torch.randn(3, 8))
    with torch.inference_mode():
        assert torch.allclose(layer(x), nn.functional.linear(x, layer.weight), atol=1e-6)


def test_gradients_still_flow():
    x = torch.randn(2, 8, requires_grad=True)
    linear(8, 5)(x).sum().backward()
    assert x.grad is not None


def test_layer_that_was_converted_since_is_left_to_torch():
    layer = linear(8, 5).to(torch.bfloat16)
    with torch.inference_mode():
        assert layer(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_only_plain_float32_layers_are_changed():
    class Own(nn.Linear):
        pass

    module = nn.Sequential(Own(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4))
    assert speed_up_linear(module) == 1
    assert [type(layer) for layer in module] == [Own, nn.Linear, KernelLinear]
