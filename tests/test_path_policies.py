"""Policies: valid weights everywhere, nothing seen that they must not see, bounds, equal budgets, and the figures that ship."""
import tomllib
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from hybridlab.comm.paths import (_NOW, METRICS, POLICIES, REGIMES, SPACE, TEST_SEEDS, TUNING_SEEDS, FabricEnv, conga, ecmp, evaluate, explore_paths,
                                  fat_tree, jsq, leaf_spine, load_path_results, omniscient, paired, plot_episode, plot_policies, pooled_env, power_of_d, rail_optimised,
                                  record_episode, run_policy, soft_own, spray, static, summarise, tune, tuned, water_filling, wcmp)

each_policy = pytest.mark.parametrize('name', list(POLICIES))
SMALL = replace(REGIMES['base'], name='small', jobs=(('ring', 8), ('moe', 6)), episode_us=4000)


def drive(policy, env, slots):
    env.reset(1)
    act, weights = policy.start(env), []
    for _ in range(slots):
        weights.append(np.array(act()))
        env.step(weights[-1])
    return weights


# ---- every policy --------------------------------------------------------------------------------------------------------

@each_policy
@pytest.mark.parametrize('fabric', [leaf_spine(), rail_optimised(), fat_tree(4)], ids=['leaf-spine', 'rails', 'fat tree'])
def test_weights_are_valid(name, fabric):
    env = FabricEnv(fabric, replace(SMALL, weak_share=(0.02, 0.1)), envs=2, delay_us=400)
    for weights in drive(tuned(name), env, 150):
        assert weights.shape == env.shape and np.isfinite(weights).all() and (weights >= 0).all()
    sends = env.state.agent['backlog'] > 0
    crosses = np.take_along_axis(env.fabric.routes[None, :, :, 0, 0].repeat(2, axis=0), env.state.agent['to'][..., None], axis=2)[..., 0] >= 0
    assert (weights.sum(axis=-1)[sends & crosses] > 0).all()


@each_policy
def test_runs_to_the_end_and_again(name):
    env = FabricEnv(regime=SMALL, envs=2)
    first, second = (run_policy(POLICIES[name](), env, 4) for _ in range(2))
    assert env.over and np.array_equal(first.hist, second.hist) and np.array_equal(first.slowdown, second.slowdown)


@each_policy
def test_says_what_it_sees(name):
    policy = POLICIES[name]()
    assert policy.name == name and policy.sees in ('nothing', 'acks', 'telemetry', 'switch', 'everything')
    assert set(policy.params) == set(SPACE.get(name, {})) and (name in SPACE) == bool(policy.params)


def blinded(env, youngest):
    "Spoils what has happened in the last `youngest` slots: queues, rates, telemetry."
    s = env.state
    for age in range(1, youngest):
        s.seen[:, (s.at[_NOW] - age) % s.seen.shape[1]] = 1e6
    s.link['length'], s.link['rate'], s.weak['loss'] = 12345, 0.1, 0
    for field in ('new', 'new_wait', 'new_peak', 'due', 'due_wait', 'due_peak'):
        s.path[field] = 1e6


@pytest.mark.parametrize('name', [name for name in POLICIES if POLICIES[name]().sees in ('nothing', 'acks', 'telemetry')])
def test_hosts_see_no_present_queue(name):
    weights = []
    for spoil in (False, True):
        env = FabricEnv(envs=2, delay_us=300)
        env.reset(2)
        act = tuned(name).start(env)
        for _ in range(100):
            env.step(act())
        if spoil:
            blinded(env, env.delay)
        weights.append(np.array(act()))
    assert np.array_equal(*weights), 'the policy looks at what a host cannot know yet'


@pytest.mark.parametrize('name', [name for name in POLICIES if POLICIES[name]().sees in ('nothing', 'acks')])
def test_delay_does_not_matter_without_telemetry(name):
    rows = [run_policy(tuned(name), FabricEnv(regime=SMALL, envs=2, delay_us=delay), 3).row() for delay in (200, 1000)]
    assert rows[0] == rows[1]


# ---- single policies -----------------------------------------------------------------------------------------------------

def test_static_ecmp_spray():
    env = FabricEnv(envs=2)
    assert (np.sort(drive(static(), env, 3)[-1], axis=-1)[..., -1] == 1).all()
    weights = drive(ecmp(), env, 40)
    ring = env.state.job['moe'][np.arange(2)[:, None], env.state.agent['job']] == 0
    started = env.state.agent['to'] >= 0
    assert np.allclose(weights[-1].sum(axis=-1), 1) and np.allclose(weights[-1] * 8, np.round(weights[-1] * 8))
    assert np.array_equal(weights[-1][ring & started], drive(ecmp(), env, 40)[-1][ring & started])
    assert np.ptp(drive(spray(), env, 1)[0]) == 0


