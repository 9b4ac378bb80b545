"""Orders that are complete and cannot deadlock, times equal to a slow simulation, published tables, torch's own generators and files."""
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybridlab.pipeline.bubble import check_schedule, load_published_bubbles
from hybridlab.pipeline.schedule import (KINDS, PAIR, B, F, I, Schedule, Timeline, W, in_flight, make_schedule, peak_memory, plot_comparison, plot_memory, plot_timeline,
                                         simulate, timeline_table)

SHARED = Path(__file__).resolve().parents[2] / 'shared' / 'cases' / 'schedules'
CAUSES = ['fill', 'dependency', 'drain', 'imbalance', 'communication']
each_kind = pytest.mark.parametrize('kind', list(KINDS))

# Own equivalent of a file in the old notation, where B is an input gradient: 2 ranks with 2 chunks each, idle slots left empty.
OLD_NOTATION = '''0F0,0F1,2F0,,2F1,2B0,2W0,2B1,2W1,0B0,0W0,0B1,,0W1
,1F0,1F1,3F0,3B0,3F1,3W0,3B1,1B0,3W1,1B1,1W0,1W1
'''


def can(kind, p, m, v=None, **options):
    return not any(finding.severity == 'error' for finding in check_schedule(kind, p, m, v, **options))


def actions(schedule):
    "One list of (kind, stage, micro-batch) per rank."
    return [[action for action in zip(*row) if action[0] >= 0] for row in zip(schedule.kind.tolist(), schedule.stage.tolist(), schedule.microbatch.tolist())]


def slow_simulation(schedule, f, b, w, hop=0.0, blocking=False, overlap=1.0):
    "End of every rank, from the definition: each action asks its predecessors."
    rows, chain = actions(schedule), schedule.stages // schedule.copies
    place = {(F if k == PAIR else I if k == B else k, s, i): (r, n) for r, row in enumerate(rows) for n, (k, s, i) in enumerate(row)}
    place |= {(W, s, i): (r, n) for r, row in enumerate(rows) for n, (k, s, i) in enumerate(row) if k == B}
    duration = {F: lambda s: f[s], PAIR: lambda s: f[s], B: lambda s: b[s] + w[s], I: lambda s: b[s], W: lambda s: w[s]}

    def arrival(r, n, free):
        k, s, i = rows[r][n]
        source = (F, s - 1, i) if k in (F, PAIR) and s % chain else (I, s + 1, i) if k in (B, I) and (s + 1) % chain else None
        if source is None:
            return free
        rank, at = place[source]
        done, far = end(rank, at), hop * (rank != r)
        return max(done, free) + far if blocking else max(done + far, free)

    @lru_cache(maxsize=None)
    def end(r, n):
        first = n - 1 if n and rows[r][n - 1][0] == PAIR else n # the second of a pair
        free = end(r, first - 1) if first else 0.0
        members = range(first, first + (2 if rows[r][first][0] == PAIR else 1))
        return max(arrival(r, k, free) for k in members) + sum(duration[rows[r][k][0]](rows[r][k][1]) for k in members) * (overlap if len(members) == 2 else 1)

    return [end(r, len(row) - 1) for r, row in enumerate(rows)]


@st.composite
def orders(draw, kinds=tuple(KINDS)):
    "A schedule of any kind with up to 6 ranks and 13 micro-batches."
    kind, p, m = draw(st.sampled_from(kinds)), draw(st.integers(1, 6)), draw(st.integers(1, 13))
    v = draw(st.integers(1, 3)) if kind in ('interleaved', 'looped-bfs') else None
    group = draw(st.integers(p, max(p, m))) if kind == 'interleaved' else None
    assume(can(kind, p, m, v, group=group))
    return make_schedule(kind, p, m, v, group)


@st.composite
def timed(draw):
    "A schedule and times of each stage."
    schedule = draw(orders())
    times = [np.array(draw(st.lists(st.integers(0, 9), min_size=schedule.stages, max_size=schedule.stages)), float) for _ in 'fbw']
    return schedule, times, draw(st.sampled_from([0.0, 0.5, 3.0])), draw(st.booleans()), draw(st.sampled_from([1.0, 0.5]))


