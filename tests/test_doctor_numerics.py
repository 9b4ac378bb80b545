"""Numerical guards on real ranks; rules over histories; cases C46, C47, C49, C50."""
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridlab.core.launch import run
from hybridlab.doctor.numerics import (check_equal, check_grad_norms, check_int8_sum, check_loss_scale, check_nonfinite, checked_all_reduce,
                                       compare_quantized, explore_loss_scale, plot_loss_scale, simulate_loss_scale, watch_nonfinite)

codes = lambda findings: [finding.code for finding in findings]


# ---- real ranks ----------------------------------------------------------------------------------------------------------

def test_guards_on_four_ranks():
    def body():
        import torch
        import torch.distributed as dist
        rank = dist.get_rank()
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        same = check_equal(model)
        pair = dist.new_group([0, 1])
        with torch.no_grad():
            model[0].bias[2] += rank == 2
            model[1].running_mean[0] = -0.0 if rank == 3 else 0.0
        different = check_equal(model)
        within = check_equal(model, pair) if rank < 2 else []
        shapes = check_equal({'a': torch.ones(2 + (rank == 1)), 'b': torch.ones(2)} | ({'extra': torch.ones(1)} if rank == 0 else {}))
        nan = check_equal([torch.tensor([math.nan])])
        return same, different, within, shapes, nan

    results = run(body, world_size=4, backend='gloo', timeout_s=60)
    same, different, within, shapes, nan = results[0]
    assert same == within == nan == [] and all(result[1] == different for result in results)
    assert {(finding.where, finding.message.split('differs on ')[1]) for finding in different} == {('0.bias', 'rank 2 of 4'), ('1.running_mean', 'rank 3 of 4')}
    assert [(finding.where, 'missing' in finding.message) for finding in shapes] == [('a', False), ('extra', True)]


def test_sums_of_every_type():
    def body():
        import torch
        import torch.distributed as dist
        generator = torch.Generator().manual_seed(dist.get_rank())
        good = [checked_all_reduce((torch.randn(3, 500, generator=generator) * 1000).to(kind)) for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
        good += [checked_all_reduce(torch.full((8,), 60000.0, dtype=torch.float16)), checked_all_reduce(torch.arange(9)), checked_all_reduce(torch.zeros(3))]
        wrapped = checked_all_reduce(torch.full((5,), 100, dtype=torch.int8))
        def lossy(tensor):
            dist.all_reduce(tensor)
            if dist.get_rank() == 1:
                tensor[7] += 1e-3
        return good, wrapped, checked_all_reduce(torch.randn(32, generator=generator), reduce=lossy)

    (good, wrapped, clean), (_, _, dirty) = run(body, world_size=2, backend='gloo', timeout_s=60)
    assert good == [[]] * 7 and clean == []
    assert codes(wrapped) == ['numerics.wrong_sum'] and '5 of 5 sums are wrong, first [0]: -56 instead of 200' in wrapped[0].message
    assert codes(dirty) == ['numerics.wrong_sum'] and '1 of 32' in dirty[0].message and 'first [7]' in dirty[0].message and dirty[0].where == 'rank 1'


def test_first_bad_layer_by_rank_forward_and_backward():
    def body():
        import torch
        import torch.distributed as dist
        class Root(torch.nn.Module):
            def forward(self, x):
                return torch.sqrt(x)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), Root(), torch.nn.Linear(3, 1))
        hooks = lambda: sum(len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules())
        with torch.no_grad():
            model[0].weight.fill_(1.0)
            model[0].bias.fill_(0.0)
        with watch_nonfinite(model) as record:
            value = {0: 1.0, 1: 0.0, 2: -1.0}[dist.get_rank()] # fine; infinite gradient of sqrt at 0; NaN forward
            model(torch.full((2, 3), value)).sum().backward()
        return check_nonfinite(record), hooks()

    results = run(body, world_size=3, backend='gloo', timeout_s=60)
    found, hooks = results[0]
    assert hooks == 0 and all(result[0] == found for result in results)
    assert [finding.where for finding in found] == ['rank 1, 1', 'rank 2, 1']
    assert 'made inf in backward' in found[0].message and 'made nan in forward' in found[1].message


