"""Routing against megatron-core's and DeepSpeed's stored results, and as a contract over random inputs and ties."""
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridlab.core.launch import run
from hybridlab.moe import routing as moe
from hybridlab.moe.routing import POLICIES, SCORES, aux_loss, capacity, device_loss, expert_choice, imbalance, permutation, permute, route, sinkhorn, unpermute, \
    update_bias, z_loss

FOLDER = Path(__file__).parent
VECTORS = json.loads((FOLDER / 'moe_vectors.json').read_text(encoding='utf-8'))
DEEPSPEED = json.loads((FOLDER / 'moe_vectors_deepspeed.json').read_text(encoding='utf-8'))['cases']
LOGITS = {name: torch.tensor(rows) for name, rows in VECTORS['logits'].items()}


def cases(name):
    found = VECTORS[name]['cases'] if isinstance(VECTORS[name], dict) else VECTORS[name]
    return pytest.mark.parametrize('case', found, ids=range(len(found)))


def dense(routing, values=None):
    "[T, E] map of the kept choices, or of a value for each of them."
    out = torch.zeros(routing.expert.shape[0], routing.counts.numel(), dtype=torch.int64 if values is None else values.dtype)
    return out.scatter_add(1, routing.expert.clamp(min=0), (routing.kept.long() if values is None else values * routing.kept))


def close(ours, theirs):
    torch.testing.assert_close(ours, torch.tensor(theirs), rtol=1e-6, atol=1e-7)


# ---- megatron-core 0.16.1 --------------------------------------------------------------------------------------------------

def megatron_score(arguments):
    return arguments.get('score_function') if arguments.get('score_function') != 'softmax' else 'pre-softmax' if arguments['use_pre_softmax'] else 'softmax'


@cases('topk_routing_with_score_function')
def test_gates_of_megatron(case):
    given_args = case['args']
    bias = given_args.get('expert_bias')
    routing = route(LOGITS[case['logits']], given_args['topk'], megatron_score(given_args), bias=None if bias is None else torch.tensor(bias),
                    scale=given_args.get('scaling_factor', 1.0), num_groups=given_args.get('num_groups'), group_topk=given_args.get('group_topk'))
    assert dense(routing).tolist() == case['map']
    close(dense(routing, routing.weight), case['probs'])
    assert routing.counts.tolist() == case['tokens_per_expert']


@cases('get_capacity')
def test_capacity_of_megatron(case):
    assert capacity(case['num_tokens'], case['num_experts'], 1, case['capacity_factor'], min_capacity=case['min_capacity']) == case['capacity']


@cases('apply_router_token_dropping')
def test_drops_of_megatron(case):
    "Megatron's `position` keeps arbitrary tokens, so there only the numbers can agree; see test_position_is_first_come_first_served."
    routing = route(LOGITS[case['logits']], case['topk'], 'pre-softmax' if case['pre_softmax'] else 'softmax', case['capacity_factor'], case['drop_policy'])
    assert routing.capacity == case['capacity'] and routing.dropped == case['dropped_assignments'] == case['closed_form_dropped']
    assert int(routing.kept.sum()) == case['kept_assignments']
    if case['drop_policy'] == 'probs':
        close(dense(routing, routing.weight), case['probs'])
        expected = torch.tensor(case['map'])
        assert torch.equal(padded_map(routing) if case['pad_to_capacity'] else dense(routing), expected)


def padded_map(routing, rows=None):
    "Megatron's padding marks tokens that did not choose the expert; ours adds empty rows. This puts its marks where it has them."
    probs, rows = dense(routing, routing.weight), routing.capacity if rows is None else rows
    return torch.zeros_like(probs, dtype=torch.int64).scatter(0, probs.topk(min(rows, len(probs)), dim=0).indices, 1)


@cases('switch_load_balancing_loss')
def test_aux_loss_of_megatron(case):
    routing = route(LOGITS[case['logits']], case['topk'], case['score_function'])
    close(routing.scores, case['scores'])
    assert routing.counts.tolist() == case['tokens_per_expert']
    close(aux_loss(routing), case['aux_loss_coeff1'])


