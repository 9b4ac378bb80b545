"Constants from measurements: the fit finds those that made them, the file keeps them, the planner reads them."
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridlab.core.launch import run
from hybridlab.pipeline.schedule import make_schedule, simulate
from hybridlab.plan.calibrate import (ATTENTIONS, BLOCKS, CUT, KINDS, MESSAGES, NOTHING, PRODUCTS, STEPS, SUMS, UPDATE, Calibration, Own, Probe, calibrate, cores_of, fit_calibration,
                                      hybrid_model, hybrid_train, load_calibration, measure, plot_calibration, plot_sharing, predict_step, probe_seconds, rank_clock, save_cluster,
                                      shared_makespan)
from hybridlab.plan.cost import Efficiency, estimate_step, load_efficiency
from hybridlab.plan.search import search
from hybridlab.spec.cluster import ClusterSpec, DeviceSpec, LinkSpec, list_clusters, load_cluster
from hybridlab.spec.layout import Layout

CARD = {'vendor': 'cpu', 'cores': 1, 'hbm_bytes': 2**31, 'usable_bytes': 2**31}
CONSTANTS = NOTHING | {'matrix': 0.9, 'tile': 900.0, 'depth': 4.0, 'memory': 0.5, 'attention': 0.3, 'attention_depth': 40.0, 'kernel_s': 4e-5, 'micro_s': 4e-3, 'step_s': 2e-2,
                       'call_s': 3e-4, 'inside': 0.7, 'between': 0.7}
LINK = LinkSpec(name='inside', shape='switch', span=8, bytes_per_s=1.5e9, alpha=2e-4)
OWN = Own(sum=(3e-3, 1e-3, 4e-9, 2e-9), sum8=(4e-3, 1e-3, 5e-9, 3e-9), pair=(1e-3, 5e-4, 2e-9), exchange=(2e-3, 6e-4, 3e-9), ends=(4e-3, 1e-3, 5e-9), hop=(5e-4, 1 / 1.5e9), dense=(1e-7, 3e-8), moe=(3e-3, 2e-7, 6e-8))
TRUTH = Calibration(ClusterSpec(name='made', cards_per_server=8, servers=1, links=(LINK, replace(LINK, name='between', span=0)), device=DeviceSpec(
    name='made-rank', flops={'fp32': 2.4e10}, hbm_bytes_per_s=2e10, alignment={'fp32': 1}, efficiency=CONSTANTS, **CARD)), OWN, cores=2, launch_s=5e-6)


def sizes():
    "Kind and size of all that eight ranks measure."
    yield from (('product', size) for size in PRODUCTS)
    yield from (('attention', size) for size in ATTENTIONS)
    yield from [('launch', (1,)), ('update', (UPDATE,)), ('copy', (2**20,)), *(('hop', (nbytes,)) for nbytes in MESSAGES)]
    yield from ((kind, (*block, 1)) for kind in ('dense', 'moe') for block in BLOCKS)
    yield from ((kind, (*block, ranks)) for kind in ('dense', 'moe', 'ends') for block in CUT for ranks in (2, 4))
    yield from (('all_to_all', (ranks, nbytes)) for ranks in (2, 4) for nbytes in MESSAGES)
    yield from ((kind, (ranks, nbytes)) for kind in ('sum', 'sum8') for ranks in (2, 4, 8) for nbytes in SUMS)
    yield from [*(('step', size) for size in STEPS), *(('busy', (ranks,)) for ranks in (1, 2, 4, 8))]


def made(noise=0.0):
    rng = np.random.default_rng(0)
    return [Probe(kind, size, probe_seconds(Probe(kind, size, 0.0), TRUTH) * float(np.exp(noise * rng.standard_normal()))) for kind, size in sizes()]


@pytest.fixture(scope='module')
def found():
    return fit_calibration(made(), 'made', CARD | {'dtype': 'fp32'}, 8, 2)


def test_fit_finds_the_constants_that_made_the_measurements(found):
    e, device = found.efficiency, found.cluster.device
    assert e.matrix * device.flops['fp32'] == pytest.approx(0.9 * 2.4e10, rel=0.02)
    assert e.memory * device.hbm_bytes_per_s == pytest.approx(1e10, rel=0.02)
    assert e.kernel_s == pytest.approx(4e-5, rel=0.05)
    assert e.attention * device.flops['fp32'] == pytest.approx(0.3 * 2.4e10, rel=0.05)
    link = found.cluster.links[0]
    assert (link.alpha, link.bytes_per_s, e.call_s, e.inside) == pytest.approx((2e-4, 1.5e9, 3e-4, 0.7), rel=0.1)
    assert (e.step_s, e.micro_s) == pytest.approx((2e-2, 4e-3), rel=0.1)


