"""The pipeline controller: order, back pressure, errors, timeouts, and no thread left behind whatever happens."""
import _thread
import json
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridlab.comm.controller import (STAGES, PipelineController, StageError, StageTimeline, StageTimeout, controller_makespan, explore_controller,
                                       plot_controller, simulate_controller)

depths, counts = st.integers(1, 5), st.integers(0, 30)
same = lambda item: item


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith('pipeline')]


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    assert threads() == []


def with_stage(stage, function, **options):
    "A controller with one stage of interest."
    return PipelineController(*(function if name == stage else same for name in STAGES), **options)


# ---- order and rounds ----------------------------------------------------------------------------------------------------

@settings(deadline=None, max_examples=60)
@given(depths, counts)
def test_results_come_in_order(depth, count):
    calls = {stage: [] for stage in STAGES}
    log = lambda stage: lambda item: (calls[stage].append(item), item)[1]
    assert PipelineController(*map(log, STAGES), depth=depth).run(range(count)) == list(range(count))
    assert all(items == list(range(count)) for items in calls.values())
    assert threads() == []


@settings(deadline=None, max_examples=30)
@given(depths, st.lists(counts, max_size=4))
def test_rounds_share_threads_and_stay_apart(depth, rounds):
    with PipelineController(lambda x: x + 1, lambda x: 2 * x, str, depth=depth) as controller:
        started = set(threading.enumerate())
        for count in rounds:
            for item in range(count):
                controller.submit(item)
            assert controller.drain() == [str(2 * (item + 1)) for item in range(count)]
            assert controller.timeline.start.shape == (count, 3)
        assert set(threading.enumerate()) <= started


def test_each_stage_has_one_thread_of_its_own():
    seen = {stage: set() for stage in STAGES}
    note = lambda stage: lambda item: (seen[stage].add(threading.current_thread().name), item)[1]
    PipelineController(*map(note, STAGES)).run(range(20))
    assert seen == {stage: {f'pipeline {stage}'} for stage in STAGES}


def test_items_may_be_none_and_values_of_any_kind():
    assert PipelineController(same, same, same).run([None, [], 0, False]) == [None, [], 0, False]


def test_leaving_the_block_finishes_what_was_handed_in():
    done = []
    with with_stage('update', done.append) as controller:
        for item in range(5):
            controller.submit(item)
    assert done == list(range(5))


def test_a_controller_runs_again_also_after_an_error():
    controller = with_stage('compute', lambda item: 1 / item)
    with pytest.raises(StageError):
        controller.run([1, 0])
    assert controller.run([1, 2]) == [1.0, 0.5] and controller.run([4]) == [0.25]


# ---- back pressure -------------------------------------------------------------------------------------------------------

@settings(deadline=None, max_examples=40)
@given(depths, st.integers(1, 20))
def test_the_timeline_obeys_the_buffers(depth, count):
    controller = PipelineController(same, same, same, depth=depth)
    controller.run(range(count))
    timeline = controller.timeline
    assert (timeline.end >= timeline.start).all() and (timeline.start[:, 0] >= timeline.submitted).all()
    assert (timeline.start[:, 1:] >= timeline.end[:, :-1]).all(), 'a stage began before its input was there'
    assert (timeline.start[1:] >= timeline.end[:-1]).all(), 'a stage worked on two items at once'
    assert (timeline.start[depth:, :-1] >= timeline.end[:-depth, 1:]).all(), 'a stage began without a free buffer'
    assert (timeline.submitted[depth:] >= timeline.end[:-depth, 0]).all(), 'the caller felt no back pressure'


@pytest.mark.parametrize('depth', [1, 2, 4])
def test_items_are_taken_only_as_far_as_the_buffers_reach(depth):
    gate, taken = threading.Event(), []
    controller = with_stage('update', lambda item: gate.wait(10), depth=depth)
    feeder = threading.Thread(target=controller.run, args=[(taken.append(n) or n for n in range(50))])
    feeder.start()
    try:
        size = -1
        while size != len(taken): # until nothing moves any more
            size = len(taken)
            time.sleep(0.1)
        # depth items between any two neighbours, the one at the blocked stage among them; one more sits with the waiting caller
        assert len(taken) == 3 * depth + 1
    finally:
        gate.set()
        feeder.join()
    assert len(taken) == 50