@cases('seq_aux_loss')
def test_sequence_loss_of_megatron(case):
    close(aux_loss(route(LOGITS[case['logits']], case['topk']), sequences=case['batch']), case['seq_aux_loss_coeff1'])


@cases('z_loss')
def test_z_loss_of_megatron(case):
    close(z_loss(LOGITS[case['logits']], case['coeff']), case['z_loss'])


@cases('sinkhorn')
def test_sinkhorn_of_megatron(case):
    ours = sinkhorn(LOGITS[case['logits']], case['tol'])
    torch.testing.assert_close(ours, torch.tensor(case['sinkhorn']), rtol=2e-6, atol=1e-7)
    assert route(LOGITS[case['logits']], 2, 'sinkhorn').counts.tolist() == case['top2_counts']


@cases('permute_unpermute')
def test_permutation_of_megatron(case):
    "Their padding rows are copies of other tokens with weight 0, in between; ours are empty rows at the end of each expert."
    padded = case.get('drop_and_pad', False)
    routing = route(LOGITS[case['logits']], case['topk'], capacity_factor=case.get('capacity_factor'))
    x, order = torch.tensor(case['hidden']), permutation(routing, 'capacity' if padded else None)
    rows, weights = permute(x, order), torch.tensor(case['permuted_probs'])
    real = weights > 0
    assert len(rows) == len(weights) and rows[(order.order < 0)].abs().sum() == 0
    assert order.tokens.tolist() == torch.tensor(case['sorted_indices'])[real].tolist()
    assert torch.equal(rows[order.filled], torch.tensor(case['permuted'])[real])
    assert padded or order.sizes.tolist() == case['tokens_per_expert']
    close(routing.weight.reshape(-1)[order.slots], weights[real].tolist())
    close(unpermute(rows, order, routing.weight), case['unpermuted_weighted'])


@cases('group_limited_topk')
def test_groups_of_megatron(case):
    routing = route(LOGITS[case['logits']], case['topk'], 'pre-softmax', num_groups=case['num_groups'], group_topk=case['group_topk'])
    assert routing.expert.sort(dim=1).values.tolist() == case['sorted_indices']


@cases('pad_routing_map')
def test_padding_to_a_multiple_of_megatron(case):
    routing = route(LOGITS[case['logits']], case['topk'])
    expected, sizes = torch.tensor(case['map']), permutation(routing, case['pad_multiple']).sizes
    assert sizes.tolist() == expected.sum(dim=0).tolist()
    ours = dense(routing)
    first_free = (1 - ours).cumsum(dim=0) * (1 - ours) # their padding marks the first tokens that did not choose the expert
    assert torch.equal(ours + ((first_free > 0) & (first_free <= sizes - routing.counts)), expected)


@cases('get_updated_expert_bias')
def test_bias_update_of_megatron(case):
    close(update_bias(torch.tensor(case['bias']), torch.tensor(case['tokens_per_expert']), case['rate']), case['updated'])


def test_every_stored_case_is_used():
    names = set(VECTORS) - {'meta', 'logits'}
    text = Path(__file__).read_text(encoding='utf-8')
    assert all(f"@cases('{name}')" in text for name in names)
    assert sum(len(VECTORS[name]['cases'] if isinstance(VECTORS[name], dict) else VECTORS[name]) for name in names) == 170


# ---- DeepSpeed 0.19.8 ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('case', DEEPSPEED, ids=range(len(DEEPSPEED)))
def test_topkgating_of_deepspeed(case):
    logits = LOGITS[case['logits']]
    limit = capacity(*logits.shape, case['k'], case['cf'], 'deepspeed', min_capacity=1)
    routing = route(logits, case['k'], 'pre-softmax', limit=limit, policy=case['policy'], renormalize='survivors')
    assert limit == case['capacity'] and routing.counts.tolist() == case['exp_counts']
    assert routing.dropped == case['dropped'] and dense(routing).tolist() == case['dispatch_expert']
    close(routing.weight.sum(dim=1), case['combine_sum'])
    close(aux_loss(routing), case['l_aux'])


# ---- properties ------------------------------------------------------------------------------------------------------------