@pytest.mark.parametrize('kind, size', [('hop', (2**17,)), ('sum', (4, 2**20)), ('sum8', (8, 2**20)), ('pair', (2, 2**18)), ('exchange', (4, 2**18)), ('ends', (2, 2**18)),
                                        ('dense', (2, 64, 256, 2)), ('moe', (2, 64, 256, 2))])
def test_fit_finds_what_is_own(found, kind, size):
    assert found.own.seconds(kind, *size) == pytest.approx(OWN.seconds(kind, *size), rel=0.05)


def test_residuals_are_those_of_the_noise(found):
    assert found.table()['error [%]'].abs().max() < 3
    noisy = fit_calibration(made(0.05), 'made', CARD | {'dtype': 'fp32'}, 8, 2)
    assert noisy.table()['error [%]'].abs().median() < 5


CASES = [(Layout(8, tp=2, pp=2), 0, None), (Layout(8, tp=1, pp=2), 0, 8), (Layout(8, tp=2, pp=2, ep=2, etp=1), 4, None), (Layout(8, tp=1, pp=2, ep=4, etp=1), 4, None), (Layout(8, tp=1, pp=1), 0, None)]


@pytest.mark.parametrize('layout, experts, bits', CASES)
def test_prediction_from_the_fit_is_that_of_the_truth(found, layout, experts, bits):
    model, train = hybrid_model(256, 2, 104, 64, 8, experts), hybrid_train(64, 32, 32 // layout.dp // (4 if layout.pp > 1 else 1), bits)
    ours, wanted = predict_step(found, model, layout, train), predict_step(TRUTH, model, layout, train)
    assert ours.total == pytest.approx(wanted.total, rel=0.05)
    assert wanted.parts['dp'] > 0 and (wanted.parts['tp'] > 0) == (layout.tp > 1) and (wanted.parts['ep'] > 0) == (experts > 0)
    assert min(ours.parts.values()) >= 0


def test_int8_sums_are_those_of_their_own_measurements(found):
    model, layout = hybrid_model(256, 2, 104, 64, 8), Layout(8, tp=1, pp=2)
    whole, int8 = (predict_step(found, model, layout, hybrid_train(64, 32, 2, bits)).parts['dp'] for bits in (None, 8))
    assert int8 > whole  # OWN says so: this machine quantizes slowly


def test_with_a_core_for_every_rank_the_bubble_is_back():
    model, layout, train = hybrid_model(256, 2, 104, 64, 8), Layout(8, tp=1, pp=2), hybrid_train(64, 32, 4)
    shared, own = predict_step(TRUTH, model, layout, train), predict_step(replace(TRUTH, cores=8), model, layout, train)
    assert shared.parts['bubble'] == pytest.approx(0, abs=1e-9)
    assert own.parts['bubble'] > 0.1 * own.total
    assert own.parts['bubble'] == pytest.approx(estimate_step(model, TRUTH.cluster, layout, train).parts['bubble'], rel=0.3)


# ---- shared cores --------------------------------------------------------------------------------------------------------

@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.sampled_from([1, 2, 4]), st.integers(1, 16), st.integers(0, 2**32))
def test_shared_makespan_lies_between_the_mean_rank_and_the_simulation(p, m, group, cores, seed):
    seconds, schedule = np.random.default_rng(seed).uniform(0.5, 2, (3, p)), make_schedule('1f1b', p, m)
    took, alone = shared_makespan(schedule, seconds, group, cores), simulate(schedule, *seconds).makespan
    assert m * seconds.sum() / p - 1e-9 <= took <= alone + 1e-9
    if cores >= p * group:
        assert took == pytest.approx(alone)
    if cores <= group:
        assert took == pytest.approx(m * seconds.sum() / p)


@pytest.mark.parametrize('kind, v', [('zb-h1', 1), ('interleaved', 2), ('zb-v', 2), ('gpipe', 1)])
def test_shared_makespan_of_other_schedules(kind, v):
    schedule = make_schedule(kind, 2, 4, v)
    seconds = np.ones((3, schedule.stages))
    assert shared_makespan(schedule, seconds, 1, 2) == pytest.approx(simulate(schedule, *seconds).makespan)