def test_values_are_not_kept_longer_than_needed():
    class Gradient:
        pass

    alive = weakref.WeakSet()
    most = []

    def compute(item):
        alive.add(gradient := Gradient())
        return gradient

    def update(gradient):
        most.append(len(alive))

    with PipelineController(compute, same, update, depth=2) as controller:
        for item in range(40):
            controller.submit(item)
        controller.drain()
        assert max(most) <= 6 # one at each stage, the others in buffers
        while alive: # the last thread lets go of its item right after the drain
            time.sleep(0.01)


# ---- errors --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('index', [0, 3, 9])
@pytest.mark.parametrize('depth', [1, 2])
def test_an_error_arrives_with_stage_index_and_cause(stage, index, depth):
    def fails(item):
        if item == index:
            raise LookupError('no such layer')
        return item

    with pytest.raises(StageError, match=f'{stage} failed on item {index}: LookupError: no such layer') as caught:
        with_stage(stage, fails, depth=depth).run(range(10))
    assert (caught.value.stage, caught.value.index) == (stage, index) and isinstance(caught.value.__cause__, LookupError)
    assert threads() == []


@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit])
def test_not_even_an_exit_in_a_stage_is_lost(error):
    def leaves(item):
        raise error

    with pytest.raises(StageError, match=error.__name__):
        with_stage('communicate', leaves).run([0])


def test_an_error_after_the_last_submit_arrives_at_the_end_of_the_block():
    with pytest.raises(StageError, match='item 0'), with_stage('update', lambda item: 1 / item) as controller:
        controller.submit(0)


def test_the_caller_s_own_error_wins_and_drops_what_waits():
    done = []

    def slow(item):
        time.sleep(0.02)
        done.append(item)

    with pytest.raises(ZeroDivisionError), with_stage('compute', slow, depth=5) as controller:
        for item in range(5):
            controller.submit(item)
        1 / 0
    assert len(done) < 5 and threads() == []


def test_the_first_of_two_errors_counts():
    late = threading.Event()

    def compute(item):
        if item == 1:
            late.wait(5)
            raise ValueError('second')
        return item

    def communicate(item):
        try:
            raise KeyError('first')
        finally:
            threading.Timer(0.1, late.set).start()

    with pytest.raises(StageError, match='communicate failed on item 0'):
        PipelineController(compute, communicate, same).run(range(3))


def test_an_error_of_the_iterable_passes_through():
    def items():
        yield 0
        raise OSError('disk')

    with pytest.raises(OSError, match='disk'):
        PipelineController(same, same, same).run(items())


# ---- timeouts ------------------------------------------------------------------------------------------------------------

WORDS = {
    'compute': ['compute: at work on item 4 for', 'communicate: waits for item 4 from compute', 'update: waits for item 4 from communicate'],
    'communicate': ['compute: waits with item 6 until communicate has finished item 4', 'communicate: at work on item 4', 'update: waits for item 4 from'],
    'update': ['compute: waits with item 8 until communicate has finished item 6', 'communicate: waits with item 6 until update has finished item 4',
               'update: at work on item 4'],
}


@pytest.mark.parametrize('stage', STAGES)
def test_a_timeout_says_who_waits_for_whom(stage):
    hangs = with_stage(stage, lambda item: time.sleep(1.5) if item == 4 else item, timeout_s=1)
    with pytest.raises(StageTimeout, match='no stage finished an item in 1 s') as caught:
        hangs.run(range(20))
    assert all(words in str(caught.value) for words in WORDS[stage]), str(caught.value)


def test_the_timeout_counts_from_the_last_progress():
    assert with_stage('communicate', lambda item: time.sleep(0.05), timeout_s=1).run(range(25)) == [None] * 25 # 1.25 s in all


def test_a_function_that_never_returns_is_named_and_does_not_hold_the_caller():
    gate, started = threading.Event(), time.monotonic()
    with pytest.warns(UserWarning, match='pipeline update: the function has not returned'), pytest.raises(StageTimeout):
        with_stage('update', lambda item: gate.wait(60), timeout_s=0.1).run(range(5))
    assert time.monotonic() - started < 30 and threads() == ['pipeline update']
    gate.set()
    while threads():
        time.sleep(0.01)