@st.composite
def problems(draw, max_tokens=40):
    "(logits on a coarse grid, so that ties are common and shifts are exact, k, factor, policy)."
    T, E = draw(st.integers(0, max_tokens)), draw(st.integers(1, 12))
    grid = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = torch.from_numpy(rng.integers(-grid, grid + 1, (T, E)) / 8).float() + torch.linspace(0, draw(st.sampled_from([0.0, 4.0])), E)
    return (logits * 64).round() / 64, draw(st.integers(1, E)), draw(st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.25, 3.0, 100.0])), draw(st.sampled_from(POLICIES))


@settings(max_examples=300, deadline=None)
@given(problems(), st.sampled_from(sorted(SCORES)))
def test_drops_follow_the_closed_form(problem, score):
    logits, k, factor, policy = problem
    routing = route(logits, k, score, factor, policy)
    T, E = logits.shape
    over = (routing.counts - capacity(T, E, k, factor)).clamp(min=0).sum()
    assert routing.dropped == over and int(routing.kept.sum()) + routing.dropped == k * T
    assert all(len(set(row)) == k for row in routing.expert.tolist())
    assert torch.equal(torch.bincount(routing.expert[routing.kept], minlength=E), routing.kept_counts)
    assert (routing.weight[~routing.kept] == 0).all() and routing.dropped >= (1 - factor) * k * T - E


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from(['softmax', 'pre-softmax']), st.integers(-40, 40))
def test_a_shift_of_the_logits_changes_nothing(problem, score, shift):
    logits, k, factor, policy = problem
    ours, shifted = route(logits, k, score, factor, policy), route(logits + shift, k, score, factor, policy)
    assert torch.equal(ours.expert, shifted.expert) and torch.equal(ours.kept, shifted.kept)
    torch.testing.assert_close(ours.weight, shifted.weight)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_the_choice_is_the_stable_order(problem):
    logits, k, _, _ = problem
    expected = np.argsort(-logits.numpy(), axis=1, kind='stable')[:, :k]
    assert np.array_equal(route(logits, k).expert.numpy(), expected)
    assert torch.equal(moe._topk_torch(logits, k)[0], torch.from_numpy(expected.copy()))


@settings(max_examples=200, deadline=None)
@given(problems())
def test_position_is_first_come_first_served(problem):
    logits, k, factor, _ = problem
    routing = route(logits, k, capacity_factor=factor, policy='position')
    mask = torch.zeros_like(logits).scatter(1, routing.expert, 1.0)
    assert torch.equal(dense(routing).bool(), (mask > 0) & (mask.cumsum(dim=0) <= routing.capacity))


@settings(max_examples=200, deadline=None)
@given(problems())
def test_choice_major_serves_first_choices_first(problem):
    logits, k, factor, _ = problem
    routing = route(logits, k, capacity_factor=factor, policy='choice-major')
    taken = [0] * logits.shape[1]
    for j in range(k):
        for t, row in enumerate(routing.expert.tolist()):
            assert bool(routing.kept[t, j]) == (taken[row[j]] < routing.capacity)
            taken[row[j]] += 1


