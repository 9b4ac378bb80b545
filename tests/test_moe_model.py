"""The language model with experts: losses and gradients on 2 and 4 ranks against one process; balance over training."""
import numpy as np
import pytest
import torch

from hybridlab.core.launch import run
from hybridlab.moe.dispatch import build_expert_groups, expert_shard, group_rank
from hybridlab.moe.language_model import EXPERTS, History, MoEShape, init_parameters, language_loss, plot_losses, train
from hybridlab.pipeline.transformer import char_batch, load_text
from hybridlab.spec.layout import Layout

TEXT, ALPHABET = load_text()
LAYOUTS = {2: {'ep 2': Layout(2, tp=1, pp=1, ep=2, etp=1), 'etp 2': Layout(2, tp=1, pp=1, ep=1, etp=2)},
           4: {'ep 2': Layout(4, tp=1, pp=1, ep=2, etp=1), 'ep 4': Layout(4, tp=1, pp=1, ep=4, etp=1), 'ep 2, etp 2': Layout(4, tp=1, pp=1, ep=2, etp=2)}}
RULES = [(None, False, 'none', 'flat'), (1.25, False, 'aux', 'flat'), (1.25, True, 'bias', 'flat'), (1.25, True, 'none', 'hierarchical'), (None, False, 'aux', 'deduplicated')]


def make_chunks(step, ranks):
    return list(zip(*(part.chunk(ranks) for part in char_batch(TEXT, 2 * ranks, seed=step))))


def train_run(rule, world, dtype, steps, groups=None):
    factor, padded, balance, mode = rule
    return train(MoEShape(len(ALPHABET), capacity_factor=factor), [make_chunks(step, world) for step in range(steps)], balance, 0.03, groups, mode, padded, dtype=dtype)


def train_everything(world, dtype, steps):
    torch.set_num_threads(1)
    made = {name: build_expert_groups(layout, world // 2) for name, layout in LAYOUTS[world].items()}
    return {(name, rule): (train_run(rule, world, dtype, steps, groups), (group_rank(groups.ep), group_rank(groups.etp))) for name, groups in made.items() for rule in RULES}


def piece(name, value, layout, seat):
    if not name.endswith(EXPERTS):
        return value
    return np.split(np.split(value, layout.ep)[seat[0]], layout.etp, axis=2 if name.endswith('w_in') else 1)[seat[1]]


@pytest.mark.parametrize('world, dtype, limit', [(2, torch.float32, 1e-6), (4, torch.float32, 1e-6), (4, torch.float64, 1e-13)])
def test_losses_and_gradients_equal_one_process(world, dtype, limit):
    steps = 3
    by_rank, known = run(train_everything, world, dtype, steps, world_size=world, timeout_s=300), {}
    for case in by_rank[0]:
        name, rule = case
        if rule not in known:
            known[rule] = train_run(rule, world, dtype, steps)
        want = known[rule]
        for history, seat in (rank[case] for rank in by_rank):
            assert np.abs(history.losses[:1] - want.losses[:1]).max() < limit
            assert np.abs(history.losses - want.losses).max() < 1e3 * limit  # after two steps of the optimizer
            assert (history.counts[0] == want.counts[0]).all() and history.dropped[0] == want.dropped[0]
            for key, got in history.gradients.items():
                whole = piece(key, want.gradients[key], LAYOUTS[world][name], seat)
                assert got.shape == whole.shape and np.abs(got - whole).max() < limit, f'{case}, {key}: {np.abs(got - whole).max()}'
    assert known[RULES[1]].dropped[0] > 0.05  # the capacity was felt


def test_capacity_depends_on_how_the_batch_is_cut():
    whole, cut = (train_run((1.25, False, 'none', 'flat'), ranks, torch.float64, 1) for ranks in (1, 4))
    assert whole.dropped[0] < 1 and cut.dropped[0] > 0
    one_cut = train(MoEShape(len(ALPHABET), capacity_factor=1.25), [make_chunks(0, 4)], dtype=torch.float64)
    joined = train(MoEShape(len(ALPHABET), capacity_factor=1.25), [[tuple(torch.cat(parts) for parts in zip(*make_chunks(0, 4)))]], dtype=torch.float64)
    assert one_cut.dropped[0] > joined.dropped[0]


def test_gradients_by_finite_differences():
    shape = MoEShape(len(ALPHABET), layers=1, width=8, heads=2, experts=4, columns=8)
    parameters, batch = init_parameters(shape, dtype=torch.float64), make_chunks(0, 1)[0]
    loss, *_ = language_loss(parameters, batch, shape, aux=0.01)
    loss.backward()
    for name in ('0.qkv', '0.router', '0.w_in', '0.w_out', 'head'):
        value, place = parameters[name].data.view(-1), int(parameters[name].grad.abs().argmax())
        sides = []
        for step in (1e-6, -1e-6):
            value[place] += step
            sides.append(language_loss(parameters, batch, shape, aux=0.01)[0].item())
            value[place] -= step
        assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(parameters[name].grad.view(-1)[place].item(), rel=1e-4)


def test_parts_of_the_parameters_make_the_whole():
    def body():
        groups = build_expert_groups(Layout(4, tp=1, pp=1, ep=2, etp=2))
        mine = init_parameters(shape, groups=groups)
        return {name: value.detach() for name, value in mine.items()}, (group_rank(groups.ep), group_rank(groups.etp))

    shape = MoEShape(40)
    whole = init_parameters(shape)
    for parts, seat in run(body, world_size=4):
        assert parts.keys() == whole.keys()
        assert all(np.array_equal(value.numpy(), piece(name, whole[name].detach().numpy(), Layout(4, tp=1, pp=1, ep=2, etp=2), seat)) for name, value in parts.items())


def test_balance_is_kept_by_loss_and_bias_only():
    shape, batches = MoEShape(len(ALPHABET)), [make_chunks(step, 4) for step in range(40)]
    runs = {balance: train(shape, batches, balance, 0.03) for balance in ('none', 'aux', 'bias')}
    last = {name: history.imbalance[-10:].mean() for name, history in runs.items()}
    assert last['none'] > 3 > 2.6 > max(last['aux'], last['bias'])
    assert all(history.losses[-5:].mean() < history.losses[:5].mean() - 0.8 for history in runs.values())
    assert 'nats' in plot_losses(runs, smooth=5).get_ylabel()


def test_wrong_balance():
    with pytest.raises(ValueError, match="balance='loss'; valid here: none, aux, bias"):
        train(MoEShape(10), [], 'loss')


def test_imbalance_of_a_history():
    history = History(np.zeros(1), np.array([[[4, 0], [2, 2]]]), np.zeros(1), {})
    assert history.imbalance.tolist() == [2.0]