def test_watch_without_process_groups():
    import torch
    model = torch.nn.Linear(2, 2)
    with watch_nonfinite(model) as record:
        model(torch.ones(1, 2))
    assert check_nonfinite(record) == []
    with watch_nonfinite(model) as record:
        model(torch.full((1, 2), math.inf)) # it only passes on what it got
    assert record.seen == []


def test_quantization_on_and_off_with_the_real_all_reduce():
    def body():
        import torch
        import torch.distributed as dist
        from hybridlab.comm.quantization import dequantize, quantize
        x = torch.randn(20_000, generator=torch.Generator().manual_seed(dist.get_rank()))
        plain, rough = x.clone(), []
        dist.all_reduce(plain)
        for block in (256, 20_000):
            packed = quantize(x * (torch.arange(20_000) < 19_999) + 500.0 * (torch.arange(20_000) == 19_999), block=block)
            lossy = dequantize(packed).reshape(x.shape)
            dist.all_reduce(lossy)
            rough.append(compare_quantized(plain[:19_000], lossy[:19_000]).severity)
        return rough

    assert run(body, world_size=2, backend='gloo', timeout_s=60)[0] == ['info', 'error'] # one outlier ruins a scale for all


# ---- histories: C46, C47 -------------------------------------------------------------------------------------------------

def test_c46_endless_skips():
    steps = round(math.log2(65536 / 3.23e-27))
    assert steps == 104
    [finding] = check_loss_scale(65536 * 0.5 ** np.arange(steps + 1))
    assert finding.code == 'numerics.endless_skips' and '104 halvings' in finding.message and 'warm-up' in finding.fix


@pytest.mark.parametrize('history, expected', [
    ([65536.0] * 500, []), ([2.0 ** (16 - (n in (100, 300))) for n in range(500)], []), ([2.0 ** max(0, 10 - n) for n in range(100)], ['numerics.pinned_scale']),
    ([65536.0] + [65536.0 * 0.5 ** n for n in range(30)], ['numerics.endless_skips']), ([2.0 ** (16 - n % 8) for n in range(400)], ['numerics.many_skips']), ([], ['numerics.no_scale'])])
def test_c47_kinds_of_histories(history, expected):
    assert codes(check_loss_scale(history)) == expected


def test_skips_may_be_given():
    assert codes(check_loss_scale([1.0] * 60, [True] * 60)) == ['numerics.endless_skips']
    assert codes(check_loss_scale([1.0] * 60, [n % 3 == 0 for n in range(60)])) == ['numerics.pinned_scale']


@settings(max_examples=50, deadline=None)
@given(st.floats(2, 20), st.integers(40, 400))
def test_a_working_scale_is_healthy(limit, interval):
    assert not [finding for finding in check_loss_scale(simulate_loss_scale(2000, limit, interval)[200:]) if finding.severity == 'error']
    assert codes(check_loss_scale(simulate_loss_scale(2000, limit, interval, broken_from=1500))) == ['numerics.endless_skips']


# ---- C49, C50 ------------------------------------------------------------------------------------------------------------

def test_c49_int8_sums():
    assert codes(check_int8_sum([1.0, 0.01])) == ['numerics.scales', 'numerics.overflow']
    assert [check_int8_sum([0.5] * ranks, 16) == [] for ranks in (256, 258, 259)] == [True, True, False]
    assert 256 * 127 == 32512 and check_int8_sum([1.0] * 4096, 32) == []


@pytest.mark.parametrize('factor, expected', [(2.0 ** -16, ['numerics.scale_once']), (2.0 ** 16, ['numerics.scale_once']), (1.02, []), (3.0, ['numerics.norm'])])
def test_c50_grad_norms(factor, expected):
    norms = np.abs(np.random.default_rng(3).normal(1, 0.2, 40)) + 0.1
    found = check_grad_norms(norms * factor, norms)
    assert codes(found) == expected
    if factor == 2.0 ** -16:
        assert '2^-16' in found[0].message
    assert codes(check_grad_norms([], [])) == ['numerics.no_norms'] == codes(check_grad_norms([math.nan], [1.0]))


def test_plots_and_widget():
    assert '104 steps skipped in a row' == plot_loss_scale(65536 * 0.5 ** np.arange(105)).get_title('left')
    widget = explore_loss_scale()
    for name, value in (('broken', True), ('broken_from', 0), ('overflow_at', -5.0), ('growth_interval', 5)):
        widget.controls[name].value = value
        assert not widget.message.value
