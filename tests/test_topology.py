"""The graph of cards and switches, the probe on real ranks, rings, trees, packings with their bounds, and rescanning."""
import itertools
import sys
from dataclasses import replace
from functools import partial

import cloudpickle
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridlab.comm import topology as module
from hybridlab.comm.collectives import build_groups
from hybridlab.comm.shaped import ShapedCluster, can_shape, place
from hybridlab.comm.topology import (LinkTable, Rescan, best_ring, build_optimal_topology, degraded_links, double_binary_trees, from_cluster, from_links,
                                     from_rank_table, group_levels, hierarchy_gain, link, link_table, measure_links, mesh_rings, plot_plan, plot_rescan,
                                     ring_order, rings, rounds_of_pairs, route, slow_down, spanning_tree, tree_packing)
from hybridlab.core.config import Config
from hybridlab.core.launch import run
from hybridlab.spec.cluster import LinkSpec, list_clusters, load_cluster, with_cards
from hybridlab.spec.rank_table import RankedDevice, RankTable, read_rank_table, write_rank_table

cloudpickle.register_pickle_by_value(sys.modules[__name__]) # ranks need not import this file and pytest
reason = can_shape()
needs_links = pytest.mark.skipif(bool(reason), reason=f'no shaped links here: {reason}')
A2 = load_cluster('atlas-800t-a2')


