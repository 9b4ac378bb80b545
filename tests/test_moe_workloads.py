"""Workloads, imbalance metrics and the capacity factor: published cases, the closed form, and the widgets."""
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridlab.moe.routing import CAPACITY_RULES, CURES, WORKLOADS, balance_curve, capacity, capacity_table, explore_balance, explore_capacity, explore_workload, \
    imbalance, layer_percentiles, padding_cost, plot_capacity, route, skewed_counts, workload


def chosen(made, k):
    return route(torch.from_numpy(made.logits), k)


# ---- workloads -------------------------------------------------------------------------------------------------------------

@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(WORKLOADS)), st.integers(1, 4), st.integers(1, 6), st.integers(0, 200), st.integers(0, 9), st.integers(0, 9), st.data())
def test_every_row_has_k_distinct_experts(name, ranks, size, more, seed, step, data):
    experts, tokens = ranks * size, ranks + more
    k = data.draw(st.integers(1, experts))
    made = workload(name, tokens, experts, k, ranks, seed, step)
    assert made.logits.shape == (tokens, experts) and made.logits.dtype == np.float32
    assert len(made.sources) == ranks and made.sources.sum() == tokens and made.sources.min() >= 1
    assert np.array_equal(np.concatenate([made.of_rank(rank) for rank in range(ranks)]), made.logits)
    assert all(len(set(row)) == k for row in chosen(made, k).expert.tolist())
    assert np.array_equal(workload(name, tokens, experts, k, ranks, seed, step).logits, made.logits)


@pytest.mark.parametrize('name', WORKLOADS)
def test_seed_and_step_draw_anew(name):
    made = [workload(name, seed=seed, step=step).logits for seed, step in ((0, 0), (1, 0), (0, 1))]
    assert not np.array_equal(made[0], made[1]) and not np.array_equal(made[0], made[2])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(1, 12), st.integers(0, 5), st.data())
def test_balanced_is_even_to_one(tokens, experts, seed, data):
    k = data.draw(st.integers(1, experts))
    assert np.ptp(chosen(workload('balanced', tokens, experts, k, 1, seed), k).counts.numpy()) <= 1


def test_each_kind_is_what_it_says():
    load = {name: imbalance(chosen(workload(name, step=3), 8).counts, ep=8) for name in WORKLOADS}
    assert load['balanced'].max_over_mean == 1 and load['burst'].max_over_mean > 3
    assert load['hot-expert'].max_over_mean > 2 * load['hot-expert'].rank_max_over_mean > 2.5
    assert load['hot-rank'].rank_max_over_mean > 3 and load['rotating'].rank_max_over_mean > 3
    assert load['spread-hot'].max_over_mean > 3 > 1.1 > load['spread-hot'].rank_max_over_mean
    assert load['zero-load'].idle_ranks == 4 and load['zero-load'].idle_experts == 32
    assert workload('ragged-sources').sources.max() > 2 * workload('ragged-sources').sources.mean()
    assert all(imbalance(chosen(workload('burst', step=step), 8).counts).max_over_mean == 1 for step in (0, 1, 2, 4))


@pytest.mark.parametrize('arguments', [dict(experts=10), dict(tokens=3), dict(k=65), dict(k=0), dict(ranks=0)])
def test_wrong_sizes(arguments):
    with pytest.raises(ValueError, match='ranks must divide'):
        workload('balanced', **arguments)


# ---- metrics ---------------------------------------------------------------------------------------------------------------

counts_of = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(counts_of, st.integers(0, 800))
def test_metrics_against_their_definitions(counts, limit):
    n, result = np.array(counts), imbalance(counts, capacity=limit)
    E, total = len(n), n.sum()
    assert result.idle_experts == (n == 0).sum()
    if not total:
        assert (result.max_over_mean, result.cv, result.gini, result.entropy, result.drop_rate) == (1, 0, 0, 1, 0)
        return
    assert result.drop_rate == pytest.approx(np.maximum(n - limit, 0).sum() / total)
    assert result.max_over_mean == pytest.approx(E * n.max() / total) and 1 - 1e-12 <= result.max_over_mean <= E
    assert result.gini == pytest.approx(np.abs(n[:, None] - n).sum() / (2 * E * total))
    assert result.cv == pytest.approx(n.std() / n.mean()) and -1e-9 <= result.entropy <= 1 + 1e-9
    if limit:
        assert result.padding_waste == pytest.approx(np.maximum(limit - n, 0).sum() / (E * limit))


def test_ranks_are_summed_before_they_are_compared():
    assert imbalance([4, 0, 2, 2], ep=2).rank_max_over_mean == 1.0 and imbalance([4, 0, 2, 2]).max_over_mean == 2.0
    assert imbalance(torch.tensor([3, 3, 0, 0]), ep=2).idle_ranks == 1


@pytest.mark.parametrize('counts', [[], [[1, 2]], [-1, 2], [float('nan')]])
def test_wrong_counts(counts):
    with pytest.raises(ValueError, match='counts of shape'):
        imbalance(counts)


def test_percentiles_over_layers():
    layers = np.array([[5, 5]] * 19 + [[10, 0]])
    spread = layer_percentiles(layers, ep=2).loc['max_over_mean']
    assert spread.p50 == spread.p90 == 1.0 and spread['max'] == 2.0 and spread['mean'] == pytest.approx(1.05)


# ---- cases from users ------------------------------------------------------------------------------------------------------