# ---- orders --------------------------------------------------------------------------------------------------------------

@settings(max_examples=300, deadline=None)
@given(orders())
def test_every_order_is_complete_and_survives_its_file(schedule):
    again = Schedule.from_csv(schedule.to_csv(), schedule.copies) # reading checks that each action is there once
    for name in ('kind', 'stage', 'microbatch'):
        assert np.array_equal(getattr(again, name), getattr(schedule, name)), name
    assert (again.stages, again.placement, again.microbatches) == (schedule.stages, schedule.placement, schedule.microbatches)


@each_kind
@pytest.mark.parametrize('p, m', [(1, 1), (1, 5), (2, 1), (3, 2), (4, 4), (5, 7), (8, 16), (12, 36), (7, 64)])
def test_no_order_deadlocks(kind, p, m):
    if can(kind, p, m):
        assert simulate(make_schedule(kind, p, m)).makespan >= m * (3 if kind.startswith('z') else 2)


@pytest.mark.parametrize('p, m, v', [(2, 4, 2), (4, 8, 2), (4, 12, 3), (3, 6, 4)])
def test_c23_warm_up_of_interleaving(p, m, v):
    first = (make_schedule('interleaved', p, m, v).kind != F).argmax(axis=1)
    assert first.tolist() == [min(m * v, 2 * (p - 1 - r) + (v - 1) * p) + (1 if 2 * (p - 1 - r) + (v - 1) * p < m * v else 0) for r in range(p)]


def test_c23_numbers():
    assert ((make_schedule('interleaved', 4, 16).kind != F).argmax(axis=1) - 1).tolist() == [10, 8, 6, 4]
    assert ((make_schedule('1f1b', 4, 16).kind != F).argmax(axis=1) - 1).tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize('p, m', [(4, 10), (3, 7), (5, 13)])
def test_flexible_groups_have_the_bubble_of_strict_ones(p, m):
    for group in range(p, m + 1):
        if can('interleaved', p, m, 2, group=group):
            made = simulate(make_schedule('interleaved', p, m, 2, group), 0.5, 0.5, 0.5)
            assert made.makespan == pytest.approx(3 * m + 1.5 * (p - 1))


@pytest.mark.parametrize('limit', [4, 5, 6, 7, 8, 12])
@pytest.mark.parametrize('times', [(1.0, 1.0, 1.0), (1.0, 1.3, 0.6), (2.0, 1.0, 0.2)])
def test_the_search_keeps_its_memory_limit(limit, times):
    schedule = make_schedule('zb-1p', 4, 17, limit=limit, times=times, hop=0.1)
    forward, gradient, weight = (np.cumsum(schedule.kind == kind, axis=1) for kind in (F, I, W))
    assert (forward - gradient + (gradient - weight) / 2).max() <= limit
    Schedule.from_csv(schedule.to_csv())


# ---- times ---------------------------------------------------------------------------------------------------------------

@settings(max_examples=300, deadline=None)
@given(timed())
def test_simulation_equals_the_slow_one(case):
    schedule, (f, b, w), hop, blocking, overlap = case
    made = simulate(schedule, f, b, w, hop, blocking, overlap)
    assert made.ends == pytest.approx(slow_simulation(schedule, f, b, w, hop, blocking, overlap))


@settings(max_examples=300, deadline=None)
@given(timed())
def test_nothing_runs_twice_at_once_or_before_its_input(case):
    schedule, (f, b, w), hop, blocking, overlap = case
    made = simulate(schedule, f, b, w, hop, blocking, overlap)
    for rank, row in enumerate(actions(schedule)):
        start, end = made.start[rank, :len(row)], (made.start + made.length)[rank, :len(row)]
        second = np.array([n > 0 and row[n - 1][0] == PAIR for n in range(len(row))])
        assert (start[1:][~second[1:]] >= end[:-1][~second[1:]] - 1e-9).all()
        assert end[-1] == pytest.approx(made.ends[rank])


