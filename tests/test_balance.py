"""Stage splits: exact against every possible split, bounds that hold, notations that come back, cases from users."""
import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridlab.pipeline import balance
from hybridlab.pipeline.balance import Layer, StageLayout, check_even_split, measure_layout, pipeline_seconds, split_layers
from hybridlab.pipeline.schedule import make_schedule, simulate
from hybridlab.pipeline.stage_layout import read_layout, to_noop_layers, to_num_layer_list, to_torch_stages

costs_s = st.one_of(st.floats(0, 10), st.sampled_from([1.0, 1.5]))
chains = st.lists(costs_s, min_size=3, max_size=8)


def every_split(links, chunks):
    "Cuts of every way to divide so many links into non-empty chunks."
    for inner in combinations(range(1, links), chunks - 1):
        yield [0, *inner, links]


def rank_sums(values, cuts, placement):
    return np.bincount(placement, [sum(values[start:end]) for start, end in zip(cuts[:-1], cuts[1:])])


# ---- exact ---------------------------------------------------------------------------------------------------------------

@settings(max_examples=150, deadline=None)
@given(chains, st.integers(1, 5), costs_s, costs_s)
def test_one_chunk_per_rank_is_the_best_of_all(costs, p, embedding, head):
    links = [embedding, *costs, head]
    split = split_layers(costs, p, embedding=embedding, head=head)
    totals = [rank_sums(links, cuts, range(p)) for cuts in every_split(len(links), p)]
    best = min(total.max() for total in totals)
    assert split.largest == pytest.approx(best, rel=1e-9) == split.bound
    most_even = min((total**2).sum() for total in totals if total.max() <= best * (1 + 1e-9))
    assert (np.square(split.rank_seconds)).sum() == pytest.approx(most_even, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 5), st.floats(1, 9), st.floats(0, 3)), min_size=3, max_size=7), st.integers(1, 4), st.floats(5, 60))
def test_the_memory_limit_is_exact_too(layers, p, limit):
    links = [(0, 0, 0), *layers, (0, 0, 0)]
    need = lambda cuts: [sum(fixed + (p - rank) * act for _, fixed, act in links[cuts[rank]:cuts[rank + 1]]) for rank in range(p)]
    fitting = [cuts for cuts in every_split(len(links), p) if max(need(cuts)) <= limit]
    costs = [Layer(*layer) for layer in layers]
    if not fitting:
        with pytest.raises(ValueError, match='times the memory limit'):
            split_layers(costs, p, memory_limit=limit)
        return
    split = split_layers(costs, p, memory_limit=limit)
    best = min(rank_sums([seconds for seconds, _, _ in links], cuts, range(p)).max() for cuts in fitting)
    assert split.largest == pytest.approx(best, rel=1e-9)
    assert max(split.rank_bytes) <= limit * (1 + 1e-9)


# ---- several chunks per rank ---------------------------------------------------------------------------------------------

def best_of_all(costs, head, placement):
    links = [0.0, *costs, head]
    return min(rank_sums(links, cuts, placement).max() for cuts in every_split(len(links), len(placement)))


@settings(max_examples=60, deadline=None)
@given(chains, st.sampled_from([(2, 2), (3, 2), (2, 3)]), costs_s, st.sampled_from(['loop', 'v']))
def test_the_bound_holds(costs, shape, head, placement):
    p, v = shape
    if len(costs) + 2 < p * v:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, 'MOST_TRIED', 0)
        split = split_layers(costs, p, v, head=head, placement=placement)
    best = best_of_all(costs, head, split.placement)
    assert split.bound <= best * (1 + 1e-9) and best <= split.largest * (1 + 1e-9)


@pytest.mark.parametrize('head', [0.0, 0.7, 2.4])
@pytest.mark.parametrize('shape', [(2, 2), (3, 2), (2, 3)])
def test_equal_layers_are_exact_with_several_chunks(shape, head, monkeypatch):
    monkeypatch.setattr(balance, 'MOST_TRIED', 0)  # so that the search has to find it
    for layers in range(shape[0] * shape[1], 10):
        split = split_layers(layers, *shape, head=head)
        assert split.largest == pytest.approx(best_of_all([1.0] * layers, head, split.placement))


