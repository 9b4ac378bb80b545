"""Chunking as a contract: for any shape, dtype, strides and chunk size."""
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybridlab.comm.chunking import (
    ChunkModel, bucket_times, dynamic_chunk, fit_chunk_model, gradient_buckets, load_chunk_sweep, merge_chunks, optimal_chunk_bytes)

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.complex128]
shapes = st.lists(st.integers(0, 9), min_size=0, max_size=4)


@st.composite
def tensors(draw):
    "Contiguous, permuted, sliced, stepped and expanded tensors."
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
    tensor = torch.arange(math.prod(shape) * 4 or 1).to(dtype)[:math.prod(shape)].reshape(shape)
    form = draw(st.sampled_from(['plain', 'permuted', 'stepped', 'narrowed', 'expanded']))
    if form == 'permuted':
        return tensor.permute(draw(st.permutations(range(len(shape)))))
    if form == 'stepped' and shape:
        return tensor[..., ::2]
    if form == 'narrowed' and shape and shape[-1] > 1:
        return tensor[..., 1:]
    if form == 'expanded':
        return tensor.unsqueeze(0).expand(3, *shape)
    return tensor


@settings(max_examples=400, deadline=None)
@given(tensors(), st.integers(0, 6), st.integers(1, 40))
def test_chunks_are_views_that_make_up_the_tensor(tensor, align_exponent, factor):
    align = 1 << align_exponent
    limit = factor * math.lcm(align, tensor.element_size())
    chunks = dynamic_chunk(tensor, limit, align)
    storage = tensor.untyped_storage().data_ptr()
    assert all(chunk.untyped_storage().data_ptr() == storage for chunk in chunks)
    assert all(chunk.nbytes <= limit for chunk in chunks)
    assert sum(chunk.numel() for chunk in chunks) == tensor.numel()
    assert torch.equal(merge_chunks(chunks, tensor), tensor)
    if tensor.is_contiguous():
        assert torch.equal(torch.cat([chunk.reshape(-1) for chunk in chunks]), tensor.reshape(-1))
        assert all(chunk.nbytes == limit for chunk in chunks[:-1])
        assert all((chunk.data_ptr() - tensor.data_ptr()) % align == 0 for chunk in chunks)


@pytest.mark.parametrize('align', [64, 512, 16384])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.int8])
def test_sizes_are_the_largest_aligned_ones_below_the_limit(align, dtype):
    tensor = torch.zeros(1_000_003, dtype=dtype)
    *full, last = dynamic_chunk(tensor, 100_000, align)
    assert {chunk.nbytes for chunk in full} == {100_000 // align * align} and 0 < last.nbytes <= 100_000


def test_writing_to_a_chunk_writes_to_the_tensor():
    weight = torch.zeros(64, 128).t()
    for chunk in dynamic_chunk(weight, 4096):
        chunk.fill_(1)
    assert weight.sum() == weight.numel()


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 1 << 30), st.floats(0, 1), st.floats(1e-7, 1e-2), st.sampled_from([1, 7, 512]))
@example(36, 0.5, 0.0004, 1) # 35 chunks would be best, but only 18 and 36 can be cut
def test_no_chunk_size_beats_the_optimum(total, rest, overhead, align):
    model = ChunkModel(total, 1.0, rest, overhead)
    best = optimal_chunk_bytes(total, 1.0, rest, overhead, align)
    sizes = align * np.unique(np.geomspace(1, total // align + 1, 400).astype(int))
    assert best % align == 0 and best < total + align
    assert model.seconds(best) <= model.seconds(sizes).min() * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(st.floats(0.01, 1), st.floats(0.01, 1), st.floats(1e-5, 1e-2), st.sampled_from([None, 'known']))
def test_the_fit_finds_an_exact_model(wire, rest, overhead, known):
    model = ChunkModel(1 << 20, wire, rest, overhead)
    probes = [(size, model.seconds(size)) for size in (1 << 14, 1 << 17, 1 << 20)]
    fitted = fit_chunk_model(probes, 1 << 20, wire if known else None)
    sizes = np.geomspace(1 << 12, 1 << 20, 50)
    np.testing.assert_allclose(fitted.seconds(sizes), model.seconds(sizes), rtol=1e-6)


def test_three_probes_predict_the_measured_sweep_within_5_percent():
    sweep = load_chunk_sweep()
    total = int(sweep.total_bytes[0])
    wire = total * sweep.wire_share[0] / sweep.link_bytes_per_s[0]
    probed = sweep.chunk_bytes.isin([total // 64, total // 8, total])
    model = fit_chunk_model(sweep[probed][['chunk_bytes', 'seconds']].to_numpy(), total, wire)
    held = sweep[~probed]
    assert len(held) == 4
    assert (model.seconds(held.chunk_bytes) / held.seconds - 1).abs().max() < 0.05


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4000), st.sampled_from([torch.float32, torch.float16])), min_size=1, max_size=40),
       st.integers(1, 9000), st.integers(1, 9000))
def test_buckets_are_those_of_ddp(sizes, first, cap):
    named = [(f'p{i}', torch.empty(numel, dtype=dtype)) for i, (numel, dtype) in enumerate(sizes)]
    ours = gradient_buckets(named, cap, first)
    ready = named[::-1]
    theirs, _ = torch.distributed._compute_bucket_assignment_by_size([tensor for _, tensor in ready], [first, cap])
    assert [list(bucket.names) for bucket in ours] == [[ready[i][0] for i in bucket] for bucket in theirs]
    assert sum(bucket.nbytes for bucket in ours) == sum(tensor.nbytes for _, tensor in named)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=30), st.floats(1e-4, 1), st.floats(0, 1e-3), st.floats(1e-12, 1e-8))
def test_bucket_times_follow_a_queue(sizes, backward, alpha, beta):
    buckets = gradient_buckets([(str(i), size) for i, size in enumerate(sizes)], 1 << 20, 1 << 16)
    free = 0.0
    for bucket, (ready, start, end) in zip(buckets, bucket_times(buckets, backward, alpha, beta)):
        assert start == pytest.approx(max(ready, free), rel=1e-9, abs=1e-12)
        free = max(ready, free) + alpha + beta * bucket.nbytes
        assert end == pytest.approx(free, rel=1e-9, abs=1e-12)
