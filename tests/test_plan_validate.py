"""Published runs: half of them unseen, errors within what the planner promises, every row usable and sourced."""
import csv
import hashlib
import math
from functools import cache
from importlib.resources import files

import numpy as np
import pytest

from hybridlab.plan.cost import Efficiency, _efficiency_tables, estimate_step, load_efficiency
from hybridlab.plan.validate import (IDENTITY, PRIORS, SHARES, fit_efficiency, half_of, load_runs, plot_errors, plot_validation, run_spec, stack_runs, summary,
                                     validate, validate_json)
from hybridlab.spec.cluster import check_cluster, list_clusters, load_cluster
from hybridlab.spec.layout import check_grid
from hybridlab.spec.model import _read_tables

LIMITS = {'korthikanti-2022': 3.6, 'narayanan-2021': 8, 'vtrain-single': 20, 'dgxc-h100': 10, 'mpt-llmfoundry': 10, 'modellink': 15} # [%] of the held half
PATH = files('hybridlab.data') / 'clusters_published.toml'


@cache
def table():
    return validate()


# ---- data ----------------------------------------------------------------------------------------------------------------

def rows():
    return list(csv.DictReader((files('hybridlab.data') / 'runs_published.csv').read_text(encoding='utf-8').splitlines()))


def test_every_row_has_a_source_and_a_figure():
    for row in rows():
        assert row['source'] and row['read_how'] in ('read', 'derived') and row['unit'] == 's/step', row
        assert row['left_out'] or float(row['seconds']) > 0, row


def test_every_used_run_fits_its_cluster():
    for run in load_runs().to_dict('records'):
        model, cluster, layout, train = run_spec(run)
        assert not check_grid(layout), run['run']
        assert layout.world <= cluster.cards and train.microbatches(layout.dp) >= 1, run['run']
        assert model.layers % (layout.pp * layout.vpp) == 0 or layout.layer_split or layout.vpp == 1, run['run']


def test_runs_are_different():
    names = [tuple(row[name] for name in (*IDENTITY, 'run')) for row in rows()]
    assert len(names) - len(set(names)) < 10  # a source repeats a measurement now and then


@pytest.mark.parametrize('name', list_clusters(PATH))
def test_clusters_of_the_runs(name):
    tables = _read_tables(PATH, '')
    assert not check_cluster(tables, name) and tables['cluster'][name]['sources'] and load_cluster(name, PATH).cards >= 512


def test_halves_are_random_and_fixed():
    runs = load_runs()
    assert 0.4 < (runs.half == 'fit').mean() < 0.6
    run = rows()[0]
    key = '|'.join(run[name] for name in IDENTITY)
    assert half_of(run) == ('fit', 'held')[hashlib.sha256(key.encode()).digest()[0] % 2]
    assert half_of(run | {'seconds': '1', 'source': ''}) == half_of(run)  # the figure does not decide


# ---- errors --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', LIMITS)
def test_error_of_the_half_that_no_fit_has_seen(name):
    held = summary(table()).loc[(name, 'held')]
    assert held.mape <= LIMITS[name], held


def test_error_of_vtrain_inside_servers():
    runs = table()[(table()['set'] == 'vtrain-multi') & (table().tp <= 8)]
    assert summary(runs).loc[('vtrain-multi', 'held'), 'mape'] <= 9


def test_better_than_calculon_on_its_rows():
    both = table()[(table().half == 'held') & table().peer_error.notna()]
    errors = both.groupby('set')[['error', 'peer_error']].agg(lambda column: column.abs().mean())
    assert (errors.error < errors.peer_error).all() and len(errors) == 4, errors


def test_held_half_is_not_much_worse():
    for name, both in summary(table()).groupby('set'):
        assert both.mape.max() < both.mape.min() + 4, name


def test_stacked_runs_are_single_runs():
    picked = table().groupby('set').head(2)
    specs = {(run['set'], run['run'], run['seconds']): run for run in load_runs().to_dict('records')}
    for row in picked.to_dict('records'):
        model, cluster, layout, train = run_spec(specs[row['set'], row['run'], row['seconds']])
        assert estimate_step(model, cluster, layout, train).total == pytest.approx(row['predicted'], rel=0.03), row['run']


def test_json():
    found = validate_json()
    assert {(row['name'], row['half']) for row in found['sets']} >= {(name, half) for name in LIMITS for half in ('fit', 'held')}
    assert all(set(row) == {'name', 'half', 'rows', 'mape', 'median', 'p90', 'signed'} and math.isfinite(row['mape']) for row in found['sets'])
    assert sum(row['rows'] for row in found['sets']) == len(load_runs())


# ---- constants -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('card', ['a100', 'h100', 'ascend-a2'])
def test_a_fit_gives_the_stored_constants(card):
    stored, again = load_efficiency(_efficiency_tables()[card]['devices'][0]), fit_efficiency(card)
    for name in vars(stored):
        assert getattr(again, name) == pytest.approx(getattr(stored, name), rel=0.05, abs=1e-9), name


@pytest.mark.parametrize('card', ['a100', 'h100', 'ascend-a2'])
def test_constants_are_plausible(card):
    e = vars(load_efficiency(_efficiency_tables()[card]['devices'][0]))
    assert set(e) == set(PRIORS) == set(Efficiency.__dataclass_fields__)
    assert all(0 <= e[name] < 1 for name in SHARES)
    for name in set(PRIORS) - set(_efficiency_tables()[card].get('fixed', {})):
        middle, spread = PRIORS[name]
        assert abs(math.log(e[name] / middle)) < 3.5 * spread, (name, e[name], middle)


def test_one_device_has_one_set():
    devices = [device for entry in _efficiency_tables().values() for device in entry['devices']]
    assert len(devices) == len(set(devices))


# ---- interface -----------------------------------------------------------------------------------------------------------

def test_unknown_set():
    with pytest.raises(ValueError, match='Did you mean vtrain-multi'):
        validate(['vtrain-mult'])


def test_left_out_runs_say_why():
    every, used = load_runs(left_out=True), load_runs()
    assert len(every) > len(used) and (used.left_out == '').all() and set(every[~every.index.isin(used.index)].left_out.str.len() > 10) == {True}


def test_stack_keeps_the_order():
    runs = load_runs(['vtrain-multi', 'narayanan-2021'])
    work = stack_runs(runs)
    assert np.array_equal(work['p'], runs.pp.astype(int)) and np.array_equal(work['microbatches'], [run_spec(run)[3].microbatches(int(run['dp'])) for run in runs.to_dict('records')])


@pytest.mark.parametrize('draw', [plot_validation, plot_errors])
def test_plots(draw):
    ax = draw(table())
    assert 'held half' in (ax.get_title(loc='left') or ax.get_title()) and ax.get_xlabel()