def test_c51_scattermoe_10():
    "A 4 % imbalance cannot explain a balanced run that is 2 to 3 % slower."
    counts = [628, 649, 658, 630, 668, 652, 634, 601]
    assert sum(counts) == 5120 and capacity(5120, 8, 1, 1.0) == 640 and capacity(5120, 8, 1, 1.25) == 800
    tight, loose = imbalance(counts, capacity=640), imbalance(counts, capacity=800)
    assert tight.max_over_mean == pytest.approx(1.044, abs=5e-4)
    assert round(tight.drop_rate * 5120) == 67 and tight.drop_rate == pytest.approx(0.0131, abs=5e-5)
    assert loose.drop_rate == 0 and round(loose.padding_waste * 6400) == 1280 and loose.padding_waste == pytest.approx(0.2)


@pytest.mark.parametrize('cost, share', [(0.08, 0.35), (0.11, 0.49)])
def test_c52_marin_4017(cost, share):
    "What a factor of 1.25 costs tells the share of the experts in the step."
    assert padding_cost(share, 1.25) == pytest.approx(cost, abs=2e-3) and padding_cost(1.0, 1.25) == pytest.approx(0.2)
    assert padding_cost(0.4, 1.0) == 0 and padding_cost(0.4, 0.8) < 0


def test_c54_afd_plugin_156():
    "Each source looks even over the experts it uses; only the sum shows that half of the ranks are idle."
    one = (np.arange(256) < 128).astype(int)
    result = imbalance(sum([one] * 64), ep=64)
    assert one.max() == 1
    assert (result.idle_ranks, 256 - result.idle_experts, result.rank_max_over_mean, result.max_over_mean) == (32, 128, 2.0, 2.0)


def test_deepspeed_1658_and_8155():
    logits = torch.tensor([[1.0, 0, 0, 0]]).repeat(5, 1)
    limit = capacity(5, 4, 1, 1.0, 'deepspeed', min_capacity=4)
    assert limit == 4 and route(logits, 1, 'pre-softmax', limit=limit).dropped == 1
    assert route(logits, 4, capacity_factor=50.0).dropped == 0 # capacity above the number of tokens


# ---- capacity --------------------------------------------------------------------------------------------------------------

@settings(max_examples=200, deadline=None)
@given(st.integers(0, 5000), st.integers(1, 256), st.integers(1, 8), st.floats(0.1, 4.0), st.sampled_from(CAPACITY_RULES))
def test_capacity_grows_with_the_factor(tokens, experts, k, factor, rule):
    low, high = capacity(tokens, experts, k, factor, rule), capacity(tokens, experts, k, 2 * factor, rule)
    assert 0 <= low <= high
    if rule == 'megatron':
        assert low * experts >= factor * k * tokens * (1 - 1e-12)


@pytest.mark.parametrize('arguments, slots', [
    ((4096, 8, 2, 1.25), 1280), ((17, 8, 1, 1.25), 3), ((10, 64, 1, 0.8), 0), ((17, 8, 2, 0, None, 1, 11), 11), ((17, 8, 2, -1.0, None, 4, 11), 8),
])
def test_tutel_rule(arguments, slots):
    tokens, experts, k, factor, *rest = arguments
    floor, align, load = rest or (None, 1, None)
    assert capacity(tokens, experts, k, factor, 'tutel', floor, align, load) == slots


def test_b22_a_lower_factor_drops_more():
    "The research table, 20 draws, within the noise of another draw; and the bound 1 - factor."
    table = capacity_table()
    drops = 100 * table.pivot(index='skew', columns='factor', values='dropped')
    research = pd.DataFrame([[50.0, 19.9, 1.15, 0, 0, 0], [50.0, 20.1, 6.7, 0.1, 0, 0], [50.0, 24.2, 12.8, 4.2, 0.25, 0], [53.1, 34.0, 24.3, 15.0, 8.4, 0.6]],
                            index=drops.index, columns=drops.columns)
    assert (drops - research).abs().to_numpy().max() < 0.5
    padding = table.pivot(index='skew', columns='factor', values='padding')
    for skew in drops.index:
        assert (np.diff(drops.loc[skew]) <= 0).all() and (np.diff(padding.loc[skew]) >= 0).all()
        assert (drops.loc[skew] >= 100 * (1 - drops.columns) - 0.1).all()


def test_table_counts_are_those_of_route():
    logits = torch.from_numpy(np.random.default_rng([8, 2]).gumbel(size=(1, 4096, 8))[0] + 0.5 * np.linspace(-1, 1, 8))
    routing = route(logits, 2, capacity_factor=0.8)
    counts = skewed_counts(0.5, seeds=1)[0]
    assert routing.counts.tolist() == counts.tolist()
    assert routing.dropped == round(8192 * imbalance(counts, capacity=routing.capacity).drop_rate)


# ---- figures and widgets ---------------------------------------------------------------------------------------------------

def test_plot_bars_add_up():
    ax = plot_capacity(np.array([10, 2, 6]), 5)
    heights = [sum(bar.get_height() for bar in bars) for bars in ax.containers]
    assert heights == [12, 6, 3] and ax.get_title(loc='left').startswith('33.3 % of the choices dropped, 20.0 %')


@pytest.mark.parametrize('explore, change', [
    (explore_capacity, dict(capacity_factor=0.5, skew=1.5, experts=64, top_k=8, policy='position')), (explore_workload, dict(name='burst', step=3, strength=1.0)),
    (explore_balance, dict(skew=2.0)),
])
def test_widgets_follow_their_controls(explore, change):
    widget = explore()
    for name, value in change.items():
        before, widget.controls[name].value = widget.image.value, value
        assert widget.image.value != before and not widget.message.value, name


def test_both_cures_balance():
    curves = {cure: balance_curve(cure, steps=100)[-20:].mean() for cure in CURES}
    assert curves['nothing'] > 2 > 1.5 > max(curves['aux loss'], curves['bias'])
