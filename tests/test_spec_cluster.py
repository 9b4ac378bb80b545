"""Clusters: what the library ships, sources of every value, and files of users."""
import tomllib
from importlib.resources import files

import pytest
from hypothesis import given, settings, strategies as st

from hybridlab.spec.cluster import check_cluster, cluster_sources, cluster_table, list_clusters, load_cluster, plot_links, with_cards

TABLES = tomllib.loads((files('hybridlab.data') / 'clusters.toml').read_text(encoding='utf-8'))
HOWS = {'read', 'measured', 'derived', 'recalled'}
each_cluster = pytest.mark.parametrize('name', list_clusters())


def test_issue_list_is_complete():
    assert {'atlas-800t-a2', 'atlas-800t-a2-910b3', 'atlas-800t-a2-910b4', 'atlas-900-a3', 'atlas-800-910a', 'dgx-a100', 'dgx-h100', 'shaped-4x2'} <= set(list_clusters())


@each_cluster
def test_every_value_has_a_source(name):
    cluster = load_cluster(name)
    assert check_cluster(TABLES, name) == []
    for field, fact in cluster_sources(name).items():
        assert fact and fact[0] in HOWS and len(fact[1]) > 5, field
    assert cluster.links[-1].span == 0 and cluster.cards == cluster.servers * cluster.cards_per_server
    assert cluster.device.usable_bytes <= cluster.device.hbm_bytes


@pytest.mark.parametrize('kind', ['device', 'cluster'])
def test_sources_name_fields_once(kind):
    for name, table in TABLES[kind].items():
        fields = [field for row in table['sources'] for field in row['fields'] if field != '*']
        assert len(set(fields)) == len(fields) and set(fields) <= set(table), name


@pytest.mark.parametrize('name, pairs', [
    ('atlas-800t-a2', {(0, 7): 'hccs', (7, 8): 'roce'}), ('atlas-800-910a', {(0, 3): 'hccs', (3, 4): 'pcie', (0, 8): 'roce'}),
    ('atlas-900-a3', {(2, 3): 'sio', (3, 4): 'ub-server', (15, 16): 'ub-pod'}), ('dgx-h100', {(0, 7): 'nvlink', (0, 8): 'infiniband'})])
def test_links(name, pairs):
    cluster = load_cluster(name)
    assert {pair: cluster.link(pair).name for pair in pairs} == pairs


def test_rates_of_both_ascend_generations():  # '392 GB/s' is both directions of a 910B and one direction of a 910C of two dies
    a2, a3 = load_cluster('atlas-800t-a2'), load_cluster('atlas-900-a3')
    assert 2 * a2.links[0].bytes_per_s == 392e9 == 2 * a3.links[2].bytes_per_s
    assert with_cards(a3, 1000).link([767, 768]).name == 'roce'
    assert with_cards(a3, 16384).servers == 1024


def test_every_mistake_of_a_file(tmp_path):
    file = tmp_path / 'mine.toml'
    file.write_text('[device.npu]\nvendor = "huawei"\ncores = 0\nflops = { fp8 = 1e15 }\nhbm_bytes = 1\nhbm_bytes_per_s = 1\nusable_bytes = 1\nalignment = { bf16 = 16 }\n'
                    '[cluster.mine]\ndevice = "npu"\ncard_per_server = 8\nservers = 2\nlinks = [{ name = "a", shape = "star", span = 8, bytes_per_s = 0, alpha = "1us" }]\n',
                    encoding='utf-8')
    with pytest.raises(ValueError, match=r'8 errors') as caught:
        load_cluster('mine', file)
    for part in ('ascend, nvidia, cpu', 'cores=', 'flops=', 'Did you mean cards_per_server?', 'cards_per_server is missing', 'mesh, ring, switch', 'bytes_per_s=', 'alpha=',
                 'link 1', '[device.npu]', str(file)):
        assert part in str(caught.value)


def test_infiniband_on_an_npu():
    link = {'name': 'infiniband', 'shape': 'switch', 'span': 0, 'bytes_per_s': 25e9, 'alpha': 1e-6}
    table = {'device': 'ascend-910b1', 'cards_per_server': 8, 'servers': 2, 'links': [link | {'name': 'hccs', 'span': 8}, link]}
    [finding] = check_cluster({'cluster': {'mine': table}}, 'mine')
    assert finding.code == 'cluster.infiniband' and finding.severity == 'warning' and 'RoCE' in finding.message


values = st.one_of(st.integers(-2, 10**6), st.booleans(), st.none(), st.floats(), st.text(max_size=3), st.lists(st.one_of(st.integers(), st.dictionaries(
    st.sampled_from(['name', 'span', 'shape', 'alpha', 'bytes_per_s']), st.one_of(st.integers(0, 9), st.text(max_size=2)))), max_size=3))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(['device', 'cards_per_server', 'servers', 'links', 'x']), values))
def test_check_cluster_never_fails(table):
    assert all(finding.fix for finding in check_cluster({'cluster': {'mine': table}, 'device': 3}, 'mine'))


def test_table_and_plot():
    assert len(cluster_table()) == sum(len(load_cluster(name).links) for name in list_clusters())
    assert 'half used' in plot_links(load_cluster('atlas-900-a3')).get_title(loc='left')
