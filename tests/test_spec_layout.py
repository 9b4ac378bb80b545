"""Groups of Megatron's RankGenerator, which this house must equal or reject for the same reason; properties of any grid."""
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hybridlab.spec.layout import Layout, check_grid, divisors, group_array

VECTORS = json.loads((Path(__file__).parent / 'rank_groups.json').read_text(encoding='utf-8'))
EXPERT_AXES = {'tp': 'etp', 'ep': 'ep', 'dp': 'edp', 'tp-ep': 'etp-ep', 'tp-ep-pp': 'etp-ep-pp'}


def make(case):
    return Layout(case['world'], tp=case['tp'], pp=case['pp'], cp=case['cp'], ep=case['ep'], etp=case['etp'], order=case['order'])


def rebuild(packed):
    "Groups from (first rank of every group, offsets inside a group)."
    return (np.array(packed['first'])[:, None] + np.array(packed['inside'])).tolist()


@pytest.mark.parametrize('case', VECTORS['cases'], ids=lambda case: case['name'])
def test_groups_of_megatron(case):
    layout = make(case)
    if 'code' in case:
        assert [finding.code for finding in check_grid(layout)][0] == case['code'], case['reason']
        with pytest.raises(ValueError, match='Fix:'):
            layout.groups('tp')
        return
    assert check_grid(layout) == []
    assert (layout.dp, layout.edp) == (case['dp'], case['edp'])
    for axis, packed in case['groups'].items():
        assert layout.groups(axis) == rebuild(packed), axis


def test_all_configurations_are_there():
    assert len(VECTORS['cases']) == 22 and sum('code' in case for case in VECTORS['cases']) == 3


small = st.sampled_from([1, 2, 3, 4, 8])


@settings(max_examples=60, deadline=None)
@given(tp=small, cp=small, pp=small, dp=small, order=st.permutations(['tp', 'cp', 'ep', 'dp', 'pp']))
def test_every_rank_once_in_every_axis(tp, cp, pp, dp, order):
    layout = Layout(tp * cp * pp * dp, tp=tp, cp=cp, pp=pp, dp=dp, order='-'.join(order))
    if check_grid(layout):
        assert cp > 1 and order[-1] != 'pp'  # experts would have cp * dp replicas
        return
    for axis, size in {'tp': tp, 'cp': cp, 'pp': pp, 'dp': dp, 'dp-cp': dp * cp, 'tp-pp': tp * pp}.items():
        groups = group_array(layout, axis)
        assert groups.shape == (layout.world // size, size)
        assert (np.sort(groups, axis=None) == np.arange(layout.world)).all()
        assert all((np.diff(group) > 0).all() for group in groups)
    rank = layout.world - 1
    coords = layout.rank_coords(rank)
    assert all(next(group for group in layout.groups(axis) if rank in group).index(rank) == coords[axis] for axis in ('tp', 'cp', 'pp', 'dp'))


@given(st.integers(1, 5000))
def test_divisors(n):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


@pytest.mark.parametrize('world', [16, 1024])
def test_device_mesh_is_the_same_grid(world):
    torch = pytest.importorskip('torch')
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hybridlab.spec.layout import device_mesh

    layout = Layout(world, tp=4, pp=2, ep=2, etp=2, order='tp-cp-ep-dp-pp')
    torch.distributed.init_process_group('fake', rank=world - 3, world_size=world, store=FakeStore())
    try:
        for kind, axes in (('dense', ('tp', 'dp', 'pp')), ('expert', ('etp', 'ep', 'edp', 'pp'))):
            mesh = device_mesh(layout, kind=kind)
            for axis in axes:
                assert mesh[axis].mesh.flatten().tolist() == next(group for group in layout.groups(axis) if world - 3 in group)
    finally:
        torch.distributed.destroy_process_group()
