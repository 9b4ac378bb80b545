"""Step time: what is counted, how it adds up, how it behaves, and that many candidates give what one gives."""
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridlab.pipeline.schedule import make_schedule, simulate
from hybridlab.plan.cost import (AXES_SENT, KINDS, PARTS, SLOTS, Efficiency, accumulation_seconds, allreduce_ladder, attention_seconds, bubble_and_hops, card_rates,
                                 collective_levels, estimate_step, exposed_seconds, fullest_stage, gradient_bytes, group_strides, hop_levels, load_efficiency,
                                 matrix_products, moved_bytes, plot_exposed, plot_product, plot_shares, plot_step, product_seconds, routed_tokens, stage_counts,
                                 step_parts, step_work)
from hybridlab.plan.memory import Strategies
from hybridlab.spec.cluster import load_cluster, with_cards
from hybridlab.spec.layout import Layout, TrainSpec, group_array
from hybridlab.spec.model import ModelSpec, list_models, load_model

DGX, ATLAS = load_cluster('dgx-a100'), load_cluster('atlas-800t-a2')
MODELS = [name for name in list_models() if isinstance(load_model(name), ModelSpec)]
A100 = load_efficiency('a100-80g')
array = lambda *values: np.array(values, dtype=float)


@cache
def report(model='llama2-13b', train=TrainSpec(4096, 64), cluster='dgx-a100', **axes):
    layout = Layout(**({'world': 32, 'tp': 4, 'pp': 2} | axes))
    return estimate_step(load_model(model), with_cards(load_cluster(cluster), layout.world), layout, train)


# ---- what is counted -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', MODELS)
def test_products_are_the_model_flops(name):
    model, train = load_model(name), TrainSpec(min(load_model(name).max_seq, 4096), 8)
    one = Strategies.of(Layout(1), train)
    m, n, k, batch = matrix_products(model, one, train)[..., 0]
    owner = np.array(list(SLOTS.values())).T @ (2 * m * n * k * batch) # by kind
    counts = stage_counts(model, one).sum(axis=0)
    scores = 2 * train.seq**2 * model.heads * (model.qk_dim + model.v_dim) * counts[:2].sum()
    total = (owner * counts).sum() + scores
    expected = train.seq * model.flops_per_token(train.seq, backward=False, mtp=True)
    assert total == pytest.approx(expected, rel=0.02)  # padding of the vocabulary; router, pooler and the joint of MTP are not timed


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
@settings(max_examples=20, deadline=None)
def test_ranks_share_the_products(tp, cp, batch):
    model, train = load_model('llama2-7b'), TrainSpec(4096, 64, batch)
    work = lambda layout, batch: matrix_products(model, Strategies.of(layout, replace(train, micro_batch=batch)), train).prod(axis=0).sum()
    assert work(Layout(tp * cp, tp=tp, cp=cp), batch) * tp * cp / batch == pytest.approx(work(Layout(1), 1), rel=0.02)


@pytest.mark.parametrize('schedule, pp, vpp', [('1f1b', 4, 1), ('1f1b', 4, 2), ('zb-h1', 4, 1), ('zb-v', 4, 2), ('dualpipe-v', 4, 2), ('dualpipe', 4, 1)])
@pytest.mark.parametrize('name', ['gpt3-175b', 'deepseek-v3', 'mixtral-8x7b'])
def test_ranks_hold_every_layer_once(name, schedule, pp, vpp):
    model = load_model(name)
    counts = stage_counts(model, Strategies.of(Layout(pp, pp=pp, vpp=vpp), TrainSpec(2048, 64, schedule=schedule)))
    assert counts.shape == (pp, len(KINDS))
    assert counts[:, :2].sum() == model.layers + model.mtp and counts[:, 3].sum() == 1 + model.mtp and counts[:, 2].sum() == 1


