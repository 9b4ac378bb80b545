"""The fabric: nothing lost, nothing halved, nothing known too early; queues equal to a slow simulation and to the fluid limit."""
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridlab.comm.paths import (CHUNK_BYTES, FEATURES, SLOT_US, FabricEnv, PathEnv, PathResult, Regime, fabric_of, fat_tree, leaf_spine, observe, plot_fabric,
                                  rail_optimised, run_episodes)
from hybridlab.spec.cluster import load_cluster

FABRICS = {'leaf-spine': leaf_spine(), 'oversubscribed': leaf_spine(4, 8, 4), 'rails': rail_optimised(), 'fat tree': fat_tree(4)}
each_fabric = pytest.mark.parametrize('fabric', FABRICS.values(), ids=FABRICS)
SMALL = Regime('small', jobs=(('ring', 8), ('moe', 6)), flows=4, episode_us=6000)
QUIET = Regime('quiet', jobs=(('ring', 16),), flows=0, weak_links=0, period_us=(4000, 4000), episode_us=4000)
ENDLESS = 1 << 40 # buffer


def random_weights(env, seed, spread=0.3):
    rng = np.random.default_rng(seed)
    return lambda: rng.dirichlet(np.full(env.fabric.paths, spread), env.shape[:2])


def at_once(env):
    "Lets all jobs start in the first slot."
    env.state.job['again'] = 0
    return env


# ---- fabrics -------------------------------------------------------------------------------------------------------------

@each_fabric
def test_routes(fabric):
    routes = fabric.routes
    assert (routes[np.arange(fabric.servers), np.arange(fabric.servers)] == -1).all()
    ended = routes == -1
    assert (ended[..., 1:] >= ended[..., :-1]).all(), 'a path goes on after its end'
    later = np.diff(routes, axis=-1)[~ended[..., 1:]]
    assert (later > 0).all(), 'links are served in the order of their numbers, so a path must climb'
    assert set(routes[~ended]) == set(range(len(fabric.capacity))), 'a link on no path'
    assert (fabric.capacity > 0).all() and fabric.up[1] == fabric.down[0]


@each_fabric
def test_up_and_down_are_apart(fabric):
    for i, j in ((0, fabric.servers - 1), (fabric.servers - 1, 0)):
        up, down = fabric.routes[i, j, :, 0], fabric.routes[i, j, :, -1]
        assert not set(up) & set(down)
        assert not set(fabric.routes[j, i].ravel()) & set(fabric.routes[i, j].ravel()), 'two directions share a link'


@given(st.integers(2, 9), st.integers(1, 5), st.integers(1, 9))
def test_leaf_spine_paths_are_disjoint(leaves, servers, spines):
    fabric = leaf_spine(leaves, servers, spines)
    assert (fabric.servers, fabric.paths, len(fabric.capacity)) == (leaves * servers, spines, 2 * leaves * spines)
    links = fabric.routes[0, fabric.servers - 1]
    assert len(np.unique(links)) == links.size == 2 * spines


def test_default_fabric_is_the_256_cards_of_the_notes():
    fabric = leaf_spine()
    assert fabric.servers * 8 == 256 and fabric.paths == 8
    assert fabric.capacity[0] == pytest.approx(100e9 * 20e-6 / 131072) and fabric.server_rate == pytest.approx(2 * fabric.capacity[0])
    assert 4 * fabric.server_rate == pytest.approx(8 * fabric.capacity[0]) # not oversubscribed


