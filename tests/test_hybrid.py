"Every parallel axis at once on eight real ranks, beside one process."
import os
import threading

import numpy as np
import pytest
import torch
from torch import nn

from hybridlab.core.launch import run
from hybridlab.moe.hybrid import GradientSync, HybridTrainer, build_hybrid_groups, parameter_cuts, whole_stages
from hybridlab.pipeline.schedule import make_schedule
from hybridlab.pipeline.transformer import char_batch, load_text, loss_fn
from hybridlab.spec.layout import Layout

TEXT, ALPHABET = load_text()
VOCABULARY, WIDTH, CONTEXT, SAMPLES, MICRO = -(-len(ALPHABET) // 8) * 8, 32, 16, 8, 2
LAYOUTS = {'tp2 pp2 dp2': (Layout(8, tp=2, pp=2), 0), 'tp2 pp2 ep2': (Layout(8, tp=2, pp=2, ep=2, etp=1), 4), 'tp4 dp2': (Layout(8, tp=4, pp=1), 0)}


def stages_of(layout, experts):
    return whole_stages({1: ['EttL'], 2: ['Et', 'tL']}[layout.pp], VOCABULARY, WIDTH, 4, CONTEXT, experts)


def trainer_of(layout, experts, m=MICRO, bits=None):
    return HybridTrainer(layout, make_schedule('1f1b', layout.pp, m), stages_of(layout, experts), (SAMPLES // layout.dp // m, CONTEXT), bits)


def alone(layout, experts, steps=1):
    "Losses of some steps and the gradients of the first."
    whole, losses, first = nn.Sequential(*stages_of(layout, experts)), [], None
    optimizer = torch.optim.AdamW(whole.parameters(), 3e-3)
    for step in range(steps):
        x, y = char_batch(TEXT, SAMPLES, CONTEXT, step)
        optimizer.zero_grad()
        losses.append(loss_fn(whole(x), y))
        losses[-1].backward()
        first = first or {name.partition('.')[2]: p.grad.clone() for name, p in whole.named_parameters()}
        optimizer.step()
    return [loss.item() for loss in losses], first


def compare(name):
    "Largest relative error of a gradient of this rank, and the losses of the micro-batches."
    layout, experts = LAYOUTS[name]
    _, wanted = alone(layout, experts)
    trainer = trainer_of(layout, experts)
    losses = trainer.step(*char_batch(TEXT, SAMPLES, CONTEXT, 0))
    errors = [((p.grad - cut.of(wanted[source])).norm() / cut.of(wanted[source]).norm().clamp(min=1e-12)).item() for source, p, cut in parameter_cuts(trainer.stages)]
    trainer.close()
    return max(errors), losses


def train(bits, steps):
    trainer, losses = trainer_of(*LAYOUTS['tp2 pp2 ep2'], bits=bits), []
    optimizer = torch.optim.AdamW(trainer.parameters, 3e-3)
    for step in range(steps):
        losses.append(trainer.step(*char_batch(TEXT, SAMPLES, CONTEXT, step)))
        optimizer.step()
    trainer.close()
    return losses


def quantized_sums():
    "A gradient sum over dp with and without bits, on one server: every rank has other numbers."
    groups, found = build_hybrid_groups(Layout(8, tp=2, pp=2)), []
    for bits in (None, 8):
        sync = GradientSync(groups, bits=bits)
        x = torch.linspace(-1, 1, 1000) * (1 + torch.distributed.get_rank())
        found.append(sync.reducers['dp'](x.clone(), key='x'))
        sync.close()
    return found


def open_threads():
    "Threads of this process with the first trainer closed, and with three more closed."
    found = []
    for count in (1, 3):
        for _ in range(count):
            trainer = trainer_of(*LAYOUTS['tp2 pp2 ep2'])
            trainer.step(*char_batch(TEXT, SAMPLES, CONTEXT, 0))
            trainer.close()
        found.append(len(os.listdir('/proc/self/task')) if os.path.isdir('/proc/self/task') else threading.active_count())
    return found


@pytest.fixture(scope='module')
def results():
    def on_rank():
        torch.set_num_threads(1)
        return {'gradients': {name: compare(name) for name in LAYOUTS}, 'plain': train(None, 10), 'int8': train(8, 10), 'sums': quantized_sums(), 'threads': open_threads()}
    return run(on_rank, world_size=8, timeout_s=400)


@pytest.mark.parametrize('name', LAYOUTS)
def test_gradients_and_loss_of_one_process(results, name):
    errors, losses = zip(*(rank['gradients'][name] for rank in results))
    assert max(errors) < 1e-5
    assert np.mean([loss for rank in losses for loss in rank]) == pytest.approx(alone(*LAYOUTS[name])[0][0], rel=1e-5)
    assert sum(bool(rank) for rank in losses) == 8 // LAYOUTS[name][0].pp  # the ranks of the last stage


def losses_of(results, key):
    return np.array([[np.mean(step) for step in rank[key]] for rank in results if rank[key][0]]).mean(axis=0)


def test_loss_curves_lie_on_each_other(results):
    wanted, _ = alone(*LAYOUTS['tp2 pp2 ep2'], steps=10)
    assert losses_of(results, 'plain') == pytest.approx(wanted, rel=1e-4)


def test_int8_stays_within_three_percent_and_is_not_the_same(results):
    plain, int8 = losses_of(results, 'plain'), losses_of(results, 'int8')
    assert int8 == pytest.approx(plain, rel=0.03)
    assert np.abs(int8 - plain).max() > 1e-6


def test_bits_reach_the_sum_within_one_server(results):
    whole, bits = results[0]['sums']
    assert not torch.equal(whole, bits)
    assert torch.allclose(whole, bits, atol=0.05 * whole.abs().max().item())
    ranks = next(ranks for ranks in Layout(8, tp=2, pp=2).groups('dp') if 0 in ranks)
    assert torch.allclose(whole, torch.linspace(-1, 1, 1000) * sum(1 + rank for rank in ranks))


def test_closed_trainers_leave_no_threads(results):
    for first, later in (rank['threads'] for rank in results):
        assert later <= first + 3


def test_heads_that_do_not_divide():
    def on_rank():
        with pytest.raises(ValueError, match='heads: 3 do not divide over 2 ranks'):
            HybridTrainer(Layout(2, tp=2, pp=1), make_schedule('1f1b', 1, 1), whole_stages(['EtL'], VOCABULARY, 48, 3, CONTEXT), (1, CONTEXT))
        return True
    assert run(on_rank, world_size=2) == [True, True]
