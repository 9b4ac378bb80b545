"""Schedules on real ranks: torch's private runtime as we use it, gradients of any order, measured times, failures that speak."""
import inspect
import random

import numpy as np
import pytest
import torch
from torch.distributed.pipelining import PipelineStage, schedules

from hybridlab.core.launch import RankError, RankTimeout, run
from hybridlab.pipeline.balance import split_layers
from hybridlab.pipeline.execute import (Action, Pipeline, RankStep, measured_timeline, plot_execution, predicted_timeline, run_schedule,
                                        runtime_costs)
from hybridlab.pipeline.schedule import B, F, I, Schedule, W, make_schedule, simulate
from hybridlab.pipeline.transformer import build_stages, char_batch, gradients, load_text, loss_fn, reference_gradients

TEXT, ALPHABET = load_text()

# ---- the contract with torch ---------------------------------------------------------------------------------------------


def test_torch_is_the_version_that_was_read():
    assert torch.__version__.split('+')[0].startswith('2.13.'), \
        'The pipeline runtime of torch is private. Read this file against the new version, then change the version here and in settings.ini.'


def test_the_private_runtime_is_as_we_use_it():
    runtime = schedules._PipelineScheduleRuntime
    parameters = inspect.signature(schedules.PipelineScheduleMulti.__init__).parameters
    assert list(parameters)[1:4] == ['stages', 'n_microbatches', 'loss_fn'] and parameters['scale_grads'].default is True
    assert list(inspect.signature(runtime._load_csv).parameters) == ['self', 'filename', 'format']
    assert {'target', 'losses', 'return_outputs'} <= set(inspect.signature(runtime.step).parameters)


def test_the_stage_is_as_we_wrap_it():
    first = lambda method: list(inspect.signature(method).parameters)[1]
    assert first(PipelineStage.forward_one_chunk) == 'fwd_chunk_id'
    assert first(PipelineStage.backward_one_chunk) == first(PipelineStage.backward_weight_one_chunk) == 'bwd_chunk_id'
    source = inspect.getsource(schedules._PipelineScheduleRuntime._step_microbatches)
    for call in ('stage.forward_one_chunk(', 'stage.backward_one_chunk(', 'stage.backward_weight_one_chunk(', 'full_backward=False'):
        assert call in source, f'{call} is gone from the runtime: the log of actions would miss it'


@pytest.mark.parametrize('token', ['0F0', '11B3', '2I7', '3W12', '(0F1;1B0)OVERLAP_F_B'])
def test_tokens_are_read(token):
    assert str(schedules._Action.from_str(token)) == token


def test_losses_are_kept_by_arrival():
    "The reason why an order in which the last stage takes micro-batches out of order is refused."
    assert '_internal_losses.append(loss)' in inspect.getsource(schedules._PipelineSchedule._maybe_compute_loss)


# ---- gradients -----------------------------------------------------------------------------------------------------------

def random_schedule(seed, stages, ranks, m):
    "Any order that can be finished: actions in a random order that respects what they need, on random ranks."
    draw = random.Random(seed)
    placement = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    draw.shuffle(placement)
    todo, rows = {(kind, s, i) for kind in 'FIW' for s in range(stages) for i in range(m)}, [[] for _ in range(ranks)]
    needs = lambda kind, s, i: ([('F', s - 1, i)] if s else []) + ([('F', s, i - 1)] if i else []) if kind == 'F' else \
        [('F', s, i)] + ([('I', s + 1, i)] if s + 1 < stages else []) if kind == 'I' else [('I', s, i)]
    while todo:
        ready = sorted(action for action in todo if not any(need in todo for need in needs(*action)))
        kind, s, i = draw.choice(ready)
        todo.remove((kind, s, i))
        rows[placement[s]].append(f'{s}{kind}{i}')
    return Schedule.from_csv('\n'.join(map(','.join, rows)))


def torch_zb_v(ranks, m):
    "Torch's own ZB-V order, through our reader."
    stages = [type('Stage', (), {'num_stages': 2 * ranks, 'group_size': ranks, 'group_rank': 0, 'stage_index': n, 'is_last': n == 2 * ranks - 1, 'submod': torch.nn.Identity()})()
              for n in (0, 2 * ranks - 1)]
    order = schedules.ScheduleZBVZeroBubble(stages, m, lambda output, target: output).pipeline_order
    return Schedule.from_csv('\n'.join(','.join('' if action is None else str(action) for action in order[rank]) for rank in range(ranks)))


CASES = {2: [*(make_schedule(name, 2, 4) for name in ('1f1b', 'gpipe', 'interleaved', 'zb-h1', 'zb-h2', 'zb-v')),
             make_schedule('1f1b', 2, 1), make_schedule('interleaved', 2, 6), random_schedule(0, 5, 2, 4), random_schedule(1, 3, 2, 6)],
         4: [*(make_schedule(name, 4, 8) for name in ('1f1b', 'interleaved', 'looped-bfs', 'zb-h1', 'zb-h2', 'zb-1p', 'zb-2p', 'zb-v', 'v-half', 'v-min', 'dualpipe-v')),
             make_schedule('1f1b', 4, 2), make_schedule('zb-h1', 4, 6), random_schedule(2, 8, 4, 5), torch_zb_v(4, 8)]}


def gradients_of(schedule, head):
    stages = build_stages(split_layers(8, schedule.stages, head=head).stages, len(ALPHABET), width=16)
    step = run_schedule(schedule, stages, char_batch(TEXT, 2 * schedule.microbatches), loss_fn)
    return gradients(stages), step.losses