@settings(max_examples=300, deadline=None)
@given(timed())
def test_causes_add_up_to_the_idle_time(case):
    schedule, (f, b, w), hop, blocking, overlap = case
    made = simulate(schedule, f, b, w, hop, blocking, overlap)
    assert list(made.idle) == CAUSES
    assert sum(made.idle.values()) == pytest.approx(made.makespan - made.busy, abs=1e-9)
    assert all((part >= -1e-9).all() for part in made.idle.values())
    assert hop or blocking or made.idle['communication'].max() <= 1e-9
    same = simulate(schedule, 2.0, 3.0, 1.0, hop, blocking, overlap)
    assert same.idle['imbalance'].max() <= 1e-9


@settings(max_examples=100, deadline=None)
@given(timed())
def test_memory_over_time_peaks_where_the_order_says(case):
    schedule, times, hop, blocking, overlap = case
    made, peaks = simulate(schedule, *times, hop, blocking, overlap), peak_memory(schedule)
    for rank in range(schedule.ranks):
        time, activations, weights = in_flight(made, rank)
        assert (np.diff(time) >= 0).all() and activations[-1] == pytest.approx(0) and weights[-1] == pytest.approx(0)
        assert activations.max() <= peaks[0, rank] + 1e-9 or schedule.name.startswith('dualpipe') or (np.array(times) == 0).any()


def test_a_table_has_every_rank_and_cause():
    table = timeline_table(simulate(make_schedule('zb-h1', 4, 8), hop=0.1))
    assert len(table) == 4 and set(CAUSES) < set(table.columns)
    assert (table[CAUSES].sum(axis=1) + table.busy).to_numpy() == pytest.approx(table[CAUSES].sum(axis=1)[0] + table.busy[0])


def test_blocking_receives_never_help():
    for kind in ('1f1b', 'interleaved', 'zb-h1'):
        free, blocked = (simulate(make_schedule(kind, 4, 12), hop=0.3, blocking=blocking).makespan for blocking in (False, True))
        assert blocked >= free


# ---- published numbers ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('kind', ['1f1b', 'zb-h1', 'zb-h2', 'zb-1p', 'zb-2p'])
def test_published_bubble_rates(kind):
    rows = list(load_published_bubbles().query('schedule == @kind').itertuples())
    ours = []
    for row in rows:
        times = row.f_ms, row.b_ms, row.w_ms
        period = simulate(make_schedule(kind, row.p, row.m, times=times, hop=row.hop_ms), *times, row.hop_ms).period
        ours.append(round(1 - row.m * sum(times) / period, 4))
    assert ours == [row.bubble_fraction for row in rows] and len(rows) == 12


def test_strict_interleaving_is_above_the_published_rates():
    for row in load_published_bubbles().query('schedule == "interleaved"').itertuples():
        times = np.array([row.f_ms, row.b_ms, row.w_ms])
        made = simulate(make_schedule('interleaved', row.p, row.m, row.v), *(times / row.v), row.hop_ms).makespan
        assert 0.0007 < 1 - row.m * times.sum() / made - row.bubble_fraction < 0.0036 # not reached, by p hops; see pipeline.bubble


@pytest.mark.parametrize('p', [4, 6, 8, 12, 16])
def test_v_shapes_keep_their_promise(p):
    for kind, bubble, memory in (('v-half', 1 / 2, 1 / 2), ('v-min', 2 / 3, 1 / 3)):
        made = simulate(make_schedule(kind, p, 4 * p), 0.5, 0.5, 0.5)
        assert made.makespan - 12 * p <= bubble * 3 * (p - 1)
        assert made.peak_activations.max() <= memory * p + 4 / 3


# ---- torch ---------------------------------------------------------------------------------------------------------------

def torch_rows(name, p, m, stages, **attributes):
    "Order of torch's generator, made without process groups; pairs and idle slots as they are."
    schedules = pytest.importorskip('torch.distributed.pipelining').schedules
    generator = object.__new__(schedules.get_schedule_class(name))
    generator.pp_group_size, generator._n_microbatches, generator.num_stages = p, m, stages
    generator.n_local_stages, generator._stages = stages // p, [None] * (stages // p)
    for key, value in attributes.items():
        setattr(generator, key, value)
    return [','.join(map(str, filter(None, generator._calculate_single_rank_operations(rank)))) for rank in range(p)]


