"""Tokens to experts and back on real ranks, in every way, against one process; bytes against counters, closed forms and published times."""
import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridlab.comm.shaped import ShapedCluster, can_shape, wire_bytes
from hybridlab.core.launch import run
from hybridlab.moe.dispatch import (
    MODES, ExpertGroups, alltoall_bytes, alltoall_seconds, build_expert_groups, combine, count_sent, dispatch, ep_servers, expected_nodes, expert_mlp,
    expert_shard, explore_alltoall, group_rank, load_published_alltoall, reference_moe)
from hybridlab.moe.routing import expert_choice, route
from hybridlab.spec.cluster import load_cluster
from hybridlab.spec.layout import Layout

H, F, K = 16, 24, 2
SMALL = {torch.float32: 1e-6, torch.float64: 1e-13}  # relative to the largest value
RULES = {'dropless': {}, 'capacity 1.25': {'capacity_factor': 1.25}, 'limit 9': {'limit': 9}, 'nothing kept': {'limit': 0}}


def expert_layout(world, ep, etp=1):
    return Layout(world, tp=1, pp=1, ep=ep, etp=etp)


LAYOUTS = {  # world: {name: (layout, cards per server)}
    2: {'ep 2': (expert_layout(2, 2), None), 'etp 2': (expert_layout(2, 1, 2), None), 'two servers': (expert_layout(2, 2), 1)},
    4: {'ep 4': (expert_layout(4, 4), None), 'ep 2': (expert_layout(4, 2), None), 'ep 2, etp 2': (expert_layout(4, 2, 2), None),
        'ep 4, 2 x 2': (expert_layout(4, 4), 2), 'ep 2, etp 2, 2 x 1': (expert_layout(4, 2, 2), 2)},
    6: {'ep 6, 3 x 2': (expert_layout(6, 6), 2), 'ep 6, 2 x 3': (expert_layout(6, 6), 3), 'ep 3, etp 2, 3 x 1': (expert_layout(6, 3, 2), 2)},
    8: {'ep 8, 4 x 2': (expert_layout(8, 8), 2), 'ep 4, etp 2, 2 x 2': (expert_layout(8, 4, 2), 4), 'ep 4, two copies': (expert_layout(8, 4), 2)},
}


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(rank, world, load, dtype):
    "Tokens, logits and output gradients of a rank; the ranks hold different numbers of tokens, rank 1 of a 'ragged' world none."
    T, E = {'ragged': 0 if rank == 1 else 9 + 8 * rank}.get(load, 32), experts_of(world)
    slope = {'skewed': torch.linspace(0, 4, E), 'idle ranks': torch.where(torch.arange(E) < E // 2, 50.0, 0.0)}.get(load, torch.zeros(E))
    return draw(rank, T, H, dtype=dtype), draw(100 + rank, T, E, dtype=dtype) + slope.to(dtype), draw(200 + rank, T, H, dtype=dtype)


def experts_of(world):
    return {6: 12}.get(world, 8)


def weights(world, dtype):
    return draw(1, experts_of(world), H, F, dtype=dtype) / 4, draw(2, experts_of(world), F, H, dtype=dtype) / 4


def one_process(world, load, rule, dtype, routing=route):
    "Outputs, gradients of tokens and logits by rank, gradients of all experts."
    w_in, w_out = (weight.requires_grad_() for weight in weights(world, dtype))
    outputs, leaves, loss = [], [], 0
    for rank in range(world):
        x, logits, target = inputs(rank, world, load, dtype)
        leaves.append((x.requires_grad_(), logits.requires_grad_()))
        outputs.append(reference_moe(x, routing(logits, K, **rule), w_in, w_out))
        loss = loss + (outputs[-1] * target).sum() / 32
    loss.backward()
    return [y.detach() for y in outputs], [tuple(leaf.grad for leaf in pair) for pair in leaves], (w_in.grad, w_out.grad)


def exchanged(groups, load, rule, dtype, mode, padded=False, routing=route):
    "The same of this rank, with its place."
    world = dist.get_world_size()
    x, logits, target = inputs(dist.get_rank(), world, load, dtype)
    w_in, w_out = (part.clone().requires_grad_() for part in expert_shard(*weights(world, dtype), groups))
    there = dispatch(x.requires_grad_(), routing(logits.requires_grad_(), K, **rule), groups, mode, padded)
    y = combine(expert_mlp(there.tokens, there.counts, w_in, w_out), there)
    ((y * target).sum() / 32).backward()
    for weight in (w_in, w_out) if groups.edp else ():
        dist.all_reduce(weight.grad, group=groups.edp)
    return y.detach(), (x.grad, logits.grad), (w_in.grad, w_out.grad), (group_rank(groups.ep), group_rank(groups.etp))


def cases_of(world):
    for name, (_, cards) in LAYOUTS[world].items():
        for mode, rule, padded in itertools.product(MODES if cards else ['flat'], RULES, (False, True)):
            if not padded or (mode != 'deduplicated' and rule != 'dropless'):
                for load in {'dropless': ('even', 'ragged', 'idle ranks'), 'limit 9': ('ragged', 'skewed')}.get(rule, ('skewed',)):
                    yield name, mode, rule, padded, load


def every_case(dtype):
    groups = {name: build_expert_groups(*arguments) for name, arguments in LAYOUTS[dist.get_world_size()].items()}
    return {case: exchanged(groups[case[0]], case[4], RULES[case[2]], dtype, case[1], case[3]) for case in cases_of(dist.get_world_size())}


def apart(got, want):
    return ((got - want).abs().max() / want.abs().max().clamp(min=1e-3)).item() if want.numel() else 0.0


def piece(value, layout, seat, dim):
    return value.chunk(layout.ep)[seat[0]].chunk(layout.etp, dim)[seat[1]]


@pytest.mark.parametrize('world, dtype', [(2, torch.float32), (4, torch.float32), (6, torch.float64), (8, torch.float64)])
def test_equals_one_process(world, dtype):
    by_rank, known = run(every_case, dtype, world_size=world, timeout_s=300), {}
    assert len(by_rank[0]) >= 24
    for case in by_rank[0]:
        name, mode, rule, padded, load = case
        if (load, rule) not in known:
            known[load, rule] = one_process(world, load, RULES[rule], dtype)
        outputs, leaves, experts = known[load, rule]
        for rank, (y, pair, part, seat) in enumerate(found[case] for found in by_rank):
            gaps = [apart(y, outputs[rank]), *map(apart, pair, leaves[rank]),
                    *(apart(got, piece(want, LAYOUTS[world][name][0], seat, dim)) for got, want, dim in zip(part, experts, (2, 1)))]
            assert max(gaps) < SMALL[dtype], f'rank {rank}, {case}: {gaps}'


def test_flat_and_hierarchical_agree_in_every_bit():
    def body():
        groups = build_expert_groups(expert_layout(4, 4), 2)
        return [exchanged(groups, 'skewed', RULES['capacity 1.25'], torch.float32, mode, padded) for mode in MODES[:2] for padded in (False, True)]

    for flat, flat_padded, steps, steps_padded in run(body, world_size=4):
        for a, b in ((flat, steps), (flat_padded, steps_padded)):
            assert torch.equal(a[0], b[0]) and all(map(torch.equal, (*a[1], *a[2]), (*b[1], *b[2])))


def test_expert_choice_and_group_limits_travel_too():
    limited = {'num_groups': 2, 'group_topk': 1, 'score': 'sigmoid', 'scale': 2.5}

    def body():
        groups = build_expert_groups(expert_layout(4, 4), 2)
        return [(exchanged(groups, 'even', {}, torch.float64, mode, routing=expert_choice), exchanged(groups, 'even', limited, torch.float64, mode)) for mode in MODES]

    wanted = [one_process(4, 'even', {}, torch.float64, expert_choice), one_process(4, 'even', limited, torch.float64)]
    for rank, modes in enumerate(run(body, world_size=4)):
        for pair in modes:
            for found, want in zip(pair, wanted):
                assert max(apart(found[0], want[0][rank]), *map(apart, found[1], want[1][rank])) < 1e-13


def test_low_precision_and_second_derivatives():
    def body():
        groups, rank = build_expert_groups(expert_layout(2, 2), 1), dist.get_rank()
        x, logits, _ = inputs(rank, 2, 'even', torch.bfloat16)
        there = dispatch(x, route(logits, K), groups, 'deduplicated')
        low = combine(there.tokens, there)
        x = x.double().requires_grad_()
        there = dispatch(x, route(logits.double(), K), groups)
        grad, = torch.autograd.grad(combine(there.tokens ** 3, there).sum(), x, create_graph=True)
        second, = torch.autograd.grad(grad.sum(), x)
        return low.dtype, apart(low.double(), x.detach()), apart(second, 6 * x.detach())

    for dtype, first, second in run(body, world_size=2):
        assert dtype == torch.bfloat16 and first < 0.02 and second < 1e-12  # weights sum to 1, so the layer is the identity


# ---- on one rank ---------------------------------------------------------------------------------------------------------

@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(0, 20), experts=st.integers(1, 9), k=st.integers(1, 4), factor=st.sampled_from([None, 0.0, 0.3, 1.0, 3.0]), padded=st.booleans(), seed=st.integers(0, 99))
def test_one_rank_is_the_plain_loop(tokens, experts, k, factor, padded, seed):
    k, padded = min(k, experts), padded and factor is not None
    routing = route(draw(seed, tokens, experts), k, capacity_factor=factor)
    x, w_in, w_out = draw(seed + 1, tokens, H), draw(1, experts, H, F), draw(2, experts, F, H)
    there = dispatch(x, routing, padded=padded)
    assert sum(there.counts) == len(there.tokens) == (experts * routing.capacity if padded else int(routing.kept.sum()))
    torch.testing.assert_close(combine(expert_mlp(there.tokens, there.counts, w_in, w_out), there), reference_moe(x, routing, w_in, w_out), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('call, words', [
    (lambda x, r: dispatch(x[:3], r), r'x has shape \(3, 16\), the routing 8 tokens'),
    (lambda x, r: dispatch(x[None], r), r'\[8, H\]'),
    (lambda x, r: dispatch(x, r, mode='direct'), 'Valid here|Did you mean'),
    (lambda x, r: dispatch(x, r, padded=True), 'no capacity'),
    (lambda x, r: dispatch(x, route(torch.zeros(8, 4), 2, capacity_factor=1.0), ExpertGroups(), 'deduplicated', True), 'not known before'),
    (lambda x, r: combine(x, dispatch(x, r)), 'one result per row'),
    (lambda x, r: expert_mlp(x, [4, 4], torch.zeros(3, H, F), torch.zeros(3, F, H)), 'weights of 3'),
])
def test_wrong_use_on_one_rank(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(8, H), route(torch.zeros(8, 4), 2))


def test_wrong_use_stops_before_any_byte():
    "Each rank gets the error on its own: the others never enter, and nobody waits for them."
    def body():
        rank, world = dist.get_rank(), dist.group.WORLD
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        x, eight, six = torch.zeros(8, H), route(torch.zeros(8, 8), 2), route(torch.zeros(8, 6), 2)
        calls = [lambda: dispatch(x, eight, pairs[rank < 2]), lambda: dispatch(x, six, world), lambda: dispatch(x[:2], eight, world),
                 lambda: dispatch(x, eight, world, 'hierarchical'), lambda: build_expert_groups(expert_layout(8, 4)),
                 lambda: build_expert_groups(expert_layout(4, 4), 3), lambda: expert_shard(torch.zeros(6, H, F), torch.zeros(6, F, H), ExpertGroups(ep=world)),
                 lambda: build_expert_groups(Layout(4, tp=1, pp=1, ep=3, etp=1))]
        found = []
        with count_sent() as sent:
            for call in calls if rank == 0 else ():  # one rank alone
                with pytest.raises(ValueError) as caught:
                    call()
                found.append(str(caught.value))
        return found, sent

    found, sent = run(body, world_size=4)[0]
    for text, words in zip(found, ('not in the group', 'ep=4 does not divide 6 experts; valid here: 1, 2, 3, 6', 'flattened', 'cards_per_server', 'start 8 ranks',
                                   '3, 1 ranks on its servers of 3 cards', 'do not fit ep=4', 'does not divide world=4'), strict=True):
        assert words in text
    assert not sent


# ---- bytes ---------------------------------------------------------------------------------------------------------------

def test_expected_nodes():
    assert [round(expected_nodes(*case), 3) for case in ((256, 8, 8), (64, 8, 4), (8, 2, 2))] == [5.295, 3.659, 1.571]
    for experts, k, nodes in ((8, 3, 4), (6, 2, 3), (8, 2, 2)):  # every choice of k experts
        used = [len({expert * nodes // experts for expert in chosen}) for chosen in itertools.combinations(range(experts), k)]
        assert expected_nodes(experts, k, nodes) == pytest.approx(np.mean(used))
    for bad in ((8, 2, 3), (8, 9, 2), (8, 0, 2), (8, 2, 0)):
        with pytest.raises(ValueError):
            expected_nodes(*bad)


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(1, 5000), k=st.integers(1, 8), seats=st.sampled_from([1, 2, 4, 8]), servers=st.sampled_from([1, 2, 4, 8]), etp=st.sampled_from([1, 2]))
def test_volumes(tokens, k, seats, servers, etp):
    ep = seats * servers
    made = {mode: alltoall_bytes(tokens, 128, k, 64, ep, servers, mode, etp=etp) for mode in MODES}
    flat, steps, once = made.values()
    assert flat.total('dispatch', 'combine', 'combine backward', 'dispatch backward') == pytest.approx(8 * tokens * k * 128 * (ep - 1) / ep)
    assert flat.across == pytest.approx(steps.across) and flat.inside <= steps.inside + 1e-6
    saved = k - expected_nodes(64, k, servers)  # copies that do not travel twice
    assert steps.across - once.across == pytest.approx(tokens * (servers - 1) / servers * (8 * 128 * saved - 12 * k * (k - saved)))
    padded = alltoall_bytes(tokens, 128, k, 64, ep, servers, capacity=math.ceil(1.25 * tokens * k / 64), etp=etp)
    assert padded.total() >= 1.25 * flat.total() * (1 - 1e-9)
    assert alltoall_bytes(tokens, 128, k, 64, ep, servers, backward=False).total() * 2 == pytest.approx(alltoall_bytes(tokens, 128, k, 64, ep, servers).total())
    hccs, roce = load_cluster('atlas-800t-a2').links
    assert all(sum(alltoall_seconds(volume, hccs, roce).values()) >= volume.across * roce.beta * (1 - 1e-9) for volume in made.values())


def test_fp8_halves_one_leg_of_four():
    full, low = (alltoall_bytes(100, 64, 2, 8, 4, dispatch_bytes=size) for size in (None, 1))
    assert low.legs['dispatch'][0] * 2 == full.legs['dispatch'][0] and low.total() / full.total() == 7 / 8
    assert {leg: value for leg, value in low.legs.items() if leg != 'dispatch'} == {leg: value for leg, value in full.legs.items() if leg != 'dispatch'}


def test_alltoall_seconds_by_hand():
    hccs, roce = load_cluster('atlas-800t-a2').links
    volume = alltoall_bytes(4096, 7168, 8, 256, 16, 2, backward=False)
    near, far = volume.legs['dispatch']
    assert alltoall_seconds(volume, hccs, roce)['dispatch'] == pytest.approx(max(hccs.alpha + near / 7 / 28e9, 8 * roce.alpha + far / 25e9))
    steps = alltoall_bytes(4096, 7168, 8, 256, 16, 2, 'hierarchical', backward=False)
    near, far = steps.legs['dispatch']
    assert alltoall_seconds(steps, hccs, roce)['combine'] == pytest.approx(hccs.alpha + near / 7 / 28e9 + roce.alpha + far / 25e9)


def test_published_rates():
    table = load_published_alltoall()
    assert table.mb.round().tolist() == [411, 411, 462, 462, 462, 462, 440, 440]
    np.testing.assert_allclose(table.gb_per_s, [559, 1051, 497, 685, 50.5, 100, 76, 297], rtol=0.005)
    assert set(table.read_how) == {'read'} and table.source.str.contains('2603.07685').all()


def test_article_placement():
    assert ep_servers(Layout(128, tp=8, pp=8, ep=4, etp=2), 8) == 1  # "keep EP inside one server" changes nothing there
    assert ep_servers(Layout(128, tp=8, pp=8, ep=2), 8) == 2
    with pytest.raises(ValueError, match='layout'):
        ep_servers(Layout(128, tp=8, pp=8, ep=4), 8)  # ETP defaults to 8


def sent_bytes(tokens, hidden):
    "Bytes to the other server by our count and by the kernel's, per way; all ranks of a server report the same counter."
    groups, found = build_expert_groups(expert_layout(4, 4), 2), {}
    logits, x = draw(dist.get_rank(), tokens, 8), draw(5, tokens, hidden, dtype=torch.float32)
    for mode in MODES:
        x.requires_grad_()
        dist.barrier()
        before = wire_bytes()
        with count_sent() as sent:
            there = dispatch(x, route(logits, K), groups, mode)
            combine(there.tokens, there).sum().backward()
        dist.barrier()
        after = wire_bytes()
        found[mode] = sum(message.nbytes for message in sent if message.rank // 2 != dist.get_rank() // 2), after and after[0] - before[0]
    return found


@pytest.mark.skipif(bool(can_shape()), reason=can_shape())
def test_counted_bytes_are_those_on_the_wire():
    with ShapedCluster(2, 2, 1e9) as cluster:
        by_rank = cluster.run(sent_bytes, 512, 1024)
    for server in ((0, 1), (2, 3)):
        for mode in MODES:
            ours, wire = sum(by_rank[rank][mode][0] for rank in server), by_rank[server[0]][mode][1]
            assert 1.0 < wire / ours < 1.06, f'{mode}: {wire} on the wire for {ours}'  # headers of TCP and of gloo
    total = {mode: sum(rank[mode][0] for rank in by_rank) for mode in MODES}
    assert total['deduplicated'] / total['flat'] == pytest.approx(expected_nodes(8, 2, 2) / 2, rel=0.03)


def test_widget():
    widget = explore_alltoall()
    first = widget.image.value
    for name, value in dict(etp=8, ep=8, cluster='dgx-h100', placement='EP over servers', capacity_factor=1.25, fp8_dispatch=True).items():
        widget.controls[name].value = value
        assert not widget.message.value
    assert widget.image.value != first
    widget.controls['model'].value, widget.controls['ep'].value = 'mixtral-8x7b', 64
    assert 'does not divide 8 experts' in widget.message.value