def test_flash_attention_and_fusion_move_fewer_bytes():
    model, one = load_model('gpt2-xl'), Strategies.of(Layout(1), TrainSpec(1024, 8))
    moved = {(flash, fused): moved_bytes(model, one, TrainSpec(1024, 8, flash_attention=flash, fused_kernels=fused))[0].sum() for flash in (0, 1) for fused in (0, 1)}
    assert moved[1, 1] < moved[1, 0] < moved[0, 0] and moved[1, 1] < moved[0, 1]


def test_routed_tokens():
    model, layout = load_model('mixtral-8x7b'), Layout(8, tp=2, ep=4, etp=1)
    tokens = lambda **options: routed_tokens(model, Strategies.of(layout, TrainSpec(4096, 8)), TrainSpec(4096, 8, **options))[0]
    assert tokens() == 4096 * 2 / 2  # top 2, each rank of TP dispatches its half
    assert tokens(imbalance=1.5) == 1.5 * tokens() and tokens(capacity_factor=1.25, imbalance=1.5) == 1.25 * tokens()


@pytest.mark.parametrize('bits, dtype, nbytes', [(None, 'fp32', 4), (None, 'fp16', 2), (None, 'bf16', 2), (None, 'bf16+fp32', 2), (8, 'fp32', 1 + 1 / 64), (4, 'fp32', 0.5 + 1 / 64)])
def test_gradient_bytes(bits, dtype, nbytes):
    assert gradient_bytes(TrainSpec(128, 1, gradient_dtype=dtype, gradient_bits=bits)) == nbytes


# ---- kernels -------------------------------------------------------------------------------------------------------------

@given(*[st.floats(16, 1e5)] * 3, st.floats(1, 64))
@settings(max_examples=60, deadline=None)
def test_product_never_beats_the_card(m, n, k, batch):
    card = card_rates(DGX.device, 'fp16')
    seconds = product_seconds(*map(array, (m, n, k, batch)), card, A100)[0]
    assert seconds >= 2 * m * n * k * batch / DGX.device.flops['fp16']
    assert seconds >= 2 * batch * (m * k + k * n + m * n) / DGX.device.hbm_bytes_per_s
    assert product_seconds(*map(array, (2 * m, n, k, batch)), card, A100)[0] > seconds * 0.999


def test_unaligned_width_costs_a_block():
    card = card_rates(DGX.device, 'fp16')
    seconds = lambda n: product_seconds(array(8192), array(n), array(8192), array(1), card, A100)[0]
    assert seconds(4090) == seconds(4096) < seconds(4097)


def test_attention_is_halved_by_a_causal_kernel():
    model, train = load_model('llama2-7b'), TrainSpec(8192, 8)
    one = Strategies.of(Layout(1), train)
    seconds = lambda model: attention_seconds(step_work(model, DGX, one, train), A100)[0][0]
    assert seconds(replace(model, causal=False)) == pytest.approx(2 * seconds(model))


# ---- communication -------------------------------------------------------------------------------------------------------