@settings(max_examples=200, deadline=None)
@given(problems())
def test_probs_keeps_the_best_and_the_first_of_equal_ones(problem):
    logits, k, factor, _ = problem
    routing, free = route(logits, k, 'pre-softmax', factor), route(logits, k, 'pre-softmax')
    for e in range(logits.shape[1]):
        mine = sorted((-float(free.weight[t, j]), t) for t, j in (free.expert == e).nonzero().tolist())
        assert {t for _, t in mine[:routing.capacity]} == set(((routing.expert == e) & routing.kept).any(dim=1).nonzero()[:, 0].tolist())


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from([None, 'capacity', 1, 4]))
def test_compiled_loops_and_torch_operations_agree(problem, pad):
    "On a device the torch forms run; here both run on the CPU."
    logits, k, factor, policy = problem
    routing = route(logits, k, capacity_factor=factor, policy='position' if policy == 'choice-major' else policy, seed=3)
    flat = routing.expert.reshape(-1)
    priority = {'position': None, 'choice-major': None, 'probs': route(logits, k).weight.reshape(-1),
                'random': torch.rand(flat.numel(), generator=torch.Generator().manual_seed(3))}[policy]
    if routing.capacity < len(logits):
        assert torch.equal(moe._kept_torch(flat, priority, routing.capacity), routing.kept.reshape(-1))
    order = permutation(routing, pad)
    assert torch.equal(moe._order_torch(flat, routing.kept.reshape(-1), order.sizes), order.order)


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from([None, 'capacity', 8]))
def test_permutation_is_sorted_and_comes_back(problem, pad):
    logits, k, factor, policy = problem
    factor = min(factor, 3.0)
    routing = route(logits, k, capacity_factor=factor, policy=policy)
    order = permutation(routing, pad)
    assert order.sizes.sum() == order.order.numel() and (order.sizes >= routing.kept_counts).all()
    owner = torch.repeat_interleave(torch.arange(logits.shape[1]), order.sizes)
    assert torch.equal(owner[order.filled], routing.expert.reshape(-1)[order.slots])
    assert sorted(order.slots.tolist()) == routing.kept.reshape(-1).nonzero()[:, 0].tolist()
    x = torch.randn(len(logits), 3)
    torch.testing.assert_close(unpermute(permute(x, order), order, routing.weight), x * routing.weight.sum(dim=1, keepdim=True))


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from([0.0, 0.7, 1.0, 2.0, 50.0]))
def test_expert_choice_fills_every_expert(problem, factor):
    logits, k, _, _ = problem
    routing = expert_choice(logits, k, factor)
    T, E = logits.shape
    limit = min(math.ceil(T * k / E * factor), T)
    assert routing.counts.tolist() == [limit] * E == routing.sizes.tolist()
    for e in range(E):
        column = torch.softmax(logits, dim=1)[:, e].tolist()
        best = sorted(range(T), key=lambda t: (-column[t], t))[:limit]
        assert sorted(best) == (routing.expert == e).any(dim=1).nonzero()[:, 0].tolist()
    x = torch.randn(T, 2)
    torch.testing.assert_close(unpermute(permute(x, routing.permutation), routing.permutation, routing.weight), x * routing.weight.sum(dim=1, keepdim=True))


def test_random_depends_on_the_seed_only():
    logits = torch.randn(200, 4)
    kept = [route(logits, 2, capacity_factor=0.5, policy='random', seed=seed).kept for seed in (1, 1, 2)]
    assert torch.equal(kept[0], kept[1]) and not torch.equal(kept[0], kept[2])


# ---- hard inputs -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('policy', POLICIES)
@pytest.mark.parametrize('score', SCORES)
@pytest.mark.parametrize('logits, k, factor', [
    (torch.empty(0, 4), 2, 1.0), (torch.zeros(5, 4), 4, 0.0), (torch.zeros(5, 4), 2, 100.0), (torch.full((9, 3), -50.0), 1, 1.0),
    (torch.randn(1, 1), 1, 1.0), (torch.zeros(70_000, 2), 1, 0.5), (torch.randn(7, 5, dtype=torch.bfloat16), 3, 1.0),
], ids=['T=0', 'C=0', 'cf k > E', 'negative', 'one expert', 'many ties', 'bf16'])
def test_edges(logits, k, factor, policy, score):
    routing = route(logits, k, score, factor, policy)
    assert int(routing.kept.sum()) + routing.dropped == k * len(logits)
    assert routing.weight.dtype == torch.float32 and torch.isfinite(routing.weight).all()
    assert torch.isfinite(aux_loss(routing)) and torch.isfinite(z_loss(logits))
    permute(torch.ones(len(logits), 2), permutation(routing, 8))


@pytest.mark.parametrize('broken', [float('nan'), float('inf')])
@pytest.mark.parametrize('score', SCORES)
def test_broken_logits_are_an_error(score, broken):
    logits = torch.randn(6, 4)
    logits[3, 2] = broken
    if score == 'sigmoid' and broken == float('inf'): # a score of 1
        assert route(logits, 1, score).expert[3, 0] == 2
        return
    with pytest.raises(ValueError, match='token 3 hold NaN'):
        route(logits, 2, score)
    assert moe._topk_torch(logits, 2)[1] == 3