@settings(max_examples=60, deadline=None)
@given(chains, st.sampled_from([(2, 2), (3, 2), (2, 3)]), costs_s)
def test_short_chains_are_exact_with_several_chunks(costs, shape, head):
    if len(costs) + 2 >= shape[0] * shape[1]:
        split = split_layers(costs, *shape, head=head)
        assert split.largest == pytest.approx(best_of_all(costs, head, split.placement), rel=1e-9, abs=1e-9)
        assert split.bound == pytest.approx(split.largest, rel=1e-9, abs=1e-9)


def test_longer_chains_come_within_five_percent_of_the_best(monkeypatch):
    rng = np.random.default_rng(1)
    for p, v, layers in [(3, 2, 20), (2, 3, 20), (4, 2, 16), (2, 4, 17)] * 3:
        costs, head = rng.uniform(0.5, 2, layers).tolist(), rng.uniform(0, 3)
        monkeypatch.setattr(balance, 'MOST_TRIED', 0)
        found = split_layers(costs, p, v, head=head)
        monkeypatch.setattr(balance, 'MOST_TRIED', 10**6)
        best = split_layers(costs, p, v, head=head)
        assert found.bound <= best.largest * (1 + 1e-9) and found.largest <= 1.05 * best.largest


def test_memory_limit_with_several_chunks():
    layers = [Layer(1.0, activation_bytes=1.0)] * 16
    free = split_layers(layers, 4, 2)
    tight = split_layers(layers, 4, 2, memory_limit=max(free.rank_bytes) - 1)
    assert max(tight.rank_bytes) <= max(free.rank_bytes) - 1 and tight.largest > free.largest
    with pytest.raises(ValueError, match='no split was found within the memory limit'):
        split_layers(layers, 4, 2, memory_limit=1.0)


# ---- step time -----------------------------------------------------------------------------------------------------------

def simulated_1f1b(stage_seconds, m):
    thirds = np.array(stage_seconds) / 3
    return simulate(make_schedule('1f1b', len(thirds), m), thirds, thirds, thirds).makespan


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.integers(0, 24))
def test_the_closed_form_is_exact_with_the_slowest_stage_last_and_never_below(stage_seconds, more):
    m = len(stage_seconds) + more
    assert simulated_1f1b(stage_seconds, m) <= pipeline_seconds(stage_seconds, m) * (1 + 1e-9)
    slowest_last = sorted(stage_seconds)
    assert simulated_1f1b(slowest_last, m) == pytest.approx(pipeline_seconds(slowest_last, m), rel=1e-9)


@pytest.mark.parametrize('stage', range(8))
def test_warm_up_forwards_hide_a_part_of_an_early_slow_stage(stage):
    stage_seconds = [33.0 if rank == stage else 30.0 for rank in range(8)]
    assert simulated_1f1b(stage_seconds, 32) == pytest.approx(1266 - (7 - stage) * 3)


# ---- notations -----------------------------------------------------------------------------------------------------------

@st.composite
def layouts(draw, mtp=True):
    p, v = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(0, 4), min_size=p * v, max_size=p * v).filter(sum))
    stages = ['t' * count for count in counts]
    stages[0] = 'E' + stages[0]
    stages[-1] += 'm' * draw(st.integers(0, 2 if mtp else 0)) + 'L'
    return StageLayout(tuple(stages), tuple(chunk % p for chunk in range(p * v))), p, v


@given(layouts())
def test_layout_string_and_module_names_come_back(drawn):
    layout, p, _ = drawn
    assert read_layout(layout.to_megatron_layout(), p) == layout
    assert read_layout(to_torch_stages(layout), p) == layout


@given(layouts(mtp=False))
def test_noop_layers_and_counts_come_back(drawn):
    layout, p, v = drawn
    noops = to_noop_layers(layout)
    assert read_layout(noops['noop_layers'], p, v, num_layers=noops['num_layers']) == layout
    if v == 1:
        assert read_layout(to_num_layer_list(layout), p) == layout