@given(st.integers(0, 3), st.integers(0, 4), st.sampled_from([1e3, 1e6, 1e9]))
@settings(max_examples=40, deadline=None)
def test_levels_of_an_all_gather(inner, outer, nbytes):
    size = 2 ** (inner + outer)
    within, between, latency = collective_levels('all_gather', array(nbytes), array(size), array(8 // 2**inner), DGX)[:, 0]
    assert within == pytest.approx((2**inner - 1) / 2**inner * nbytes / 300e9)
    assert between == pytest.approx((2**outer - 1) / 2**outer * nbytes / 2**inner / 25e9)
    assert (latency > 0) == (size > 1)


def test_a_mesh_uses_all_its_links():
    within = collective_levels('all_reduce', array(1e9, 1e9), array(8, 2), array(1, 1), ATLAS)[0]
    assert within == pytest.approx([2 / 8 * 1e9 / 28e9, 2 / 2 * 1e9 / 28e9])


@pytest.mark.parametrize('order, axes', [*((order, {'tp': 4, 'pp': 2, 'cp': 2}) for order in ('tp-cp-ep-dp-pp', 'tp-pp-cp-ep-dp', 'dp-tp-cp-ep-pp')),
                                         *((order, {'tp': 2, 'pp': 4, 'ep': 4, 'etp': 1}) for order in ('tp-cp-ep-dp-pp', 'dp-tp-cp-ep-pp'))])
def test_strides_are_those_of_the_groups(order, axes):
    layout = Layout(64, order=order, **axes)
    strides = group_strides(Strategies.of(layout, TrainSpec(4096, 64)), order)
    for axis in ('tp', 'cp', 'dp', 'pp', 'ep', 'edp'):
        groups = group_array(layout, axis)
        if groups.shape[1] > 1:
            assert strides[axis][0] == groups[0, 1] - groups[0, 0]


def test_hop_takes_the_innermost_link():
    inside, between, _ = hop_levels(array(1e9, 1e9), array(4, 8), DGX)
    assert (inside > 0).tolist() == [True, False] and (between > 0).tolist() == [False, True]


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 1))
def test_exposed_is_between_nothing_and_all(seconds, window, overlap):
    exposed = exposed_seconds(seconds, window, overlap)
    assert max(0, seconds - window) - 1e-9 <= exposed <= seconds and exposed >= (1 - overlap) * seconds - 1e-9


def test_hierarchy_against_flat_ring():
    ladder = allreduce_ladder(1e9, with_cards(ATLAS, 64), wide=4)
    assert ladder['flat ring'] > ladder['hierarchy'] > ladder['pipeline'] > ladder['INT8'] > ladder['pipeline'] / 4


def test_fullest_stage_is_the_model():
    for name in ('gpt3-175b', 'mixtral-8x7b'):
        model, train = load_model(name), TrainSpec(2048, 8)
        assert fullest_stage(model, Strategies.of(Layout(1), train), train).sum() == pytest.approx(model.parameters(), rel=1e-3)


# ---- adding up -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('schedule', ['1f1b', 'gpipe', 'interleaved', 'zb-h1', 'zb-h2'])
@pytest.mark.parametrize('p, m', [(4, 16), (8, 32), (4, 64)])
@pytest.mark.parametrize('last', [1.0, 1.2])
def test_closed_forms_against_the_simulation(schedule, p, m, last):
    v = 3 if schedule == 'interleaved' else 1
    seconds = np.ones((3, p * v)) * np.array([[1.0], [1.1], [0.9]]) / v
    seconds[:, -1] *= last
    ranks, one = seconds.reshape(3, v, p).sum(axis=1), lambda value: array(value)
    for hop in (0.0, 0.005):
        exact = simulate(make_schedule(schedule, p, m, v), *seconds, hop=hop).makespan
        bubble, waits = bubble_and_hops(schedule, one(p), one(m), one(v), ranks[:, :, None], one(hop))
        closed = m * ranks.sum(axis=0).max() + bubble[0] + waits[0]
        exactly = schedule in ('1f1b', 'gpipe') and hop == 0 or last == 1 and schedule in ('1f1b', 'gpipe', 'interleaved')
        assert closed == pytest.approx(exact, rel=1e-9 if exactly else 0.03)


def test_bubble_of_a_plan_is_the_simulated_one():
    found = report(world=32, tp=4, pp=4, train=TrainSpec(4096, 64))
    stages = np.array(found.stage_seconds)
    timeline = simulate(make_schedule('1f1b', 4, found.microbatches), stages / 3, stages / 3, stages / 3)
    assert found.parts['bubble'] == pytest.approx(timeline.makespan - found.microbatches * stages.max(), rel=0.02)


@pytest.mark.parametrize('axes', [{}, {'pp': 1}, {'tp': 8, 'pp': 4}, {'cp': 2}, {'pp': 4, 'vpp': 2}])
@pytest.mark.parametrize('train', [TrainSpec(4096, 64), TrainSpec(4096, 64, zero=3), TrainSpec(4096, 64, 2, recompute='full', zero=0, dtype='fp16', gradient_dtype='fp16'),
                                   TrainSpec(4096, 64, recompute='selective', flash_attention=False, dropout=True, fused_kernels=False)])