def test_a_forbidden_expert_is_not_chosen():
    logits = torch.randn(50, 4)
    logits[:, 1] = -math.inf
    assert route(logits, 3).counts[1] == 0 and (route(logits, 4).weight[:, 3] == 0).all()
    with pytest.raises(ValueError, match='all -inf'):
        route(torch.full((2, 3), -math.inf), 1)


@pytest.mark.parametrize('arguments, words', [
    (dict(k=0), 'k from 1 to E'), (dict(k=9), 'k from 1 to E'), (dict(k=2, score='softmx'), 'Did you mean softmax'), (dict(k=2, policy='prob'), 'Did you mean probs'),
    (dict(k=2, capacity_factor=-1.0), 'factor of 0 or more'), (dict(k=2, capacity_factor=float('nan')), 'finite'), (dict(k=2, limit=-1), 'give 0 or more'),
    (dict(k=2, renormalize='yes'), 'valid here'), (dict(k=2, num_groups=3, group_topk=1), 'divide'), (dict(k=2, num_groups=4), 'group_topk'),
    (dict(k=5, num_groups=4, group_topk=2), 'do not fit'), (dict(k=2, num_groups=4, group_topk=2, group_rule='mean'), 'sum, max'),
])
def test_wrong_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        route(torch.randn(4, 8), **arguments)


def test_group_rules_differ():
    "Group 0 has the best expert, group 1 the best pair."
    logits = torch.tensor([[5.0, 0.0, 4.0, 3.9]])
    both = [route(logits, 2, num_groups=2, group_topk=1, group_rule=rule).expert.tolist() for rule in ('max', 'sum')]
    assert both == [[[0, 1]], [[2, 3]]]


# ---- torch_npu, by a stand-in with the documented signatures ---------------------------------------------------------------

class OnNpu(torch.Tensor):
    "A CPU tensor that says it is on an NPU."
    device = property(lambda self: SimpleNamespace(type='npu'))


def gating_top_k_softmax(x, finished=None, k=1):
    values, expert = torch.softmax(x, dim=-1).topk(k)
    return values, expert.int(), expert.int()


def gating_top_k(x, k, *, bias=None, k_group=1, group_count=1, group_select_mode=0, norm_type=0):
    assert norm_type == 1
    grouped = (torch.sigmoid(x) + (0 if bias is None else bias)).view(len(x), group_count, -1)
    best = (grouped.topk(2).values.sum(-1) if group_select_mode else grouped.amax(-1)).topk(k_group).indices
    mask = torch.zeros(len(x), group_count, 1, dtype=torch.bool).scatter_(1, best[:, :, None], True)
    values, expert = grouped.masked_fill(~mask, -math.inf).view(x.shape).topk(k)
    return values, expert.int(), x


@pytest.mark.parametrize('options, fused', [
    ({}, True), (dict(score='pre-softmax'), True), (dict(score='sigmoid'), True), (dict(score='sigmoid', bias=torch.linspace(0, 0.3, 16)), True),
    (dict(score='sigmoid', num_groups=4, group_topk=2), True), (dict(score='sigmoid', num_groups=4, group_topk=2, group_rule='max'), True),
    (dict(num_groups=4, group_topk=2), False), (dict(score='sigmoid', num_groups=4, group_topk=4), False), (dict(score='sqrt-softplus'), False),
    (dict(bias=torch.linspace(0, 0.3, 16)), False),
])
def test_fused_gates_are_asked_the_same(monkeypatch, options, fused):
    stand_in = SimpleNamespace(npu_moe_gating_top_k_softmax=gating_top_k_softmax, npu_moe_gating_top_k=gating_top_k)
    monkeypatch.setitem(sys.modules, 'torch_npu', stand_in)
    logits, given_args = torch.randn(50, 16), {'score': 'softmax', 'bias': None, 'num_groups': None, 'group_topk': None, 'group_rule': 'sum'} | options
    groups = None if given_args['num_groups'] is None else (given_args['num_groups'], given_args['group_topk'])
    arguments = 4, given_args['score'], given_args['bias'], groups, given_args['group_rule']
    chosen = moe._npu_select(logits.as_subclass(OnNpu), *arguments)
    assert (chosen is not None) == fused and moe._npu_select(logits, *arguments) is None
    assert chosen is None or torch.equal(chosen.as_subclass(torch.Tensor), route(logits, 4, **options).expert)
    assert moe._npu_select(torch.full((2, 16), math.nan).as_subclass(OnNpu), *arguments) is None # the check for NaN then speaks