def test_shortest_queue_by_definition():
    env = FabricEnv(envs=2)
    drive(spray(), env, 200)
    view = env.view()
    wait = view[..., 0] + view[..., 1]
    chosen = jsq().start(env)().argmax(axis=-1)
    assert np.take_along_axis(wait, chosen[..., None], axis=-1)[..., 0] == pytest.approx(wait.min(axis=-1), abs=1e-5)
    every = power_of_d(8, 0).start(env)()
    assert ((every > 0) <= (wait <= wait.min(axis=-1, keepdims=True) + 1e-5)).all()
    assert np.array_equal(wcmp().start(env)(), view[..., 4])


def test_water_filling_levels():
    env = FabricEnv(envs=3)
    drive(spray(), env, 250)
    view, ahead = env.view(), 3.0
    rate = view[..., 4] * env.fabric.capacity[0]
    fill = water_filling(own=0, ahead=ahead).start(env)()
    level = fill / rate + view[..., 0] + view[..., 1]
    used = fill > 1e-6 * env.fabric.server_rate
    assert fill.sum(axis=-1) == pytest.approx(np.full(env.shape[:2], ahead * env.fabric.server_rate), rel=1e-4)
    top = np.where(used, level, 0).max(axis=-1, keepdims=True)
    assert np.where(used, np.abs(level - top), 0).max() < 1e-3 and (np.where(used, np.inf, level) >= top - 1e-3).all()


@pytest.mark.parametrize('late', [0.0, 2.5])
def test_soft_own_by_definition(late):
    env = FabricEnv(envs=8, delay_us=600)
    drive(spray(), env, 200)
    view, path = env.view().astype(float), env.state.path
    cost = 0.3 * (view[..., 0] + view[..., 1]) + 0.2 * path['flying'] / env.fabric.capacity[0] + 0.5 * path['ack']
    job = np.take_along_axis(env.state.job, np.maximum(env.state.agent['job'], 0), axis=1)
    left = np.clip(job['begin'] + job['busy'] - 200, 0, 20) # slots
    assert (left == 0).any() and ((left > 0) & (left < 20)).any() and (left == 20).any()
    expected = (view[..., 4] * np.exp(-cost)) ** (1 + late * (1 - left / 20))[..., None]
    weights = soft_own(0.3, 0.2, 0.5, late).start(env)()
    assert weights / weights.sum(axis=-1, keepdims=True) == pytest.approx(expected / expected.sum(axis=-1, keepdims=True), abs=1e-6)


def test_caution_spares_the_last_chunks():
    "With a weak link in every episode, collectives that end with a sharper choice are more alike."
    def fluctuation(late):
        return np.mean([run_policy(soft_own(late=late), FabricEnv(), seed).fluctuation for seed in (1, 2, 3)])
    assert fluctuation(3) < 0.9 * fluctuation(0)


@pytest.mark.parametrize('regime', ['base', 'light', 'one job'])
def test_omniscient_meets_the_pooled_bound(regime):
    f = {kind: np.mean([run_policy(policy, env, seed).fluctuation for seed in (1, 2)]) for kind, policy, env in (
        ('omniscient', omniscient(), FabricEnv(regime=regime)), ('pooled', spray(), pooled_env(regime=regime)))}
    assert abs(f['omniscient'] - f['pooled']) < 0.005


def test_pooled_bound_has_the_same_traffic():
    env, pool = FabricEnv(envs=3), pooled_env(envs=3)
    env.reset(9), pool.reset(9)
    assert pool.fabric.capacity.sum() == pytest.approx(env.fabric.capacity.sum()) and pool.fabric.paths == 1
    results = run_policy(omniscient(), env, 9), run_policy(spray(), pool, 9)
    assert np.array_equal(env.state.total['counted'], pool.state.total['counted']) # background flows pause at their window, so theirs may differ
    assert results[1].slowdown.mean() <= results[0].slowdown.mean() + 1e-3 and results[1].latency_us(0.95) <= results[0].latency_us(0.95)


# ---- tuning and evaluation -----------------------------------------------------------------------------------------------

def test_tune_is_fair_and_repeatable():
    options = dict(trials=6, seeds=(1,), envs=2, regime=SMALL)
    tables = {name: tune(name, **options) for name in ('soft_own', 'reps')}
    for name, table in tables.items():
        assert table.slots.max() == 6 * 2 * 200 and table.score.is_monotonic_increasing
        for key, (low, high) in SPACE[name].items():
            assert table[key].between(low * 0.999, high * 1.001).all()
        first = table[table.slots == table.slots.min()].iloc[0]
        assert {key: first[key] for key in SPACE[name]} == pytest.approx(POLICIES[name]().params)
    pd.testing.assert_frame_equal(tables['reps'], tune('reps', **options))
    with pytest.raises(ValueError, match='valid here: power_of_d'):
        tune('ecmp')


