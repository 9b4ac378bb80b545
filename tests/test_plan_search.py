"""The search judges every layout as check, estimate_memory and estimate_step do, one at a time."""
import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from hybridlab.cli import main
from hybridlab.plan.cost import estimate_step, step_parts
from hybridlab.plan.memory import Strategies, estimate_memory
from hybridlab.plan.search import ORDERS, _grid, _in_order, _pipelines, _refused, axis_values, make_plan, pareto, plans_json, search, sensitivity, why_not
from hybridlab.pipeline.bubble import V_SHAPES
from hybridlab.pipeline.schedule import make_schedule, simulate
from hybridlab.spec.cluster import load_cluster, with_cards
from hybridlab.spec.layout import RECOMPUTE, Layout, TrainSpec, check, even_out
from hybridlab.spec.model import load_model

CASES = {'llama3-8b': (64, TrainSpec(4096, 96)), 'article-moe-128': (128, TrainSpec(2048, 64)), 'deepseek-v3': (256, TrainSpec(4096, 512)), 'gpt3-175b': (192, TrainSpec(2048, 192))}


def rows(model, cards, train, seed, count):
    "Random candidates of random blocks with the search's verdict: (layout, step, refused or not)."
    rng, values = random.Random(seed), axis_values(model, None, cards, train)
    cluster, blocks = with_cards(load_cluster('atlas-800t-a2'), cards), list(_pipelines(model, values))
    for _ in range(count):
        pp, vpp, schedule = block = rng.choice(blocks)
        g, order = _grid(model, values, cards, pp), rng.choice(ORDERS)
        one = rng.randrange(len(g['tp']))
        g = {axis: part[one:one + 1] for axis, part in g.items()}
        refused = _refused(model, cards, train, block, g)[1][0] >= 0 or not len(_in_order(cluster, order, block, g)['tp'])
        row = {axis: part[0].item() for axis, part in g.items()}
        chunks = pp * vpp
        layout = Layout(cards, pp=pp, vpp=1 if schedule in V_SHAPES else vpp, order=order, layer_split=None, **{axis: row[axis] for axis in ('tp', 'cp', 'dp', 'ep', 'etp', 'sequence_parallel')})
        if model.layers % chunks and schedule not in V_SHAPES:
            layout = replace(layout, layer_split=even_out(model.layers, chunks), etp=layout.etp)
        step = replace(train, micro_batch=row['micro_batch'], recompute=RECOMPUTE[row['recompute']], zero=row['zero'], schedule=schedule)
        yield cluster, layout, step, refused, block


@pytest.mark.parametrize('name', CASES)
def test_rules_are_those_of_check(name):
    model, (cards, train), seen = load_model(name), CASES[name], {True: 0, False: 0}
    for cluster, layout, step, refused, (pp, vpp, schedule) in rows(model, cards, train, 0, 300):
        if schedule in V_SHAPES and model.layers % pp: # check knows no split for the chunks of a V
            continue
        errors = {finding.code for finding in check(model, cluster, layout, step) if finding.severity == 'error'}
        only_schedule = refused and not errors # the schedule's own limits are in pipeline.bubble.check_schedule
        assert refused == bool(errors) or only_schedule, (layout, step, errors)
        seen[refused] += 1
    assert min(seen.values()) > 20


@pytest.mark.parametrize('name', ['llama3-8b', 'article-moe-128'])
def test_seconds_and_bytes_are_those_of_one_layout(name):
    model, (cards, train) = load_model(name), CASES[name]
    plans = search(model, load_cluster('atlas-800t-a2'), cards, train, exact=4)
    assert len(plans) > 100
    apart = []
    for place in [0, 1, 2, 3, *random.Random(0).sample(range(len(plans)), 25)]:
        layout, step = plans.strategy(place)
        memory = estimate_memory(model, layout, step, plans.cluster)
        assert plans.columns['bytes'][place] == pytest.approx((memory.steady + memory.communicators).max())
        assert memory.share <= 0.9 + 1e-9
        exact = estimate_step(model, plans.cluster, layout, step).total
        apart.append(plans.columns['seconds'][place] / exact - 1)
        assert abs(apart[-1]) < (1e-9 if place < 4 else 0.15)
    assert (np.diff(plans.columns['seconds']) >= 0).all() and np.mean(np.abs(apart)) < 0.04


def test_counts_add_up():
    model, (cards, train) = load_model('llama3-8b'), CASES['llama3-8b']
    limits = {'schedule': ['1f1b'], 'zero': [1], 'recompute': ['none'], 'order': ORDERS[:1], 'micro_batch': [1, 2, 4]}
    values = axis_values(model, None, cards, train, limits)
    whole = sum(len(_grid(model, values, cards, block[0])['tp']) for block in _pipelines(model, values))
    assert search(model, load_cluster('atlas-800t-a2'), cards, train, limits=limits).evaluated == whole