def test_parts_add_up_and_one_candidate_is_one_of_many(axes, train):
    found = report(train=train, **axes)
    assert set(found.parts) == set(PARTS) and set(found.communication) == set(AXES_SENT)
    assert all(seconds >= 0 for seconds in found.parts.values()) and found.total == pytest.approx(sum(found.parts.values()))
    layout = Layout(**({'world': 32, 'tp': 4, 'pp': 2} | axes))
    many = step_parts(load_model('llama2-13b'), with_cards(DGX, 32), Strategies.of(layout, train), train)
    assert many['total'][0] == pytest.approx(found.total, rel=0.02)
    assert all(found.communication[axis] >= found.parts[axis] * 0.999 for axis in ('tp', 'cp', 'ep', 'dp'))
    assert 0 < found.mfu <= found.hfu < 1 and found.tokens_per_s_per_card == pytest.approx(64 * 4096 / found.total / 32)


def test_candidates_do_not_see_each_other():
    model, train, rng = load_model('mixtral-8x7b'), TrainSpec(4096, 256), np.random.default_rng(0)
    pick = lambda *values: rng.choice(values, 50)
    many = Strategies(4, 1, '1f1b', None, tp=pick(1, 2, 4, 8), cp=pick(1, 2), dp=pick(4, 8), ep=pick(1, 2, 4), etp=np.ones(50, int), sequence_parallel=pick(True, False),
                      micro_batch=pick(1, 2), zero=pick(0, 1, 2, 3), recompute=pick(0, 1, 2))
    total = step_parts(model, with_cards(ATLAS, 1024), many, train)['total']
    for place in (0, 17, 49):
        fields = {name: getattr(many, name)[place] for name in ('tp', 'cp', 'dp', 'ep', 'etp', 'sequence_parallel', 'micro_batch', 'zero', 'recompute')}
        alone = step_parts(model, with_cards(ATLAS, 1024), Strategies(4, 1, '1f1b', None, **fields), train)['total']
        assert alone[0] == pytest.approx(total[place], rel=1e-12)


# ---- behaviour -----------------------------------------------------------------------------------------------------------

def test_recomputation_costs_a_quarter():
    none, full = report(train=TrainSpec(4096, 64)), report(train=TrainSpec(4096, 64, recompute='full'))
    assert 1.2 < full.total / none.total < 1.36 and full.hfu / full.mfu == pytest.approx(4 / 3, rel=0.03)


def test_some_recomputed_layers_cost_some():
    totals = [report(train=TrainSpec(4096, 64, recompute='full', recompute_layers=layers)).total for layers in (1, 10, 20)]
    assert report(train=TrainSpec(4096, 64)).total < totals[0] < totals[1] < totals[2] == report(train=TrainSpec(4096, 64, recompute='full')).total


def test_more_micro_batches_shrink_the_bubble():
    shares = [report(pp=4, train=TrainSpec(4096, batch)).bubble_fraction for batch in (16, 64, 256)]
    assert shares[0] > shares[1] > shares[2]


def test_slower_links_cost_more():
    model, layout, train = load_model('llama2-13b'), Layout(32, tp=4, pp=2), TrainSpec(4096, 64)
    slow = replace(DGX, links=tuple(replace(link, bytes_per_s=link.bytes_per_s / 4) for link in DGX.links))
    assert estimate_step(model, with_cards(slow, 32), layout, train).total > estimate_step(model, with_cards(DGX, 32), layout, train).total


def test_tp_across_servers_is_slow():
    inside, across = report(world=32, tp=8, pp=1), report(world=32, tp=16, pp=1)
    assert across.parts['tp'] > 2 * inside.parts['tp']


def test_innermost_data_parallelism_drives_tp_out():
    usual, other = report(world=64, tp=8, pp=1), report(world=64, tp=8, pp=1, order='dp-tp-cp-ep-pp')
    assert other.parts['tp'] > 5 * usual.parts['tp']


