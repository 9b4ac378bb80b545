"""The learned policy: starts as the rule, treats paths alike, keeps out where the guard says so, repeats itself, and does not do worse than it says."""
import time
from importlib.resources import files

import numpy as np
import pytest

from hybridlab.comm.paths import (_LESSONS, AGAIN_SEEDS, METRICS, REGIMES, TEST_SEEDS, TUNING_SEEDS, FabricEnv, PathEnv, _features, _new_net, _rewards, compare_learned, evaluate, explore_training, learned,
                                  load_learned_results, load_path_training, path_net, plot_learned, plot_training, run_policy, spray, train, tuned)

RUNS = (0, 1, 2)


@pytest.fixture(scope='module')
def results():
    return load_learned_results()


# ---- the net -------------------------------------------------------------------------------------------------------------

def test_a_fresh_net_is_the_rule():
    env = FabricEnv(envs=3, delay_us=1000)
    assert run_policy(learned(_new_net(3)), env, 2).row() == pytest.approx(run_policy(tuned('soft_own', 1000), env, 2).row(), rel=1e-6)


@pytest.mark.parametrize('paths', [1, 2, 8, 13])
def test_paths_are_treated_alike(paths):
    rng, net = np.random.default_rng(paths), load_path_training().net
    x, order = rng.standard_normal((20, paths, 13), dtype=np.float32), rng.permutation(paths)
    residual, value = path_net(net, x)
    assert np.allclose(path_net(net, x[:, order])[0], residual[:, order], atol=1e-4) and np.allclose(path_net(net, x[:, order])[1], value, atol=1e-4)
    assert np.allclose(residual.sum(axis=-1), 0, atol=1e-3)


def test_torch_and_numpy_agree():
    torch = pytest.importorskip('torch')
    net, x = load_path_training(1).net, np.random.default_rng(0).standard_normal((50, 8, 13), dtype=np.float32)
    theirs = path_net({name: torch.from_numpy(value) for name, value in net.items()}, torch.from_numpy(x))
    for ours, other in zip(path_net(net, x), theirs):
        assert np.allclose(ours, other.numpy(), atol=1e-4)


def test_guard_leaves_the_rule_alone():
    env = FabricEnv(regime='near failure', envs=3)
    env.reset(1)
    act = spray().start(env)
    for _ in range(250):
        env.step(act())
    x, logits, caution = _features(env, tuned('soft_own').params)
    guarded, rule = learned().start(env)(), np.exp(logits * caution)
    weak = (env.view()[..., 4] < 0.1).any(axis=-1)
    assert weak.any() and (~weak).any()
    assert np.allclose(guarded[weak], rule[weak]) and not np.allclose(guarded[~weak], rule[~weak])
    assert np.allclose(learned(guard=2).start(env)(), rule)


def test_rewards_by_hand():
    cost, acted = np.zeros((1, 3, 2)), np.array([[[True, True], [True, False], [True, True]]])
    cost[0] = [[1, 3], [4, 9], [0, 2]] # the 9 was no action
    ahead = [0, 0, 0.1 * 1]
    ahead[1] = 0.1 * 4 + 0.9 * ahead[2]
    ahead[0] = 0.1 * 2 + 0.9 * ahead[1]
    expected = -0.5 * (cost[0] + np.array(ahead)[:, None])
    assert _rewards(cost, acted)[0] == pytest.approx(expected)


# ---- training ------------------------------------------------------------------------------------------------------------

def test_training_repeats_itself_and_learns_something():
    pytest.importorskip('torch')
    first, again = (train(5, rounds=3, envs=1) for _ in range(2))
    assert first.curve == again.curve and all(np.array_equal(first.net[name], again.net[name]) for name in first.net)
    assert np.abs(first.net['out']).max() > 0 and first.slots == 3 * 500
    more = train(5, rounds=4, envs=1, start=first)
    assert more.curve[:3] == first.curve and len(more.curve) == 4


def test_training_stops_when_told():
    pytest.importorskip('torch')
    assert len(train(1, rounds=9, envs=1, watch=lambda run: len(run.curve) >= 2).curve) == 2


def test_widget_trains_and_stops():
    pytest.importorskip('torch')
    panel = explore_training(rounds=2, envs=1)
    before, button = panel.image.value, panel.controls['train']
    button.value = True
    deadline = time.monotonic() + 120
    while button.value and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not button.value and panel.message.value == '' and panel.image.value != before


# ---- what ships ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('seed', RUNS)
def test_training_budget_is_not_above_that_of_the_rules(seed):
    run = load_path_training(seed)
    assert run.slots <= 40 * len(TUNING_SEEDS) * 12 * 500 and len(run.curve) % len(_LESSONS) == 0 and np.isfinite(run.curve).all()


def test_files_are_small():
    assert sum((files('hybridlab.data') / name).stat().st_size for name in ('paths_net.npz', 'paths_learned.csv')) < 250_000


def test_results_are_complete(results):
    count = results.groupby(['fabric', 'regime', 'delay_us', 'policy']).seed.nunique()
    again = count.index.get_level_values('regime') == 'base again'
    assert (count[~again] == len(TEST_SEEDS)).all() and (count[again] == len(AGAIN_SEEDS)).all() and not set(TEST_SEEDS) & set(AGAIN_SEEDS)
    assert len(count) == 6 * 2 * (2 + len(RUNS)) and set(results.regime) == {*REGIMES, 'larger', 'base again'}


def test_results_come_back(results):
    [again] = evaluate([learned(load_path_training(2).net)], seeds=(7004,), delays_us=(1000,)).to_dict('records')
    stored = results[(results.policy == 'learned 2') & (results.regime == 'base') & (results.delay_us == 1000) & (results.seed == 7004)]
    assert [again[metric] for metric in METRICS] == pytest.approx(stored[list(METRICS)].to_numpy()[0], rel=2e-3)


def test_bars(results):
    "What the page says: p99 at least a tenth lower in every run, F at most a tenth higher on fresh seeds, near failure not resolved as worse."
    changes = compare_learned(results).set_index(['regime', 'delay_us', 'metric'])
    for regime, delay in (('base', 1000.0), ('base again', 200.0), ('base again', 1000.0)):
        p99 = changes.loc[regime, delay, 'p99']
        assert p99.change <= -10 and p99.high < 0 and p99[['run 0', 'run 1', 'run 2']].max() < -10
    assert (changes.loc['base again'].xs('F', level='metric').high <= 10).all()
    assert (changes.xs('F', level='metric').drop('base again', level='regime').low <= 0).all()
    assert (changes.loc['near failure'].drop(['p95', 'cct_p99'], level='metric').low <= 0).all()


def test_plots(results):
    comparison = compare_learned(results)
    assert 'of 12 settings' in plot_learned(comparison).get_title('left')
    assert f'{load_path_training().slots:,} slots' in plot_training(load_path_training()).get_title('left')


def test_stable_baselines3_learns_on_the_same_environment():
    ppo = pytest.importorskip('stable_baselines3').PPO
    env = PathEnv(delay_us=1000)
    agent = ppo('MlpPolicy', env, n_steps=128, batch_size=64, n_epochs=1, device='cpu', seed=0).learn(256)
    seen, _ = env.reset(seed=1)
    action, _ = agent.predict(seen, deterministic=True)
    assert agent.num_timesteps == 256 and env.action_space.contains(action) and np.isfinite(env.step(action)[1])