@pytest.mark.parametrize('p, m', [(1, 2), (2, 4), (2, 7), (3, 7), (4, 8), (5, 13), (8, 24)])
def test_torch_orders_of_the_v_shapes(p, m):
    assert make_schedule('zb-v', p, m).to_csv().splitlines() == torch_rows('ZBVZeroBubble', p, m, 2 * p)
    if m >= 2 * p:
        assert make_schedule('dualpipe-v', p, m).to_csv().splitlines() == torch_rows('DualPipeV', p, m, 2 * p)


@pytest.mark.parametrize('p, m, v', [(2, 4, 2), (4, 8, 2), (4, 8, 3), (3, 9, 2), (8, 32, 4)])
def test_torch_order_of_interleaving(p, m, v):
    rows = torch_rows('Interleaved1F1B', p, m, p * v, number_of_rounds=m // p, microbatches_per_round=p)
    assert make_schedule('interleaved', p, m, v).to_csv().splitlines() == rows


@pytest.mark.parametrize('p, m, v', [(2, 4, 2), (4, 5, 3)])
def test_torch_looped_bfs_takes_the_same_time(p, m, v):
    theirs = Schedule.from_csv('\n'.join(torch_rows('LoopedBFS', p, m, p * v))) # it walks micro-batches backward in reverse
    assert simulate(theirs).makespan == pytest.approx(simulate(make_schedule('looped-bfs', p, m, v)).makespan)


@each_kind
def test_torch_accepts_our_orders(kind):
    schedules = pytest.importorskip('torch.distributed.pipelining').schedules
    schedule = make_schedule(kind, 4, 8)
    if schedule.copies == 2:
        return # two copies of the model have no place in torch's runtime
    order = {rank: [schedules._Action.from_str(token) for token in row.split(',')] for rank, row in enumerate(schedule.to_csv().splitlines())}
    lowered = schedules._add_send_recv(order, lambda stage: schedule.placement[stage], schedule.stages)
    assert sum(map(len, lowered.values())) > sum(map(len, order.values()))
    again = Schedule.from_csv('\n'.join(','.join(map(str, lowered[rank])) for rank in range(4)))
    assert again.to_csv() == schedule.to_csv() # reading drops what torch added


# ---- files ---------------------------------------------------------------------------------------------------------------

def test_old_notation_is_understood():
    schedule = Schedule.from_csv(OLD_NOTATION)
    assert schedule.split and not (schedule.kind == B).any()
    assert schedule.placement == (0, 1, 0, 1) and schedule.microbatches == 2
    assert simulate(schedule).makespan >= 12


def test_shared_case_file():
    path = SHARED / 'zb1p_2rank_2stagep_compute.csv'
    if not path.exists():
        pytest.skip('no ../shared here: the third-party file is not part of this repository; test_old_notation_is_understood covers the same')
    schedule = Schedule.from_csv(path.read_text())
    assert (schedule.ranks, schedule.stages, schedule.microbatches, schedule.placement) == (2, 4, 8, (0, 1, 0, 1))
    assert schedule.actions == 4 * 8 * 3 and not (schedule.kind == B).any()
    assert simulate(schedule, 0.5, 0.5, 0.5).makespan < 27


@pytest.mark.parametrize('text, words', [
    ('0F0,0Q0', "line 1, column 2: '0Q0'"), ('0F0', 'backward of stage 0'), ('0F0,0F0,0B0', '2 times instead of 1'), ('0F0,0I0', 'weight gradient of stage 0'),
    ('0F0,0B0\n0F1,0B1', r'ranks \[0, 1\]'), ('1F0,1B0', r'ranks \[\]'), ('0F1,0B1', 'micro-batch 0 passes 0'), ('', 'empty'),
    ('(0B0;0F1)OVERLAP_F_B', 'in this order'), ('(0F0)OVERLAP_F_B', 'a pair is'), ('0F0,0B0\n,', 'nothing to do')])
def test_bad_files_are_refused_with_the_place(text, words):
    with pytest.raises(ValueError, match=words):
        Schedule.from_csv(text)


def test_a_rank_may_own_more_stages_than_another():
    schedule = Schedule.from_csv('0F0,0F1,0B0,0B1\n1F0,2F0,2B0,1F1,2F1,1B0,2B1,1B1')
    assert schedule.placement == (0, 1, 1)
    assert simulate(schedule).busy.tolist() == [6, 12]


# ---- errors --------------------------------------------------------------------------------------------------------------

def test_a_deadlock_is_refused_with_its_cycle():
    with pytest.raises(ValueError) as error:
        simulate(Schedule.from_csv('0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0'))
    assert 'rank 0 stands at 0B0 and needs 1B0 of rank 1; rank 1 stands at 1F1 and needs 0F1 of rank 0' in str(error.value)


def test_a_rank_that_waits_for_itself():
    with pytest.raises(ValueError, match='rank 0 stands at 0B0 and needs 1B0 of rank 0'):
        simulate(Schedule.from_csv('0F0,0B0,1F0,1B0'))
    with pytest.raises(ValueError, match='rank 0 stands at 0W0 and needs 0B0'):
        simulate(Schedule.from_csv('0F0,0W0,0I0'))


def test_the_cycle_leaves_out_who_only_waits_for_it():
    with pytest.raises(ValueError) as error:
        simulate(Schedule.from_csv('0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n2F1,2B1,2F0,2B0'))
    assert 'rank 1' in str(error.value) and 'rank 2 stands at 2F1' in str(error.value)


def test_what_never_runs_is_named():
    lonely = Schedule('hand-made', 2, (0, 1), 1, np.array([[F, B], [F, -1]], np.int8), np.array([[0, 0], [1, 1]], np.int32), np.zeros((2, 2), np.int32))
    with pytest.raises(ValueError, match='rank 1 never runs it'):
        simulate(lonely)


@pytest.mark.parametrize('options, words', [
    (dict(f=-1.0), 'f=-1.0'), (dict(b=float('nan')), 'b=nan'), (dict(w=float('inf')), 'w=inf'), (dict(hop=-0.1), 'hop=-0.1'), (dict(overlap=float('nan')), 'overlap'),
    (dict(f=[1.0, 2.0]), 'one per stage: 4')])
def test_bad_times_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        simulate(make_schedule('1f1b', 4, 8), **options)


@pytest.mark.parametrize('arguments, words', [(('1f1b', 0, 4), 'p=0'), (('1f1b', 4, -2), 'm=-2'), (('interleaved', 4, 10), 'm=8 or m=12'), (('dualpipe', 4, 7), 'm=8'),
                                              (('1f1b', 4, 8, 2), 'one chunk'), (('zb-v', 4, 8, 4), 'exactly two chunks'), (('zigzag', 4, 8), 'unknown')])
def test_impossible_schedules_name_the_remedy(arguments, words):
    with pytest.raises(ValueError, match=words):
        make_schedule(*arguments)


# ---- pictures and traces ---------------------------------------------------------------------------------------------------

@each_kind
def test_traces_hold_every_action(kind):
    made = simulate(make_schedule(kind, 4, 8), f=1e-3, b=1e-3, w=1e-3, hop=1e-4)
    events = json.loads(made.to_trace_json())['traceEvents']
    runs = [event for event in events if event['ph'] == 'X']
    assert len(runs) == made.schedule.actions and {event['tid'] for event in runs} == set(range(4))
    assert max(event['ts'] + event['dur'] for event in runs) == pytest.approx(made.makespan * 1e6)


def test_pictures_say_what_they_show():
    made = [simulate(make_schedule(kind, 4, 8), hop=0.1) for kind in ('1f1b', 'dualpipe-v')]
    assert plot_timeline(made[0]).get_title(loc='left').startswith('1f1b:')
    figure = plot_comparison(made)
    assert len(figure.axes) == 2 and figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    assert 'rank 0 holds most' in plot_memory(made[0]).get_title(loc='left')
    with pytest.raises(ValueError, match='too many for a picture'):
        plot_timeline(simulate(make_schedule('1f1b', 64, 512)))