def test_cores_and_clock():
    assert cores_of('cpu', 1) == 1 and 1 <= cores_of('cpu', 10_000) < 10_000 and cores_of('npu', 8) == 8
    clock = rank_clock('cpu', 10_000)
    begin = clock()
    sum(range(10_000))
    assert clock() > begin


# ---- the file ------------------------------------------------------------------------------------------------------------

def test_file_round_trip(tmp_path, found):
    path = save_cluster(found, tmp_path / 'mine.toml')
    assert list_clusters(path) == ['made'] and load_cluster('made', path) == found.cluster
    assert load_efficiency(load_cluster('made', path).device) == found.efficiency
    assert replace(load_calibration('made', path), probes=found.probes) == found


def test_planner_reads_the_file(tmp_path, found):
    path = save_cluster(found, tmp_path / 'mine.toml')
    plans = search(hybrid_model(256, 2, 104, 64, 8), load_cluster('made', path), 8, hybrid_train(64, 32), limits={'vpp': [1]})
    assert len(plans) and plans.best.layout.world == 8


def test_a_cluster_without_calibration(tmp_path, found):
    path = save_cluster(found, tmp_path / 'mine.toml')
    path.write_text(path.read_text().partition('[calibration')[0])
    assert load_cluster('made', path) == found.cluster
    with pytest.raises(ValueError, match='was not written by save_cluster'):
        load_calibration('made', path)


@pytest.mark.parametrize('change, message', [({'matrix': -1.0}, 'efficiency'), ({'matrix': 'fast'}, 'efficiency')])
def test_wrong_constants_in_a_file(tmp_path, found, change, message):
    device = replace(found.cluster.device, efficiency=found.cluster.device.efficiency | change)
    path = save_cluster(replace(found, cluster=replace(found.cluster, device=device)), tmp_path / 'mine.toml')
    with pytest.raises(ValueError, match=message):
        load_cluster('made', path)


def test_constants_of_another_version():
    device = replace(TRUTH.cluster.device, efficiency={'matrix': 0.9, 'matrixx': 0.9})
    with pytest.raises(ValueError, match="unknown \\['matrixx'\\], missing .*Write the file with"):
        load_efficiency(device)


def test_devices_without_constants_still_take_the_fitted_ones():
    a100 = load_cluster('dgx-a100').device
    assert a100.efficiency == {} and load_efficiency(a100) == load_efficiency('a100-80g')
    with pytest.raises(ValueError, match='no constants'):
        load_efficiency(replace(TRUTH.cluster.device, efficiency={}))
    assert set(asdict(load_efficiency(TRUTH.cluster.device))) == set(Efficiency.__dataclass_fields__)


# ---- what is refused, what is measured -----------------------------------------------------------------------------------

def test_refused():
    with pytest.raises(ValueError, match='world_size=1 has no link to measure; give 2 or more'):
        calibrate(1)
    with pytest.raises(ValueError, match='no measurement of hop; give all'):
        fit_calibration([probe for probe in made() if probe.kind != 'hop'], 'made', CARD | {'dtype': 'fp32'}, 8, 2)


def test_model_has_the_parameters_of_the_trainer():
    from hybridlab.moe.hybrid import whole_stages

    for experts in (0, 4):
        counted = sum(p.numel() for p in whole_stages(['EttL'], 104, 64, 4, 32, experts)[0].parameters())
        assert hybrid_model(64, 2, 104, 32, 4, experts).parameters() == pytest.approx(counted, rel=0.02)  # biases of head and experts


def test_two_real_ranks(tmp_path):
    probes = run(measure, 'cpu', 0.001, world_size=2, backend='gloo', timeout_s=300)
    assert probes[0] == probes[1]
    assert {probe.kind for probe in probes[0]} == set(KINDS) and all(probe.seconds > 0 for probe in probes[0])
    fit = fit_calibration(probes[0], 'gloo-2', CARD | {'dtype': 'fp32'}, 2, 2)
    assert load_cluster('gloo-2', save_cluster(fit, tmp_path / 'two.toml')) == fit.cluster
    assert np.isfinite(fit.table()['error [%]']).all()
    assert 'measurements' in plot_calibration(fit).get_title(loc='left')
    assert '2 ranks' in plot_sharing(fit).get_title(loc='left')