def test_quantized_gradients_shorten_the_synchronization():
    plain, small = report(pp=1, train=TrainSpec(4096, 64, zero=0)), report(pp=1, train=TrainSpec(4096, 64, zero=0, gradient_bits=8))
    assert small.parts['dp'] < 0.35 * plain.parts['dp']


def test_imbalance_slows_only_experts():
    even, skewed = (report('mixtral-8x7b', TrainSpec(4096, 64, imbalance=skew), world=32, tp=1, pp=2, ep=8, etp=1) for skew in (1.0, 1.5))
    dense = [report(train=TrainSpec(4096, 64, imbalance=skew)).total for skew in (1.0, 1.5)]
    assert even.total * 1.1 < skewed.total < even.total * 1.5 and dense[0] == dense[1]


def test_small_layers_wait_for_the_host():
    small = report('gpt2-medium', TrainSpec(1024, 8), world=8, tp=8, pp=1)
    assert small.parts['host'] > 0.3 * small.total and report().parts['host'] == 0


def test_once_per_accumulation():
    once, each = accumulation_seconds(load_model('llama2-13b'), with_cards(DGX, 32), Layout(32, tp=8), TrainSpec(4096, 64))
    assert each > once > 0


@pytest.mark.parametrize('name', MODELS)
def test_every_model_has_a_time(name):
    model = load_model(name)
    train = TrainSpec(512, 64)
    found = estimate_step(model, with_cards(ATLAS, 32), Layout(32, pp=2 if model.layers % 2 == 0 else 1), train)
    assert np.isfinite(found.total) and found.total > 0 and found.mfu < 0.9


@pytest.mark.parametrize('schedule', ['gpipe', '1f1b', 'zb-h1', 'zb-h2', 'zb-v', 'dualpipe', 'dualpipe-v'])
def test_every_schedule_has_a_time(schedule):
    vpp = 2 if schedule in ('zb-v', 'dualpipe-v') else 1
    found = report('llama2-7b', TrainSpec(4096, 256, schedule=schedule), world=32, tp=2, pp=4, vpp=vpp)
    assert found.total == pytest.approx(report('llama2-7b', TrainSpec(4096, 256), world=32, tp=2, pp=4).total, rel=0.15)


# ---- errors and pictures -------------------------------------------------------------------------------------------------

def test_errors():
    model = load_model('llama2-7b')
    with pytest.raises(ValueError, match='no multiple of micro_batch 2 x dp 4; nearest: 8'):
        estimate_step(model, DGX, Layout(8, tp=2), TrainSpec(4096, 9, 2))
    with pytest.raises(ValueError, match='has no constants'):
        estimate_step(model, load_cluster('shaped-4x2'), Layout(8, tp=2), TrainSpec(4096, 8, dtype='fp32'))
    with pytest.raises(ValueError, match='layout.world'):
        estimate_step(model, DGX, Layout(9, tp=2), TrainSpec(4096, 8))


def test_own_constants():
    model, layout, train = load_model('llama2-7b'), Layout(8, tp=2), TrainSpec(4096, 8)
    slow = replace(A100, matrix=A100.matrix / 2)
    assert isinstance(slow, Efficiency)
    assert estimate_step(model, DGX, layout, train, slow).parts['matrix'] == pytest.approx(2 * estimate_step(model, DGX, layout, train).parts['matrix'], rel=0.05)


@pytest.mark.parametrize('draw', [lambda: plot_step(report()), lambda: plot_exposed(report()), lambda: plot_product(DGX.device, A100), lambda: plot_shares(3e9, ATLAS, 1.0)])
def test_plots_have_a_title_and_units(draw):
    ax = draw()
    assert ax.get_title(loc='left') or ax.get_title()
    assert any(unit in ax.get_xlabel() + ax.get_ylabel() for unit in ('s per step', 'seconds', '[%]'))