@given(layouts(), st.floats(0, 3), st.floats(0, 3))
def test_a_layout_costs_what_its_layers_cost(drawn, embedding, head):
    layout, p, _ = drawn
    mtp = [1.5] * layout.stages[-1].count('m')
    split = measure_layout(layout, sum(layout.layers), embedding, head, mtp)
    assert split.stages == layout.stages and split.placement == layout.placement
    assert sum(split.rank_seconds) == pytest.approx(sum(layout.layers) + embedding + head + sum(mtp))
    assert split.bound <= split.largest * (1 + 1e-9)


@pytest.mark.parametrize('text, p, expected', [
    ('Et*3|(tt|)*29,m|L', 16, ('Ettt', *['tt'] * 29, 'm', 'L')),
    ('E|t|tL', 3, ('E', 't', 'tL')),
    ('E||t|L', 4, ('E', '', 't', 'L')),  # empty stages are legal in Megatron
    ('E,t*2|(t*3|t|)*2,mmL', 1, ('Ett', 'ttt', 't', 'ttt', 't', 'mmL')),
])
def test_megatron_strings(text, p, expected):
    assert read_layout(text, p).stages == expected


@pytest.mark.parametrize('call, words', [
    (lambda: read_layout('Ett|tt', 2), 'one L'),
    (lambda: read_layout('Ettm|mL', 2), 'MTP modules on more than one stage'),
    (lambda: read_layout('Et|tmtL', 2), 'one E, then all t'),
    (lambda: read_layout('7,7', 2, num_layers=14, v=4), 'num_layers=14 is no multiple of 8 chunks; add noop layers up to 16'),
    (lambda: read_layout('99', 2, num_layers=16), 'noop layers \\[99\\] are outside 0 to 15'),
    (lambda: split_layers(8, 0), 'p=0'),
    (lambda: split_layers(8, 2.0), 'p=2.0'),
    (lambda: split_layers(8, 2, placement='ring'), 'valid here: loop .*, v '),
    (lambda: split_layers(8, 2, in_flight=[1]), 'give 2 numbers'),
    (lambda: split_layers(8, 2, memory_limit=-1), 'one number above 0'),
    (lambda: split_layers(8, 2, head=math.inf), 'finite number'),
    (lambda: split_layers(8, 2, head=-1), '0 or more'),
    (lambda: split_layers(5, 4, 2), 'use p·v <= 7'),
])
def test_errors_name_value_limit_and_remedy(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# ---- users' cases --------------------------------------------------------------------------------------------------------

def test_c01_thirty_layers_on_four_stages():
    (finding,) = check_even_split(30, 4)
    text = str(finding)
    assert '30 % 4 = 2' in text and 'equal chunks hold 28, 2 are lost' in text
    assert 'Valid pp with vpp=1: 1, 2, 3, 5, 6, 10, 15, 30' in text and 'Et*7|(t*8|)*2,t*7L' in text
    assert sorted(split_layers(30, 4).layers) == [7, 7, 8, 8]
    assert split_layers(30, 4, embedding=1, head=1).layers == (7, 8, 8, 7)


def test_c03_eighty_layers_with_two_chunks_on_sixteen_ranks():
    (finding,) = check_even_split(80, 16, 2)
    assert '80 % 32 = 16' in finding.message and 'equal chunks hold 64' in finding.message
    assert 'valid vpp with pp=16: 1, 5' in finding.fix
    assert check_even_split(80, 16, 5) == [] == check_even_split(80, 16)


def test_c04_forty_six_layers_on_four_stages():
    (finding,) = check_even_split(46, 4)
    assert '46 % 4 = 2' in finding.message and 'Et*11|(t*12|)*2,t*11L' in finding.fix
    assert to_num_layer_list(split_layers(46, 4, embedding=1, head=1)) == '11,12,12,11'


def test_b11_ten_percent_on_one_stage():
    even, heavy = pipeline_seconds([30.0] * 8, 32), pipeline_seconds([30.0] * 7 + [33.0], 32)
    assert (even, heavy) == (1170.0, 1266.0) and round((heavy / even - 1) * 100, 1) == 8.2