def test_tuned_settings_are_inside_their_box():
    known = tomllib.loads((files('hybridlab.data') / 'paths_tuned.toml').read_text(encoding='utf-8'))
    assert set(known) == {'delay_200_us', 'delay_1000_us'} and set(known['delay_200_us']) == set(SPACE)
    assert set(known['delay_1000_us']) == {name for name in SPACE if POLICIES[name]().sees == 'telemetry'}
    for table in known.values():
        for name, params in table.items():
            assert all(SPACE[name][key][0] * 0.999 <= value <= SPACE[name][key][1] * 1.001 for key, value in params.items()) and set(params) == set(SPACE[name])
    assert tuned('water_filling', 1000).params == known['delay_1000_us']['water_filling'] != tuned('water_filling', 300).params
    with pytest.raises(ValueError, match='valid here: static, ecmp'):
        tuned('ospf')


def test_no_seed_is_in_tuning_and_test():
    assert not set(TUNING_SEEDS) & set(TEST_SEEDS) and len(TEST_SEEDS) >= 10


def test_summary_and_pairs():
    rng = np.random.default_rng(0)
    rows = [{'policy': name, 'fabric': 'x', 'regime': 'base', 'delay_us': 200.0, 'seed': seed} | {metric: scale * (1 + seed / 10) for metric in METRICS}
            for name, scale in (('a', 1.0), ('b', 0.8)) for seed in range(10)]
    table = pd.DataFrame(rows)
    table.loc[table.policy == 'a', 'F'] = noise = rng.random(10) + 1
    row = summarise(table).loc[('x', 'base', 200.0, 'a')]
    low, high = stats.t.interval(0.95, 9, noise.mean(), stats.sem(noise))
    assert row.F - row['± F'] == pytest.approx(low) and row.F + row['± F'] == pytest.approx(high)
    change = paired(table, 'b', 'a')
    assert change.loc['p99'].to_list() == pytest.approx([-20, -20, -20])
    there, back = (paired(table, *names).loc['F'] / 100 + 1 for names in (('b', 'a'), ('a', 'b')))
    assert [there.change * back.change, there.low * back.high, there.high * back.low] == pytest.approx([1, 1, 1]) # the same seen from the other side
    with pytest.raises(ValueError, match='same two or more seeds'):
        paired(table[table.seed == 0], 'a', 'b')


def test_evaluate_pairs_seeds_and_reuses_what_the_delay_cannot_change():
    table = evaluate([ecmp(), soft_own()], [SMALL], seeds=(1, 2), envs=2)
    assert len(table) == 8 and not table.duplicated(['policy', 'delay_us', 'seed']).any()
    one = table[table.policy == 'ecmp'].set_index(['delay_us', 'seed'])[list(METRICS)]
    assert (one.loc[200].to_numpy() == one.loc[1000].to_numpy()).all()
    soft = table[table.policy == 'soft_own'].set_index(['delay_us', 'seed']).F
    assert soft[200, 1] != soft[1000, 1]


# ---- the figures that ship -----------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def results():
    return load_path_results()


def test_results_are_complete(results):
    count = results.groupby(['fabric', 'regime', 'delay_us', 'policy']).seed.nunique()
    assert (count == 10).all() and set(results.seed) == set(TEST_SEEDS)
    assert set(results.policy) == set(POLICIES) and set(results.regime) == {*REGIMES, 'larger'} and results.fabric.nunique() == 2
    base = count.xs('base', level='regime')
    assert len(base) == len(POLICIES) * 2 and len(count) == len(base) + 4 * 2 * results[results.regime == 'light'].policy.nunique()


def test_results_come_back(results):
    again = evaluate(lambda delay: [tuned('soft_own', delay), tuned('reps')], seeds=(7003,))
    for row in again.to_dict('records'):
        stored = results[(results.regime == 'base') & (results.fabric == row['fabric']) & (results[['policy', 'delay_us', 'seed']] == [row['policy'], row['delay_us'], row['seed']]).all(axis=1)]
        assert stored[list(METRICS)].to_numpy()[0] == pytest.approx([row[metric] for metric in METRICS], rel=1e-3)


def test_bars(results):
    base = summarise(results[results.regime == 'base']).droplevel(['fabric', 'regime']).F
    assert 0.40 <= base[200.0, 'ecmp'] <= 0.65
    assert base[200.0, 'soft_own'] <= 0.05 and base[1000.0, 'soft_own'] <= 0.12
    assert all(base[delay, 'soft_own'] < 0.7 * base[delay].drop(['soft_own', 'omniscient']).min() for delay in (200.0, 1000.0))
    assert (base.groupby('delay_us').idxmin() == [(200.0, 'omniscient'), (1000.0, 'omniscient')]).all()


def test_plots_and_widget(results):
    assert 'without learning' in plot_policies(summarise(results[results.regime == 'base'])).get_title('left')
    episode = record_episode(conga(), FabricEnv(regime=SMALL, envs=1))
    assert episode.wait_us.shape[1] == 128 and 'conga: F' in plot_episode(episode).get_title('left')
    widget = explore_paths()
    widget.controls['policy'].value = 'ecmp'
    assert widget.message.value == '' and widget.image.value[:4] == b'\x89PNG'