@pytest.fixture(scope='module')
def executed():
    "Gradients and losses of every case and rank; one launch per number of ranks."
    def on_rank(cases):
        torch.set_num_threads(1)
        return [gradients_of(schedule, head) for schedule in cases for head in (0.0, 3.0)]

    return {ranks: list(zip(*run(on_rank, cases, world_size=ranks))) for ranks, cases in CASES.items()}


@pytest.mark.parametrize('ranks, place', [(ranks, place) for ranks, cases in CASES.items() for place in range(len(cases))])
def test_gradients_equal_those_of_one_process(executed, ranks, place):
    schedule = CASES[ranks][place]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, = build_stages(['EttttttttL'], len(ALPHABET), width=16)
    want, losses = reference_gradients(model, char_batch(TEXT, 2 * schedule.microbatches), schedule.microbatches)
    torch.set_num_threads(threads)
    for parts in executed[ranks][2 * place:2 * place + 2]:  # an even and an uneven split
        got = {name: value for part, _ in parts for name, value in part.items()}
        assert got.keys() == want.keys()
        assert max((got[name] - want[name]).abs().max() for name in want) <= 1e-7
        assert [loss for _, found in parts for loss in found] == losses
        if schedule.microbatches in (1, 2, 4, 8) and schedule.name != 'from file':  # a random order adds in a random order
            assert all(torch.equal(got[name], want[name]) for name in want)


# ---- times ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', ['1f1b', 'interleaved', 'zb-h2', 'zb-v', 'dualpipe-v'])
def test_a_simulated_log_becomes_the_same_timeline_and_prediction(name):
    "measured_timeline, runtime_costs and predicted_timeline on a log that the simulation wrote."
    schedule = make_schedule(name, 4, 8)
    rng = np.random.default_rng(0)
    f, b, w = rng.uniform(0.5, 2, (3, schedule.stages))
    known = simulate(schedule, f, b, w, hop=0.0)
    letters = {4: F}
    steps = [RankStep((), tuple(Action(letters.get(int(kind), int(kind)), int(s), int(i), 7 + start, 7 + start + length)
                                for kind, s, i, start, length in zip(*(x[rank] for x in (schedule.kind, schedule.stage, schedule.microbatch, known.start, known.length)))
                                if kind >= 0)) for rank in range(4)]
    measured = measured_timeline(schedule, steps)
    assert measured.makespan == pytest.approx(known.makespan) and np.allclose(measured.ends, known.ends)
    if name != 'dualpipe-v':  # its pairs run together in the simulation and one after the other on torch
        assert runtime_costs(measured) == pytest.approx((0.0, 0.0), abs=1e-9)
        assert predicted_timeline(measured).makespan == pytest.approx(known.makespan)
        assert plot_execution(measured, known).axes


def test_a_log_of_another_schedule_is_refused():
    steps = [RankStep((), (Action(B, rank, 0, 0.0, 1.0),)) for rank in range(2)]
    with pytest.raises(ValueError, match='rank 0 did not run 1f1b'):
        measured_timeline(make_schedule('1f1b', 2, 2), steps)


def test_pace_and_groups():
    "Two pipelines of two ranks side by side; every action lasts at least its pace, in the order of the schedule."
    schedule = make_schedule('zb-h1', 2, 4)

    def on_rank():
        import torch.distributed as dist

        groups = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
        layers = [torch.nn.Linear(8, 8) for _ in range(2)]
        x = torch.ones(8, 8)
        return Pipeline(schedule, layers, torch.nn.functional.mse_loss, (0.002, [0.001, 0.003], 0.0), groups[dist.get_rank() // 2]).step(x, x)

    steps = run(on_rank, world_size=4)
    for pair in (steps[:2], steps[2:]):
        timeline = measured_timeline(schedule, pair)
        assert (timeline.length[schedule.kind == F] >= 0.002).all()
        assert (timeline.length[1][schedule.kind[1] == I] >= 0.003).all()
        assert len(pair[1].losses) == 4 and pair[0].losses == ()


# ---- failures ------------------------------------------------------------------------------------------------------------

def step_of(csv, modules=2, samples=8):
    x = torch.ones(samples, 8)
    return run_schedule(Schedule.from_csv(csv), [torch.nn.Linear(8, 8) for _ in range(modules)], (x, x), torch.nn.functional.mse_loss)


SOUND = '0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1'


@pytest.mark.parametrize('arguments, words', [
    (('0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1',), 'this order deadlocks'),
    ((SOUND, 3), 'has 2 stages, 3 modules were given'),
    ((SOUND, 2, 7), '7 samples do not divide into m=2 micro-batches; give 6 or 8'),
    (('0F0,0B0\n1F0,1B0\n2F0,2B0', 3), 'is for 3 ranks, the process group has 2; launch 3'),
])
def test_what_cannot_run_is_refused_with_a_reason(arguments, words):
    with pytest.raises(RankError, match=words):
        run(step_of, *arguments, world_size=2, timeout_s=60)


def test_ranks_with_different_schedules_end_with_who_waits():
    def on_rank():
        import torch.distributed as dist

        return step_of(SOUND, samples=8) if dist.get_rank() == 0 else step_of('0F0,0B0\n1F0,1B0', samples=4)

    with pytest.raises(RankTimeout, match='waiting: rank 0 in step') as caught:
        run(on_rank, world_size=2, timeout_s=8)
    assert caught.value.missing == (1,)