def test_bubble_and_memory_of_a_plan_are_those_of_their_own_modules():
    model, cluster = load_model('llama2-7b'), with_cards(load_cluster('atlas-800t-a2'), 32)
    layout, train = Layout(32, tp=2, pp=4), TrainSpec(4096, 64, schedule='zb-h1')
    plan = make_plan(model, cluster, layout, train)
    assert plan.memory.stage_peaks == pytest.approx(estimate_memory(model, layout, train, cluster).stage_peaks)
    f, b, w = step_parts(model, cluster, Strategies.of(layout, train), train)['stages'][:, :, 0]
    m, schedule = plan.step.microbatches, make_schedule('zb-h1', 4, plan.step.microbatches)
    assert plan.step.parts['bubble'] == pytest.approx(simulate(schedule, f, b, w).makespan - m * (f + b + w).max(), rel=1e-6)


def test_pareto_front_is_not_beaten():
    plans = search(load_model('llama2-7b'), load_cluster('atlas-800t-a2'), 16, TrainSpec(4096, 64), limits={'schedule': ['1f1b']})
    seconds, memory = plans.columns['seconds'], plans.columns['bytes']
    front = pareto(plans)
    for place in front:
        assert not ((seconds < seconds[place]) & (memory < memory[place])).any()
    assert (np.diff(seconds[front]) >= 0).all() and (np.diff(memory[front]) < 0).all()


def test_nothing_fits_says_why():
    plans = search(load_model('gpt3-175b'), load_cluster('atlas-800t-a2'), 8, TrainSpec(2048, 8))
    assert len(plans) == 0 and plans.rejected['memory'] > 0 and plans.table().empty and plans_json(plans)['plans'] == []
    with pytest.raises(ValueError, match='fits on 8 cards; refused: .*memory'):
        plans.best


def test_why_not_names_the_reason():
    plans = search(load_model('llama2-70b'), load_cluster('atlas-800t-a2'), 64, TrainSpec(4096, 256), limits={'schedule': ['1f1b'], 'cp': [1]})
    assert {finding.code for finding in why_not(plans, Layout(64, tp=3))} >= {'layout.heads', 'layout.world'}
    assert any(finding.code == 'memory.full' for finding in why_not(plans, Layout(64, tp=1), replace(plans.train, micro_batch=4, zero=0)))
    slower = why_not(plans, Layout(64, tp=8, pp=8), replace(plans.best.train, micro_batch=1, recompute='full'))[-1]
    assert slower.code == 'plan.slower' and 'times the best' in slower.message


def test_slower_links_never_help():
    limits = {'schedule': ['1f1b'], 'cp': [1], 'zero': [1], 'order': ORDERS[:1], 'micro_batch': [1, 2]}
    table = sensitivity(load_model('llama3-8b'), load_cluster('atlas-800t-a2'), 64, TrainSpec(4096, 128), factors=(0.25, 1.0, 4.0), limits=limits)
    assert (table['step [s]'].diff().dropna() <= 1e-9).all()
    assert (table['usual layout [s]'] >= table['step [s]'] - 1e-9).all()


@pytest.mark.parametrize('objective, column', [('step_time', 'seconds'), ('memory', 'bytes')])
def test_objective_is_least_first(objective, column):
    plans = search(load_model('llama2-7b'), load_cluster('dgx-a100'), 16, TrainSpec(4096, 64), objective, limits={'schedule': ['1f1b']}, exact=0)
    assert (np.diff(plans.columns[column]) >= 0).all() and not math.isnan(plans.columns[column][0])


def test_command_line(capsys, tmp_path):
    assert main('plan --model llama2-7b --cluster atlas-800t-a2 --world 16 --global-batch 64 --limit schedule=1f1b --top 2 --json'.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found['fit'] > 0 and len(found['plans']) == 2 and found['plans'][0]['step']['total'] <= found['plans'][1]['step']['total']
    assert main(['plan', '--model', 'llama2-7b', '--cluster', str(tmp_path / 'none.toml'), '--world', '16']) == 2
    assert 'none.toml' in capsys.readouterr().err
    assert main('plan --model llama2-7b --cluster atlas-800t-a2 --world 16 --limit tp'.split()) == 2
    assert main('plan --model nope --cluster atlas-800t-a2 --world 16'.split()) == 2
    assert main(['plan', '--model', 'llama2-7b', '--cluster', 'atlas-800t-a2', '--world', '16', '--global-batch', '64', '--limit', 'schedule=1f1b', '--why-not', 'tp=8 pp=2']) == 0
    assert 'times the best' in capsys.readouterr().out