# ---- gradients -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('renormalize', [None, 'selected', 'survivors'])
@pytest.mark.parametrize('score', SCORES)
def test_gradients_against_finite_differences(score, renormalize):
    torch.manual_seed(1)
    logits, x = torch.randn(12, 6, dtype=torch.float64, requires_grad=True), torch.randn(12, 3, dtype=torch.float64, requires_grad=True)

    def layer(logits, x):
        routing = route(logits, 2, score, 1.0, 'position', scale=1.5, renormalize=renormalize)
        order = permutation(routing, 'capacity')
        losses = aux_loss(routing), aux_loss(routing, sequences=3), device_loss(routing, 3), device_loss(routing, 3, limit=2), z_loss(logits)
        return unpermute(permute(x, order).sin(), order, routing.weight), *losses

    assert torch.autograd.gradcheck(layer, (logits, x))


def test_gradients_equal_the_dense_form():
    torch.manual_seed(2)
    logits = torch.randn(64, 8, requires_grad=True)
    x, experts = torch.randn(64, 5), torch.randn(8, 5, 5)
    routing = route(logits, 2, capacity_factor=1.0)
    rows = permute(x, routing.permutation)
    parts = torch.split(rows, routing.sizes.tolist())
    ours = unpermute(torch.cat([part @ weight for part, weight in zip(parts, experts)]), routing.permutation, routing.weight)
    (grad,) = torch.autograd.grad((ours ** 2).sum() + aux_loss(routing, 0.1), logits)
    top, chosen = logits.topk(2, dim=1)
    gates = torch.zeros(64, 8).scatter(1, chosen, top.softmax(dim=1)) * dense(routing)
    theirs = torch.einsum('te,th,ehi->ti', gates, x, experts)
    loss = 0.1 * 8 * (routing.counts / 128 * logits.softmax(dim=1).mean(dim=0)).sum()
    (expected,) = torch.autograd.grad((theirs ** 2).sum() + loss, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5)


# ---- losses and metrics ----------------------------------------------------------------------------------------------------

def test_aux_loss_is_1_in_balance_and_E_at_collapse():
    assert float(aux_loss(route(torch.zeros(64, 4), 4))) == pytest.approx(1.0)
    assert float(aux_loss(route(torch.tensor([[50.0, 0, 0, 0]]).repeat(64, 1), 1))) == pytest.approx(4.0)


def distributed_losses(logits):
    "On each rank: its part of a global loss and an update of the bias from all counts."
    import torch.distributed as dist

    group, rank = dist.group.WORLD, dist.get_rank()
    routing = route(logits[rank * 16:rank * 16 + 16], 2)
    before = routing.counts.clone()
    return float(aux_loss(routing, group=group)), update_bias(torch.zeros(8), routing.counts, group=group).tolist(), torch.equal(before, routing.counts)


def test_global_loss_and_bias_use_the_counts_of_all_ranks():
    torch.manual_seed(3)
    logits = torch.randn(32, 8) + torch.linspace(0, 1, 8)
    whole = route(logits, 2)
    results = run(distributed_losses, logits, world_size=2, backend='gloo')
    assert sum(loss for loss, _, _ in results) / 2 == pytest.approx(float(aux_loss(whole)), rel=1e-6)
    assert all(bias == update_bias(torch.zeros(8), whole.counts).tolist() and untouched for _, bias, untouched in results)


def test_bias_balances_a_skewed_router():
    torch.manual_seed(4)
    logits, bias = torch.randn(2048, 16) + torch.linspace(-1, 1, 16), torch.zeros(16)
    before = imbalance(route(logits, 2, 'sigmoid').counts).max_over_mean
    for _ in range(300):
        bias = update_bias(bias, route(logits, 2, 'sigmoid', bias=bias).counts, rate=2e-3)
    after = imbalance(route(logits, 2, 'sigmoid', bias=bias).counts).max_over_mean
    assert before > 2 and after < 1.1