def dealt(servers, cards, spread):
    "Rank table with ranks in server order or dealt out like cards."
    seat = (lambda rank: (rank % servers, rank // servers)) if spread else (lambda rank: (rank // cards, rank % cards))
    return RankTable('1.0', tuple(RankedDevice(rank, f'node{seat(rank)[0]}', seat(rank)[1]) for rank in range(servers * cards)))


def shared_port(servers, cards, spread, rate=6.25e6):
    "Servers with one port each, free inside."
    like = load_cluster('shaped-4x2')
    links = (replace(like.links[0], bytes_per_s=1e15, alpha=0.0, span=cards), replace(like.links[1], bytes_per_s=rate, alpha=0.0))
    return from_rank_table(dealt(servers, cards, spread), replace(like, cards_per_server=cards, links=links))


# ---- graph ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', list_clusters())
def test_every_cluster_of_the_library(name):
    cluster = with_cards(load_cluster(name), 3 * load_cluster(name).cards_per_server)
    topology = from_cluster(cluster)
    m = cluster.cards_per_server
    assert topology.ranks == 3 * m and topology.server_of.tolist() == [rank // m for rank in range(3 * m)]
    assert {kind for _, kind in topology.graph.nodes(data='kind')} <= {'npu', 'server', 'leaf', 'spine'}
    for b in range(1, 3 * m): # a route is as fast as the link that joins the two
        expected = cluster.link([0, b])
        alpha, rate = link(topology, 0, b)
        assert alpha == pytest.approx(expected.alpha) and rate == pytest.approx(1 / expected.beta)


def test_routes_pass_no_card():
    for name in list_clusters():
        topology = from_cluster(with_cards(load_cluster(name), 2 * load_cluster(name).cards_per_server))
        for a, b in itertools.combinations(range(topology.ranks), 2):
            assert all(isinstance(node, str) for node in route(topology, a, b)[1:-1])


def test_route_is_the_shortest():
    topology = from_cluster(with_cards(load_cluster('atlas-900-a3'), 48))
    switches = [node for node in topology.graph if isinstance(node, str)]
    for a, b in [(0, 1), (0, 5), (3, 40), (17, 16)]:
        part = topology.graph.subgraph([a, b, *switches])
        expected = nx.dijkstra_path_length(part, a, b, weight=lambda u, v, data: module._edge_s(data))
        path = route(topology, a, b)
        assert sum(module._edge_s(topology.graph[u][v]) for u, v in zip(path, path[1:])) == pytest.approx(expected)


def test_oversubscribed_leaves_and_rails():
    cluster = with_cards(A2, 32)
    thin = replace(cluster, links=(*cluster.links[:-1], replace(cluster.links[-1], oversubscription=4.0)))
    topology = from_cluster(thin)
    assert route(topology, 0, 8) == (0, 'roce 0 leaf 0', 'roce 0', 'roce 0 leaf 1', 8)
    assert topology.graph['roce 0 leaf 0']['roce 0']['bytes_per_s'] == 8 * 25e9 / 4
    two = from_cluster(cluster, leaf=2)
    assert len(route(two, 0, 8)) == 3 and len(route(two, 0, 16)) == 5
    rails = from_cluster(cluster, leaf='rail')
    assert route(rails, 3, 11) == (3, 'roce 0 leaf 3', 11)
    with pytest.raises(ValueError, match="or 'rail'"):
        from_cluster(cluster, leaf='rails')


@pytest.mark.parametrize('version, name, cards', [('1.0', 'atlas-800t-a2', 32), ('1.2', 'atlas-900-a3', 64)])
def test_a_rank_table_gives_the_graph_of_its_cluster(version, name, cards, tmp_path):
    cluster = with_cards(load_cluster(name), cards)
    path = tmp_path / 'table.json'
    import json
    path.write_text(json.dumps(write_rank_table(cluster, version)))
    topology, expected = from_rank_table(read_rank_table(path), cluster), from_cluster(cluster)
    assert topology.servers == expected.servers
    assert np.allclose(link_table(topology).bytes_per_s, link_table(expected).bytes_per_s)


def test_rank_table_halves_of_910a(): # C34: two HCCS groups of four; cards 4 to 7 are the second one, whatever their ranks
    table = RankTable('1.0', tuple(RankedDevice(rank, 'node', card) for rank, card in enumerate((4, 5, 0, 1))))
    topology = from_rank_table(table, load_cluster('atlas-800-910a'))
    assert [len(route(topology, a, b)) for a, b in ((0, 1), (2, 3), (0, 2))] == [2, 2, 3]


def test_unequal_servers_and_wrong_product():
    table = RankTable('1.0', tuple(RankedDevice(rank, 'ab'[rank > 2], card) for rank, card in enumerate((0, 1, 2, 0, 1))))
    topology = from_rank_table(table, A2)
    assert topology.servers == ((0, 1, 2), (3, 4))
    plan = build_optimal_topology(topology)
    assert set(plan.seconds) == {'ring in rank order', 'ring in server order'}
    with pytest.raises(ValueError, match='level1:AHC'):
        plan.groups()
    with pytest.raises(ValueError, match='right product'):
        from_rank_table(RankTable('1.0', (RankedDevice(0, 'a', 9),)), A2)


def test_large_clusters_are_quick_to_build():
    topology = from_cluster(with_cards(A2, 4096))
    assert topology.graph.number_of_edges() == 512 * 28 + 4096
    assert len(spanning_tree(topology).parent) == 512 and ring_order(topology)[:9] == tuple(range(9))


def test_more_cards_per_server_bring_more_ports(): # C56, nccl 1168: 4 servers, 4 or 8 cards with a port each: 45 and 90 GB/s
    def rate(cards):
        links = (LinkSpec(name='nvlink', shape='switch', span=cards, bytes_per_s=1e15, alpha=0.0), LinkSpec(name='ib', shape='switch', span=0, bytes_per_s=12.5e9, alpha=0.0))
        plan = build_optimal_topology(from_cluster(replace(load_cluster('dgx-h100'), servers=4, cards_per_server=cards, links=links)), 256e6)
        return 2 * 3 / 4 * 256e6 / plan.seconds['rings inside, ring between']
    assert rate(8) == pytest.approx(2 * rate(4), rel=1e-3) and 45e9 / rate(4) == pytest.approx(0.9, rel=1e-3)


# ---- probe ---------------------------------------------------------------------------------------------------------------

@given(st.integers(1, 60))
@settings(deadline=None)
def test_rounds(p):
    rounds = rounds_of_pairs(p)
    assert len(rounds) == (0 if p == 1 else p - 1 if p % 2 == 0 else p)
    assert sorted(sum(rounds, [])) == list(itertools.combinations(range(p), 2))
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)


def look(nbytes):
    table = measure_links(nbytes)
    found = from_links(table)
    return found.servers, table.alpha, table.bytes_per_s, spanning_tree(found).parent


@pytest.mark.parametrize('p', [1, 3])
def test_all_ranks_hold_the_same_table(p):
    results = run(look, 1 << 16, world_size=p, backend='gloo')
    for servers, alpha, rate, tree in results:
        assert servers == results[0][0] and tree == results[0][3] and np.array_equal(alpha, results[0][1]) and np.array_equal(rate, results[0][2])
    alpha, rate = results[0][1:3]
    off = ~np.eye(p, dtype=bool)
    assert (alpha[off] > 0).all() and (rate[off] > 0).all() and (alpha[~off] == 0).all() and np.array_equal(alpha, alpha.T)


@needs_links
@pytest.mark.parametrize('placement', ['packed', 'spread'])
def test_probe_finds_the_servers(placement):
    seats = place(2, 2, placement)
    expected = tuple(sorted(tuple(rank for rank in range(4) if seats[rank] == server) for server in range(2)))
    with ShapedCluster(2, 2, bytes_per_s=2e7) as cluster:
        results = cluster.run(look, 1 << 18, placement=placement)
    assert all(result[0] == expected for result in results)
    rate, outside = results[0][2], np.array(seats)[:, None] != seats
    assert rate[outside].max() < 1.3 * 2e7 * 4 # a burst of the shaper passes at once, the rest at its rate
    assert rate[~outside & (rate > 0)].min() > rate[outside].max()


def scan_again(before):
    found = Rescan(before, interval_s=0.0, factor=4.0, measure=partial(measure_links, 1 << 18)).poll()
    return [str(finding) for finding in found.findings], found.tree.parent


@needs_links
def test_rescan_names_a_slowed_link_on_real_ranks():
    with ShapedCluster(3, 1, bytes_per_s=2e7) as cluster:
        before = cluster.run(lambda: from_links(measure_links(1 << 18), servers=[(0,), (1,), (2,)]))[0]
        cluster.set_rate(0, 1e6) # far from what a busy machine does to the others
        results = cluster.run(scan_again, before)
    assert all(result == results[0] for result in results)
    [finding], parents = results[0]
    assert 'server 0 to all others got slower' in finding and f'parents {parents}' in finding
    assert parents.index(-1) != 0 and 0 not in parents, 'the slow server must be a leaf'


# ---- levels --------------------------------------------------------------------------------------------------------------

@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), order=st.randoms(use_true_random=False), noise=st.floats(0, 0.4), seed=st.integers(0, 99))
@settings(deadline=None)
def test_servers_are_found_whatever_the_order(sizes, order, noise, seed):
    ranks = list(range(sum(sizes)))
    order.shuffle(ranks)
    groups = tuple(sorted(tuple(sorted(ranks[sum(sizes[:k]):sum(sizes[:k + 1])])) for k in range(len(sizes))))
    server = {rank: number for number, group in enumerate(groups) for rank in group}
    same = np.array([[server[a] == server[b] for b in range(len(ranks))] for a in range(len(ranks))])
    jitter = 1 + noise * np.random.default_rng(seed).random(same.shape)
    jitter = np.maximum(jitter, jitter.T)
    found = from_links(LinkTable(np.where(same, 1e-6, 1.1e-6) * jitter, np.where(same, 2e10, 1e9) / jitter)).servers
    if max(sizes) == 1 or len(sizes) == 1: # all links alike: one server
        assert found == (tuple(range(len(ranks))),)
    else:
        assert found == groups