@pytest.mark.parametrize('k, servers, paths', [(4, 16, 4), (6, 54, 9), (8, 128, 16)])
def test_fat_tree_sizes(k, servers, paths):
    fabric = fat_tree(k)
    assert (fabric.servers, fabric.paths, len(fabric.capacity)) == (servers, paths, 4 * servers)
    assert (fabric.routes[0, 1] == -1).all() == (k // 2 > 1)


def test_rails_of_a_pod_need_no_spine():
    fabric = rail_optimised(2, 3, 4, 2)
    assert (fabric.routes[0, 1, :, 2:] == -1).all() and (fabric.routes[0, 3] >= 0).all()
    assert len(np.unique(fabric.routes[0, 1, :, 0])) == 4 and fabric.capacity[:24].sum() == pytest.approx(6 * fabric.server_rate)


# ---- validity ------------------------------------------------------------------------------------------------------------

CASES = [('endless', ENDLESS, 0, 16384), ('tight', 31, 0, 16384), ('window', 512, 150, 16384), ('few batches', 512, 0, 300), ('all at once', 40, 90, 400)]


@each_fabric
@pytest.mark.parametrize('buffer, window, pool', [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_mass_balance_and_causality(fabric, buffer, window, pool):
    regime = replace(SMALL, weak_links=2, weak_share=(0.05, 0.3))
    env = FabricEnv(fabric, regime, envs=2, window=window, buffer=max(buffer, int(fabric.server_rate) + 1), pool=pool)
    env.reset(3)
    inner = np.unique(fabric.routes[..., 1:])[1:] # links behind others: their buffers are finite, and a full one pauses the link before

    def balance():
        s = env.state
        on_links = s.link['length'].sum(axis=1)
        assert (s.total['made'] - s.total['arrived'] == on_links).all(), 'chunks vanished or appeared'
        assert (s.link['length'] >= 0).all() and (s.link['length'][:, inner] <= env.buffer).all()
        assert (s.path['flying'] >= 0).all() and (s.path['recent'] >= 0).all() and (s.agent['backlog'] >= 0).all()
        if window:
            assert (s.path['flying'].sum(axis=-1) <= window).all()

    result = run_episodes(env, random_weights(env, 4), balance)
    assert env.over and not env.state.round['left'].any() and (env.state.round['left'] == 0).all()
    assert result.hist.sum() == env.state.total['counted'].sum() > 0
    assert env.state.total['margin'].min() >= 0, 'an acknowledgement was visible before its chunk can have arrived'
    assert result.slowdown.min() >= 1 - 1e-9


def test_chunks_are_whole_and_unbiased():
    env = at_once(FabricEnv(regime=QUIET, envs=4, buffer=ENDLESS))
    weights = np.random.default_rng(0).dirichlet(np.ones(8), env.shape[:2])
    sent, wanted = np.zeros(env.shape), np.zeros(env.shape[:2])
    env.step(weights)
    for _ in range(80):
        crosses = env.fabric.routes[np.arange(32), env.state.agent['to'], 0, 0] >= 0
        want = env.state.agent['backlog'] * crosses
        env.step(weights)
        now = env.state.sent[:, (env.state.at[0] - 1) % env.state.sent.shape[1]]
        assert (now.sum(axis=-1) == want).all() and (np.abs(now - want[..., None] * weights) < 1 + 1e-3).all()
        sent, wanted = sent + now, wanted + want
    busy = wanted > 0
    error = (sent - wanted[..., None] * weights)[busy] / 80
    assert abs(error.mean()) < 1e-9 and np.abs(error).max() < 0.2 # standard deviation of a mean of 80 roundings: 0.05


def test_first_acknowledgement_is_two_slots_old():
    env = at_once(FabricEnv(regime=QUIET, envs=1))
    env.step(np.ones(env.shape)) # the jobs start
    heard = []
    for _ in range(4):
        env.step(np.ones(env.shape))
        heard.append(env.state.path['last'].sum())
    assert heard[0] == 0 and heard[1] > 0 # sent in slot 1, known at the start of slot 3


def test_telemetry_is_as_old_as_it_says():
    env, even = FabricEnv(envs=2, delay_us=500), np.ones((2, 32, 8))
    env.reset(5)
    fresh = []
    for _ in range(120):
        env.step(even)
        view, to = env.view(1), env.state.agent['to'].copy()
        fresh.append((view, to))
    then, to = fresh[-env.delay]
    same = to == env.state.agent['to'] # the peer of a moe job has changed since
    assert same.any() and np.array_equal(env.view()[same], then[same])
    wait = env.state.link['length'] / env.state.link['rate']
    rows = env.fabric.routes[np.arange(32), env.state.agent['to'][0]]
    expected = np.where(rows[..., 0] >= 0, np.minimum(wait[0], 512 / env.state.link['rate'][0])[rows[..., 0]], 0)
    assert env.view(1)[0, ..., 0] == pytest.approx(expected, rel=1e-5)


def test_same_seed_same_numbers():
    def ends(envs):
        env = FabricEnv(regime='near failure', envs=envs)
        env.reset(11)
        rng = np.random.default_rng(0)
        run_episodes(env, lambda: rng.random((8, 32, 8))[:envs])
        return env.state.round, env.state.hist
    first, second, fewer = ends(4), ends(4), ends(2)
    assert np.array_equal(first[0], second[0]) and np.array_equal(first[1], second[1])
    assert np.array_equal(first[0][:2], fewer[0]) and np.array_equal(first[1][:2], fewer[1])


# ---- slow simulation and fluid limit -------------------------------------------------------------------------------------

def slow_slot(queues, credit, rate, fabric, entries):
    "One slot, chunk by chunk, from the definition. Queues hold the rest of each chunk's links; returns how many arrived."
    for links in entries:
        queues[links[0]].append(links[1:])
    arrived = 0
    for link, queue in enumerate(queues):
        credit[link] += rate[link]
        while queue and credit[link] >= 1:
            rest = queue.popleft()
            credit[link] -= 1
            if rest:
                queues[rest[0]].append(rest[1:])
            else:
                arrived += 1
        credit[link] = min(credit[link], 1) if queue else 0
    return arrived


@each_fabric
def test_equal_to_a_slow_simulation(fabric):
    env = FabricEnv(fabric, replace(SMALL, flows=0), envs=1, buffer=ENDLESS)
    env.reset(2)
    rng = np.random.default_rng(1)
    queues, credit, total = [deque() for _ in fabric.capacity], np.zeros(len(fabric.capacity)), 0
    for now in range(250):
        agent, path, entries = env.state.agent[0].copy(), rng.integers(fabric.paths, size=fabric.servers), []
        for i in ((turned + now) % fabric.servers for turned in range(fabric.servers)):
            links = tuple(int(link) for link in fabric.routes[i, agent['to'][i], path[i]] if link >= 0)
            entries += [links] * int(agent['backlog'][i]) if links else []
            total += 0 if links else int(agent['backlog'][i])
        env.step(np.eye(fabric.paths)[path][None])
        total += slow_slot(queues, credit, env.state.link['rate'][0], fabric, entries)
        assert [len(queue) for queue in queues] == env.state.link['length'][0].tolist()
        assert env.state.total['arrived'][0] == total


def test_fluid_limit():
    "Ring over 32 servers, all on path 0: slowdown = bytes over capacity of the fullest link."
    env = at_once(FabricEnv(regime=replace(QUIET, jobs=(('ring', 32),)), envs=5, buffer=ENDLESS))
    one_path = np.zeros(env.shape)
    one_path[..., 0] = 1
    result, predicted = run_episodes(env, lambda: one_path), []
    for job, members in zip(env.state.job[:, 0], env.state.members[:, 0]):
        links = env.fabric.routes[members, np.roll(members, -1), 0]
        predicted.append(max(1.0, np.bincount(links[links >= 0]).max() * job['rate'] / env.fabric.capacity[0]))
    assert max(predicted) > 2 and result.slowdown == pytest.approx(predicted, rel=0.01)


def test_fluid_limit_against_the_flow_simulator():
    "The same ring on one spine: last byte of fluid max-min flows against last chunk of FIFO queues."
    network = pytest.importorskip('hybridlab.comm.network', reason='the flow simulator is not there')
    fabric = leaf_spine(8, 4, 1, server_gb_s=100, link_gb_s=150)
    env = at_once(FabricEnv(fabric, replace(QUIET, jobs=(('ring', 32),), load=(1, 1)), envs=5, buffer=ENDLESS))
    run_episodes(env, lambda: np.ones(env.shape))
    clos = network.leaf_spine_network(8, 4, 1, 100e9, 150e9)
    for job, members, turn in zip(env.state.job[:, 0], env.state.members[:, 0], env.state.round[:, 0, 0]):
        nbytes = np.floor(job['rate'] * job['busy']) * CHUNK_BYTES
        ends = network.simulate_flows(clos, network.make_flows(members, np.roll(members, -1), nbytes))
        assert (turn['end'] - turn['begin']) * SLOT_US * 1e-6 == pytest.approx(ends.max(), rel=0.02)


def test_overload_grows_as_arithmetic_says():
    "A link fed with a > c chunks per slot for D slots: waits rise evenly from 0 to D (a / c - 1)."
    fabric = leaf_spine(2, 1, 1, server_gb_s=200, link_gb_s=100)
    env = at_once(FabricEnv(fabric, Regime('pair', jobs=(('ring', 2),), flows=0, weak_links=0, period_us=(4000, 4000), duty=(0.5, 0.5), load=(0.9, 0.9), episode_us=4000),
                            envs=1, buffer=ENDLESS))
    result = run_episodes(env, lambda: np.ones(env.shape))
    a, c, busy = env.state.job['rate'][0, 0], fabric.capacity[0], env.state.job['busy'][0, 0]
    for q in (0.25, 0.5, 0.9):
        assert result.latency_us(q) == pytest.approx(10 + 20 * q * busy * (a / c - 1), rel=0.03)


def test_underload_waits_for_nothing():
    fabric = leaf_spine(2, 1, 4)
    env = at_once(FabricEnv(fabric, Regime('pair', jobs=(('ring', 2),), flows=0, weak_links=0, period_us=(4000, 4000), episode_us=4000), envs=3))
    result = run_episodes(env, lambda: np.ones(env.shape))
    assert result.latency_us(0.99) < 11.0 and result.fluctuation < 0.002 and result.slowdown.max() < 1.01


def test_closed_loop_waits_for_the_collective():
    env = at_once(FabricEnv(regime=replace(SMALL, episode_us=9000), envs=2, window=60))
    run_episodes(env, random_weights(env, 1))
    job, rounds = env.state.job[..., None], env.state.round
    for one, turns in zip(env.state.job.ravel(), rounds.reshape(-1, rounds.shape[-1])):
        done = turns[:one['round'] + 1]
        assert (done['begin'][1:] >= done['end'][:-1] + one['period'] - one['busy'] - 1).all()
    assert job['round'].max() >= 1


# ---- results and errors --------------------------------------------------------------------------------------------------

@given(st.lists(st.floats(0, 5000), min_size=30, max_size=300), st.floats(0.05, 0.99))
@settings(max_examples=50)
def test_latency_quantiles_are_within_a_bin(waits, q):
    from hybridlab.comm.paths import _BINS, _bin
    hist = np.bincount([_bin(wait) for wait in waits], minlength=_BINS)
    exact = np.quantile([10 + SLOT_US * wait for wait in waits], q, method='inverted_cdf')
    assert PathResult(hist, np.ones(2)).latency_us(q) == pytest.approx(exact, rel=0.033)


def test_fluctuation():
    result = PathResult(np.ones(1024, np.int64), np.array([1.0, 3.0]))
    assert result.fluctuation == 0.5 and set(result.row()) == {'p50', 'p95', 'p99', 'cct_mean', 'cct_p99', 'F'}


@pytest.mark.parametrize('options, words', [
    ({'regime': 'busy'}, "valid here: base, light"), ({'fabric': leaf_spine(2, 2, 2)}, 'need 32 servers'), ({'buffer': 8}, 'at least what a server sends in a slot, 31')])
def test_errors(options, words):
    with pytest.raises(ValueError, match=words):
        FabricEnv(**options)
    with pytest.raises(ValueError, match='12, 32, 8'):
        FabricEnv().step(np.ones((12, 32)))


# ---- one server ----------------------------------------------------------------------------------------------------------

@each_fabric
def test_gymnasium_checker(fabric):
    checker = pytest.importorskip('gymnasium.utils.env_checker')
    checker.check_env(PathEnv(fabric=fabric, regime=SMALL), skip_render_check=True)


def test_path_env():
    pytest.importorskip('gymnasium')
    env = PathEnv(delay_us=1000)
    seen, _ = env.reset(seed=1)
    assert seen.shape == (8, len(FEATURES)) and env.action_space.shape == (8,)
    steps, ended, rewards = 0, False, []
    while not ended:
        seen, reward, terminated, ended, _ = env.step(np.zeros(8))
        steps, rewards = steps + 1, [*rewards, reward]
        assert not terminated and np.isfinite(seen).all() and (seen >= 0).all()
    assert steps == 500 and max(rewards) <= 0 and min(rewards) < 0


def test_observation_has_the_features_of_the_state():
    env = FabricEnv(envs=2)
    env.reset(1)
    for _ in range(150):
        env.step(np.ones(env.shape))
    seen = dict(zip(FEATURES, np.moveaxis(observe(env), -1, 0)))
    assert seen['own in flight'] == pytest.approx(env.state.path['flying'] / env.fabric.server_rate)
    assert np.array_equal(seen['queue up'], env.view()[..., 0]) and (seen['phase'] <= 1).all() and (seen['capacity'] > 0).all()


def test_plot_fabric():
    wait = np.zeros(128)
    wait[[3, 70]] = 500, 150
    ax = plot_fabric(leaf_spine(), wait)
    assert '2 of 128 links' in ax.get_title('left') and '500 us' in ax.get_title('left')


def test_a_cluster_on_leaves_and_spines():
    cluster = load_cluster('atlas-800t-a2')
    fabric, crowded = (fabric_of(replace(cluster, links=(*cluster.links[:-1], replace(cluster.links[-1], oversubscription=over)))) for over in (1.0, 2.0))
    assert fabric.servers == cluster.servers == 16 and fabric.paths == 8
    assert fabric.server_rate == leaf_spine().server_rate and fabric.capacity[0] == leaf_spine().capacity[0] == 2 * crowded.capacity[0]
    with pytest.raises(ValueError, match='16 servers of atlas-800t-a2 with 16 to a leaf; give a divisor that leaves two leaves or more'):
        fabric_of(cluster, 16)


def test_a_cluster_runs_with_jobs_of_its_size():
    env = FabricEnv(fabric_of(load_cluster('atlas-800t-a2')), Regime('mine', jobs=(('ring', 8), ('moe', 8))), envs=2)
    env.reset(0)
    result = run_episodes(env, lambda: np.ones(env.shape))
    assert 0 < result.fluctuation < 1
