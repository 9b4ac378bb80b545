"""Quantization as a contract: error bound, idempotence, odd sizes, non-finite values, every path equal."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hybridlab.comm.convergence import SCHEMES, compare_schemes
from hybridlab.comm.quantization import ErrorFeedback, Quantized, _dequantize_torch, _quantize_torch, dequantize, empty_quantized, quantize, relative_error

values = arrays(np.float32, st.integers(0, 700), elements=st.floats(-1e4, 1e4, width=32))
blocks, bits = st.sampled_from([8, 64, 256, None]), st.sampled_from([8, 4, 2])


def steps(q: Quantized) -> torch.Tensor:
    "The scale of each value."
    return q.scale.repeat_interleave(q.block)[:q.numel]


@settings(max_examples=300, deadline=None)
@given(values, blocks, bits)
def test_error_is_at_most_half_a_step(array, block, width):
    x = torch.from_numpy(array)
    q = quantize(x, block, width)
    assert ((dequantize(q) - x).abs() <= 0.5001 * steps(q) + 1e-36).all()


@settings(max_examples=300, deadline=None)
@given(values, blocks, bits)
def test_a_second_quantization_changes_nothing(array, block, width):
    once = dequantize(quantize(torch.from_numpy(array), block, width))
    torch.testing.assert_close(dequantize(quantize(once, block, width)), once, rtol=1e-5, atol=0)


@settings(max_examples=200, deadline=None)
@given(values, st.integers(1, 255), bits)
def test_blocks_do_not_see_each_other(array, shift, width):
    "Moving the data by whole blocks moves the result; a block in front changes nothing behind it."
    x = torch.from_numpy(array)
    front = torch.full((256,), 1e6)
    assert torch.equal(dequantize(quantize(torch.cat([front, x]), 256, width))[256:], dequantize(quantize(x, 256, width)))
    moved = dequantize(quantize(torch.cat([torch.zeros(shift), x]), 256, width))[shift:]
    largest = x.abs().max() if len(x) else 0
    assert ((moved - x).abs() <= 0.5001 * largest / ((1 << width - 1) - 1) + 1e-36).all()


@settings(max_examples=200, deadline=None)
@given(values, blocks, bits, st.booleans(), st.sampled_from([0.0, 0.5]), st.booleans(), st.booleans())
def test_torch_operations_and_compiled_loops_agree(array, block, width, stochastic, threshold, feedback, spoil):
    x = torch.from_numpy(array.copy())
    if spoil and len(x):
        x[len(x) // 2] = float('inf')
    lost = torch.linspace(-1, 1, len(x))
    ours, a, b = empty_quantized(x.shape, block=block, bits=width), lost.clone(), lost.clone()
    theirs = empty_quantized(x.shape, block=block, bits=width)
    ours.buffer.zero_(), theirs.buffer.zero_()
    quantize(x, threshold=threshold, rounding='stochastic' if stochastic else 'nearest', seed=5, out=ours, residual=a if feedback else None)
    _quantize_torch(x, b if feedback else None, theirs, threshold, stochastic, 5 * 0x9E3779B9 & 0xFFFFFFFF)
    assert torch.equal(ours.payload, theirs.payload)
    assert torch.equal(ours.scale.nan_to_num(nan=-1), theirs.scale.nan_to_num(nan=-1))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    back = torch.zeros_like(x)
    _dequantize_torch(ours, back, add=False)
    torch.testing.assert_close(back, dequantize(ours), equal_nan=True)


@pytest.mark.parametrize('bad', [float('nan'), float('inf'), float('-inf')])
@pytest.mark.parametrize('width', [8, 4, 2])
@pytest.mark.parametrize('position', [0, 255, 256, 999])
def test_a_non_finite_value_stays_visible_and_stays_in_its_block(bad, width, position):
    x = torch.randn(1000)
    x[position] = bad
    back = dequantize(quantize(x, bits=width))
    block = slice(position // 256 * 256, position // 256 * 256 + 256)
    assert torch.isnan(back[block]).all()
    back[block] = 0
    assert torch.isfinite(back).all()


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_and_shape_come_back(dtype):
    x = torch.randn(3, 5, 7).to(dtype).transpose(0, 2)
    back = dequantize(quantize(x, bits=8))
    assert back.dtype == dtype and back.shape == x.shape and relative_error(back, x) < 0.01


@pytest.mark.parametrize('width', [8, 4, 2])
def test_the_buffer_is_all_that_is_needed(width):
    x = torch.randn(1001)
    sent = quantize(x, bits=width)
    received = empty_quantized(x.shape, bits=width)
    received.buffer.copy_(sent.buffer)
    assert torch.equal(dequantize(received), dequantize(sent))
    assert sent.nbytes == -(-1001 * width // 32) * 4 + 4 * 4


def test_in_place_forms_allocate_nothing_new():
    x, out, y = torch.randn(5000), empty_quantized((5000,)), torch.empty(5000)
    address = out.buffer.data_ptr()
    assert quantize(x, out=out).buffer.data_ptr() == address and dequantize(out, out=y) is y
    assert torch.equal(y, dequantize(quantize(x)))


def test_inputs_are_never_changed():
    x = torch.randn(1000, requires_grad=True)
    before = x.detach().clone()
    quantize(x, threshold=0.1)
    assert torch.equal(x.detach(), before)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 600), bits, st.integers(1, 30), st.sampled_from([0.0, 0.3]))
def test_feedback_loses_nothing(numel, width, count, threshold):
    "Sum of what was sent plus the residual equals the sum of the gradients."
    feedback, generator = ErrorFeedback(bits=width, threshold=threshold), torch.Generator().manual_seed(numel)
    sent, total = torch.zeros(numel), torch.zeros(numel)
    for _ in range(count):
        grad = torch.randn(numel, generator=generator)
        total += grad
        dequantize(feedback.quantize(grad, 'w'), out=sent, add=True)
    torch.testing.assert_close(sent + feedback.residuals['w'], total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('wrong, message', [
    (dict(bits=16), 'valid here: 8, 4, 2'), (dict(block=7), 'multiple of 8'), (dict(rounding='up'), 'valid here: nearest'),
    (dict(threshold=-1.0), '0 or larger'), (dict(out=empty_quantized((3,))), 'out holds 3 values')])
def test_wrong_arguments_are_answered_with_the_remedy(wrong, message):
    with pytest.raises(ValueError, match=message):
        quantize(torch.ones(4), **wrong)


@pytest.fixture(scope='module')
def study():
    names = ['FP32', 'article, INT8 sum', '8 bit block 256', '8 bit block 256 + feedback', '4 bit per tensor', '4 bit per tensor + feedback',
             '2 bit block 256', '2 bit block 256 + feedback']
    return compare_schemes(names, seeds=(0, 1, 2))


def test_8_bit_trains_like_fp32(study):
    assert abs(study['loss / FP32']['8 bit block 256'] - 1) < 0.03
    assert abs(study['loss / FP32']['8 bit block 256 + feedback'] - 1) < 0.03


@pytest.mark.parametrize('scheme', ['4 bit per tensor', '2 bit block 256'])
def test_feedback_closes_the_gap(study, scheme):
    gap, with_feedback = study.loss[scheme] - study.loss['FP32'], study.loss[f'{scheme} + feedback'] - study.loss['FP32']
    assert gap > 0.2 * study.loss['FP32'] and with_feedback < 0.1 * gap


def test_the_articles_sum_fails(study):
    assert study['loss / FP32']['article, INT8 sum'] > 1.5
    assert set(SCHEMES) >= set(study.index)