def test_one_slow_pair_is_not_a_level():
    table = link_table(from_cluster(with_cards(A2, 16)))
    table.bytes_per_s[0, 1] = table.bytes_per_s[1, 0] = 1e8
    table.alpha[0, 1] = table.alpha[1, 0] = 1e-3
    assert from_links(table).servers == (tuple(range(8)), tuple(range(8, 16)))


def test_levels_of_a_super_pod():
    weight = link_table(from_cluster(with_cards(load_cluster('atlas-900-a3'), 48))).seconds(4096)
    assert [sorted(set(map(len, groups))) for groups in group_levels(weight, gap=1.2)] == [[2], [16], [48]]


# ---- rings ---------------------------------------------------------------------------------------------------------------

def length(ring, seconds):
    return sum(seconds[a, b] for a, b in zip(ring, ring[1:] + ring[:1]))


@given(parts=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 2), (2, 2, 2), (3, 3), (4, 2), (3, 2, 2)]), order=st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_ring_is_the_best_where_levels_nest(parts, order):
    k = sum(parts)
    label = [number for number, size in enumerate(parts) for _ in range(size)]
    order.shuffle(label)
    seconds = np.where(np.equal.outer(label, label), 1.0, 10.0) * (1 - np.eye(k))
    ring = best_ring(seconds)
    assert sorted(ring) == list(range(k))
    assert length(ring, seconds) == min(length((0, *rest), seconds) for rest in itertools.permutations(range(1, k)))