def test_an_interrupt_of_the_caller_ends_everything():
    begun = threading.Event()

    def communicate(item):
        if not begun.is_set():
            begun.set()
            _thread.interrupt_main()
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        with_stage('communicate', communicate).run(range(1000))
    assert threads() == []


# ---- use -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('options', [{'depth': 0}, {'depth': 1.5}, {'depth': '2'}, {'timeout_s': 0}, {'timeout_s': float('inf')}, {'timeout_s': float('nan')}])
def test_bad_options(options):
    with pytest.raises(ValueError, match='integer of 1 or more and a finite time above 0 s'):
        PipelineController(same, same, same, **options)


def test_use_without_start_and_double_start():
    controller = PipelineController(same, same, same)
    controller.stop()
    for call in (lambda: controller.submit(1), controller.drain):
        with pytest.raises(RuntimeError, match='not running'):
            call()
    with controller:
        with pytest.raises(RuntimeError, match='running already'):
            controller.start()
        controller.stop()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        controller.start()
        controller.submit(1)
        controller.stop()


# ---- model ---------------------------------------------------------------------------------------------------------------

times = st.lists(st.floats(0, 10), min_size=3, max_size=3)


@settings(deadline=None)
@given(times, st.integers(1, 20), depths)
def test_closed_form_is_the_longest_path(stage_s, items, depth):
    assert simulate_controller([stage_s] * items, depth).makespan == pytest.approx(controller_makespan(stage_s, items, depth))


@settings(deadline=None)
@given(st.lists(times, min_size=1, max_size=15), depths)
def test_more_buffers_never_hurt_and_bounds_hold(seconds, depth):
    seconds, timeline = np.array(seconds), simulate_controller(seconds, depth)
    more = simulate_controller(seconds, depth + 1).makespan
    assert max(seconds.sum(0).max(), seconds.sum(1).max()) <= more * (1 + 1e-9) and more <= timeline.makespan * (1 + 1e-9)
    assert timeline.makespan <= seconds.sum() * (1 + 1e-9)
    table = timeline.table()
    idle = table.start - table.waited - table.blocked # in the ideal, every gap has one of the two causes
    free = table.groupby('stage').end.shift(fill_value=0.0)
    assert np.allclose(idle, free)


def test_real_threads_follow_the_model():
    seconds = np.random.default_rng(1).uniform(0.001, 0.01, (10, 3))
    sleep = lambda stage: lambda n: (time.sleep(seconds[n, stage]), n)[1]
    controller = PipelineController(*map(sleep, range(3)), depth=2)
    controller.run(range(10))
    ideal = simulate_controller(seconds, 2)
    assert (controller.timeline.end >= ideal.end * 0.99).all(), 'sleeping is never shorter than asked for, so nothing may be earlier'


@pytest.mark.parametrize('items', [0, 1, 5])
def test_trace_and_plot(items):
    timeline = simulate_controller([[0.1, 0.3, 0.2]] * items, 1)
    events = json.loads(timeline.to_trace_json(rank=2))['traceEvents']
    work = [event for event in events if event['ph'] == 'X' and event['cat'] != 'idle']
    assert len(work) == 3 * items and {event['pid'] for event in events} == {2}
    assert sum(event['dur'] for event in work) == pytest.approx(0.6e6 * items)
    assert [event['args']['name'] for event in events if event['ph'] == 'M'] == list(STAGES)
    ax = plot_controller(timeline)
    assert 'Depth 1' in ax.get_title(loc='left') and [label.get_text() for label in ax.get_yticklabels()] == list(STAGES)


def test_timeline_is_frozen():
    timeline = simulate_controller([[1, 1, 1]])
    assert isinstance(timeline, StageTimeline)
    with pytest.raises(AttributeError):
        timeline.depth = 3


def test_widget():
    widget = explore_controller()
    for name, value in (('spread', 1.0), ('depth', 4), ('items', 1), ('compute_ms', 0.0), ('communicate_ms', 0.0), ('update_ms', 0.0)):
        before = widget.image.value
        widget.controls[name].value = value
        assert widget.image.value != before and not widget.message.value, name