@given(seed=st.integers(0, 1000), k=st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_ring_of_anything_is_near_the_best(seed, k):
    seconds = np.random.default_rng(seed).random((k, k)) + 0.1
    seconds = (seconds + seconds.T) * (1 - np.eye(k))
    ring = best_ring(seconds)
    best = min(length((0, *rest), seconds) for rest in itertools.permutations(range(1, k)))
    assert sorted(ring) == list(range(k)) and length(ring, seconds) <= 1.5 * best + 1e-12


def test_spread_ranks_are_put_in_server_order():
    for servers, cards in ((4, 2), (2, 8), (8, 8)):
        order, topology = ring_order(from_rank_table(dealt(servers, cards, True), A2)), from_rank_table(dealt(servers, cards, True), A2)
        server = topology.server_of[list(order)]
        assert (server != np.roll(server, 1)).sum() == servers
        assert all(sorted(ring) == list(ranks) for ring, ranks in zip(rings(topology), topology.servers))


def test_910a_ring_crosses_between_its_halves_twice():
    for cards in itertools.islice(itertools.permutations(range(8)), 0, 40320, 4001):
        topology = from_rank_table(RankTable('1.0', tuple(RankedDevice(rank, 'a', card) for rank, card in enumerate(cards))), load_cluster('atlas-800-910a'))
        [ring] = rings(topology)
        assert sum(len(route(topology, a, b)) > 2 for a, b in zip(ring, ring[1:] + ring[:1])) == 2


@given(st.integers(2, 60))
@settings(deadline=None)
def test_mesh_rings_share_no_link(n):
    made = mesh_rings(n)
    links = [frozenset(pair) for ring in made for pair in zip(ring, ring[1:] + ring[:1])]
    assert len(made) == max(1, (n - 1) // 2) and all(sorted(ring) == list(range(n)) for ring in made)
    assert n == 2 or len(set(links)) == len(links) == n * len(made)


# ---- trees ---------------------------------------------------------------------------------------------------------------

@given(seed=st.integers(0, 10**6), n=st.integers(2, 20))
@settings(deadline=None)
def test_spanning_tree_is_minimal(seed, n):
    seconds = np.random.default_rng(seed).random((n, n)) + 0.01
    seconds = (seconds + seconds.T) * (1 - np.eye(n))
    tree = module._prim(seconds, 0.0)
    expected = nx.minimum_spanning_tree(nx.from_numpy_array(seconds)).size(weight='weight')
    assert sum(seconds[edge] for edge in tree.edges) == pytest.approx(expected)


@pytest.mark.parametrize('servers', [1, 2, 3, 8, 16, 33])
def test_equal_links_give_a_binary_tree(servers):
    tree = spanning_tree(from_cluster(replace(A2, servers=servers)))
    assert max(len(tree.children(node)) for node in range(servers)) <= 2
    assert max(tree.depths) == servers.bit_length() - 1 and len(tree.edges) == servers - 1


@given(st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_double_binary_trees(n):
    for tree in double_binary_trees(n):
        assert sorted(tree.depths)[0] == 0 and max(tree.depths) == n.bit_length() - 1 and len(tree.edges) == n - 1
        assert max((len(tree.children(node)) for node in range(n)), default=0) <= 2
    inner = [{parent for parent, _ in tree.edges} for tree in double_binary_trees(n)]
    assert not inner[0] & inner[1]


def strength(capacity, use):
    "min over partitions of the capacity between parts over (parts - 1), by trying all: Nash-Williams and Tutte. Direct links only."
    k, best = len(use), np.inf
    edges = [(i, j, capacity[np.argmax(use[i, j])]) for i, j in itertools.combinations(range(k), 2) if use[i, j].any()]
    def partitions(items):
        if not items:
            yield []
            return
        first, *rest = items
        for parts in partitions(rest):
            for place, part in enumerate(parts):
                yield [*parts[:place], [first, *part], *parts[place + 1:]]
            yield [[first], *parts]
    for parts in partitions(list(range(k))):
        if len(parts) > 1:
            label = {node: number for number, part in enumerate(parts) for node in part}
            best = min(best, sum(c for i, j, c in edges if label[i] != label[j]) / (len(parts) - 1))
    return best


@given(seed=st.integers(0, 10**6), k=st.integers(2, 6))
@settings(max_examples=25, deadline=None)
def test_packing_reaches_the_bound_of_nash_williams(seed, k):
    pairs = list(itertools.combinations(range(k), 2))
    capacity, use = np.random.default_rng(seed).integers(1, 10, len(pairs)).astype(float), np.zeros((k, k, len(pairs)))
    for number, (i, j) in enumerate(pairs):
        use[i, j, number] = use[j, i, number] = 1
    trees, rates, bound = module._pack(capacity, use)
    load = sum(rate * sum(use[edge] for edge in tree) for tree, rate in zip(trees, rates))
    assert (load <= capacity * (1 + 1e-6)).all()
    assert rates.sum() == pytest.approx(bound, rel=1e-6) == pytest.approx(strength(capacity, use), rel=1e-6)


@pytest.mark.parametrize('name, cards, ranks, expected', [
    ('atlas-800t-a2', 8, None, 4 * 28e9), # full mesh: 28 links over 7 joints
    ('dgx-a100', 8, None, 8 / 14 * 300e9), # a switch: nothing beats the ring
    ('shaped-4x2', 8, range(8), 4 / 6 * 6.25e6), # four shared ports
])
def test_packing_of_fabrics(name, cards, ranks, expected):
    topology = from_cluster(with_cards(load_cluster(name), cards))
    packed = tree_packing(topology, ranks)
    assert packed.bytes_per_s == pytest.approx(expected, rel=1e-6) == pytest.approx(packed.bound, rel=1e-6)
    loads = {}
    for tree, rate in zip(packed.trees, packed.rates):
        assert sorted(tree.depths)[0] == 0 and len(tree.edges) == len(packed.ranks) - 1
        for a, b in tree.edges:
            path = route(topology, packed.ranks[a], packed.ranks[b])
            for pair in zip(path, path[1:]):
                loads[frozenset(pair)] = loads.get(frozenset(pair), 0) + rate
    assert all(load <= topology.graph.edges[tuple(pair)]['bytes_per_s'] * (1 + 1e-6) for pair, load in loads.items())


# ---- plan ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('servers, cards', [(4, 2), (2, 2), (8, 8), (3, 4)])
@pytest.mark.parametrize('spread', [False, True])
def test_a6_gain(servers, cards, spread):
    plan = build_optimal_topology(shared_port(servers, cards, spread))
    hierarchical = plan.seconds['ring in rank order'] / plan.seconds['rings inside, ring between']
    assert hierarchical == pytest.approx(hierarchy_gain(servers, cards, cards if spread else 1), rel=1e-3)
    assert plan.seconds['ring in rank order'] / plan.seconds['ring in server order'] == pytest.approx(cards if spread else 1, rel=1e-3)


def test_a6_numbers():
    assert hierarchy_gain(4, 2) == pytest.approx(1.167, abs=1e-3) and hierarchy_gain(4, 2, 2) == pytest.approx(2.333, abs=1e-3)
    assert 2582 / 1138 == pytest.approx(hierarchy_gain(4, 2, 2), rel=0.03) # measured on shaped links: dealt out, 4 MiB, 50 Mbit/s


def test_64_cards_become_8_rings_and_a_tree():
    plan = build_optimal_topology(from_cluster(with_cards(A2, 64)))
    assert [sorted(ring) for ring in plan.rings] == [list(range(8 * k, 8 * k + 8)) for k in range(8)]
    assert len(plan.tree.edges) == 7 and max(plan.tree.depths) == 3 and plan.gain > 4
    assert [kind for kind, _ in plan.groups()] == ['intra'] * 8 + ['inter'] * 8 + ['world']


def test_small_vectors_prefer_trees_and_large_ones_rings():
    topology = from_cluster(with_cards(A2, 512))
    assert 'tree' in build_optimal_topology(topology, 4096).best and 'ring between' in build_optimal_topology(topology, 1 << 30).best


def use_groups(servers, expected):
    import torch
    import torch.distributed as dist

    groups = build_groups(servers)
    mine = [ranks for kind, ranks in expected if kind == 'inter' and dist.get_rank() in ranks][0]
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=groups.intra[0])
    dist.all_reduce(total, group=groups.inter[0])
    return dist.get_process_group_ranks(groups.inter[0]) == list(mine), total.item()


def test_plan_makes_the_groups_of_the_all_reduce():
    plan = build_optimal_topology(from_rank_table(dealt(2, 2, True), A2))
    assert plan.servers == ((0, 2), (1, 3))
    assert run(use_groups, plan.servers, plan.groups(), world_size=4, backend='gloo') == [(True, 6.0)] * 4


def test_a_plan_too_large_to_draw():
    with pytest.raises(ValueError, match='at most 16 x 16'):
        plot_plan(build_optimal_topology(from_cluster(with_cards(A2, 8 * 17))))


# ---- rescan --------------------------------------------------------------------------------------------------------------

QUIET = from_links(link_table(from_cluster(with_cards(A2, 32))))


def scan_of(*topologies, **options):
    tables, now = iter([topology.measured for topology in topologies]), [0.0]
    return now, Rescan(QUIET, measure=lambda: next(tables), clock=lambda: now[0], **options)


def test_interval_comes_from_the_configuration():
    now, scan = scan_of(QUIET, QUIET)
    assert scan.interval_s == Config().topology_scan_interval_s == 60.0 # TOPOLOGY_SCAN_INTERVAL
    assert scan.poll() is None
    now[0] = 60.0
    assert scan.poll().findings == [] and scan.poll() is None
    now[0] = 120.0
    assert scan.poll() is not None


@pytest.mark.parametrize('server', range(4))
def test_a_slow_server_becomes_a_leaf(server):
    slow = slow_down(QUIET, server, 10)
    _, scan = scan_of(slow, slow)
    found = scan.scan()
    [finding] = found.findings
    assert finding.code == 'topology.degraded' and f'server {server} to all others got slower: from 25 GB/s' in finding.message and 'to 2.5 GB/s' in finding.message
    assert not found.tree.children(server) and str(found.tree.parent) in finding.fix


def test_a_busy_host_is_no_slow_link():
    _, scan = scan_of(slow_down(QUIET, 1, 10), QUIET) # slow once, not the second time
    assert scan.scan().findings == []


def test_one_pair_and_two_servers():
    table = LinkTable(QUIET.measured.alpha.copy(), QUIET.measured.bytes_per_s.copy())
    table.bytes_per_s[3, 17] = table.bytes_per_s[17, 3] = 1e9
    [finding] = degraded_links(QUIET, from_links(table, servers=QUIET.servers))
    assert finding.message == 'rank 3 to rank 17 got slower: from 25 GB/s and 1.5 us to 1 GB/s and 1.5 us.' and finding.where == 'ranks 3, 17'
    table = LinkTable(QUIET.measured.alpha.copy(), QUIET.measured.bytes_per_s.copy())
    table.bytes_per_s[:8, 8:16] = table.bytes_per_s[8:16, :8] = 1e9
    [finding] = degraded_links(QUIET, from_links(table, servers=QUIET.servers))
    assert finding.message.startswith('server 0 to server 1 got slower')


@given(noise=st.floats(0, 0.9), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_noise_below_the_factor_is_quiet(noise, seed):
    spread = 1 + noise * np.random.default_rng(seed).random((32, 32))
    table = LinkTable(QUIET.measured.alpha, QUIET.measured.bytes_per_s / np.maximum(spread, spread.T))
    assert degraded_links(QUIET, from_links(table, servers=QUIET.servers)) == []


def poll_together(before):
    import torch.distributed as dist

    ticks = itertools.count(start=1000 * dist.get_rank()) # clocks that disagree
    scan = Rescan(before, interval_s=2.0, measure=lambda: before.measured, clock=lambda: next(ticks))
    return [scan.poll() is not None for _ in range(6)]


def test_rank_0_decides_when_to_scan():
    results = run(poll_together, from_links(LinkTable(np.ones((2, 2)), np.ones((2, 2)))), world_size=2, backend='gloo')
    assert results[0] == results[1] and 0 < sum(results[0]) < 6


def test_rescan_picture():
    ax = plot_rescan(QUIET, slow_down(QUIET, 2, 10))
    assert ax.get_title(loc='left') == '1 slow: server 2 to all others'
