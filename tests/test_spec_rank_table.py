"""Rank tables: one known defect each, every version, four thousand ranks, and files that mean harm."""
import copy
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from hybridlab.spec.cluster import load_cluster, with_cards
from hybridlab.spec.rank_table import (
    MAX_BYTES, VERSIONS, LinkError, check_rank_table, link_timeouts, merge_rank_tables, missing_ranks, read_rank_table, ring_hops, super_pod_of, table_to_cluster,
    visible_devices, write_rank_table)

TABLES = Path(__file__).parent / 'rank_tables'
VERDICTS = { # file: (severity, code, words of the message)
    'good_v1_0_2x8': None, 'good_v1_2_superpod_2x16': None,
    'good_legacy_template2': ('info', 'legacy', 'ranks follow the order'),
    'bad_dup_device_ip': ('error', 'device_ip', '198.51.100.10 is used by rank 0 and rank 8'),
    'bad_missing_rank_11': ('error', 'rank_id', 'rank 11 missing; 15 devices'),
    'bad_server_count': ('error', 'count', 'server_count says 3, server_list has 2'),
    'bad_dup_rank': ('error', 'rank_id', 'rank 9 more than once, rank 10 missing'),
    'bad_status': ('error', 'status', "'initializing': not usable yet"),
    'bad_v1_2_no_super_pod_id': ('error', 'type', 'super_pod_id is missing'),
    'bad_dup_super_device_id': ('error', 'super_device_id', "super_device_id 0 stands 2 times in super pod '0'"),
    'bad_mixed_ip_family': ('error', 'ip_family', 'rank 8 is IPv6, the others IPv4'),
    'bad_multi_node_no_device_ip': ('error', 'no_device_ip', '16 of 16 devices have no device_ip'),
    'bad_dup_server_id': ('error', 'server_id', "'node_0' stands 2 times"),
    'bad_dup_device_id': ('error', 'device_id', "device_id 3 stands 2 times on 'node_0'"),
    'warn_superpod_fields_but_v1_0': ('warning', 'version', 'it runs in plain server mode'),
    'warn_interleaved_ranks': ('warning', 'interleaved', '16 of 16 ring hops leave a server instead of 2'),
}


def test_all_tables_are_judged():
    assert {path.stem for path in TABLES.glob('*.json')} == set(VERDICTS)


@pytest.mark.parametrize('name', VERDICTS)
def test_verdict(name):
    findings, expected = check_rank_table(TABLES / f'{name}.json'), VERDICTS[name]
    if expected is None:
        assert findings == []
        return
    severity, code, words = expected
    extra = ['uneven'] if name == 'bad_missing_rank_11' else []
    assert [finding.code.removeprefix('rank_table.') for finding in findings] == [code, *extra]  # one line per defect
    assert findings[0].severity == severity and words in findings[0].message and findings[0].fix
    if extra:
        assert 'node_0 has 8, node_1 has 7' in findings[1].message


def example_910a():
    "Eight cards of one server on four subnets, as MindSpore's examples have it."
    cards = [{'device_id': str(n), 'device_ip': f'198.51.{100 + n % 4}.{100 + n // 4}', 'rank_id': str(n)} for n in range(8)]
    return {'version': '1.0', 'server_count': '1', 'server_list': [{'server_id': '192.0.2.173', 'device': cards, 'host_nic_ip': 'reserve'}], 'status': 'completed'}


def test_example_of_eight_cards():
    assert check_rank_table(example_910a(), product='910A') == []
    assert check_rank_table(example_910a()) == []


def test_all_defects_of_one_table():
    table = json.loads((TABLES / 'good_v1_2_superpod_2x16.json').read_text(encoding='utf-8'))
    table['status'], table['server_count'] = 'running', 2
    first, second = table['server_list']
    first['device'][1]['device_id'] = '0'
    first['device'][2]['device_ip'] = '300.1.1.1'
    second['device'][0]['rank_id'] = '15'
    second['device'][1]['device_port'] = '70000'
    second['device'][2]['device_pi'] = second['device'][2].pop('device_ip')
    table['super_pod_list'][0]['server_list'][1]['server_id'] = 'node_x'
    codes = sorted(finding.code.removeprefix('rank_table.') for finding in check_rank_table(table))
    assert codes == sorted(['status', 'type', 'device_id', 'device_ip', 'rank_id', 'value', 'unknown', 'no_device_ip', 'super_pod', 'super_pod'])


# ---- products ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('cards, fine', [(range(0, 4), True), (range(4, 8), True), (range(0, 8), True), (range(1, 3), True), (range(3, 6), False), (range(3, 5), False)])
def test_halves_of_a_910a_server(cards, fine):  # MindSpore hccl_tools
    assert (visible_devices('910A', cards) == []) == fine


# ---- writing -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('version', VERSIONS)
@pytest.mark.parametrize('name, cards', [('atlas-800t-a2', 16), ('atlas-900-a3', 64), ('atlas-800-910a', 8)])
def test_what_is_written_is_read_back(version, name, cards, tmp_path):
    cluster = with_cards(load_cluster(name), cards)
    file = tmp_path / 'table.json'
    write_rank_table(cluster, version, file)
    assert {finding.severity for finding in check_rank_table(file)} <= {'info'}
    table = read_rank_table(file)
    assert [device.rank for device in table.devices] == list(range(cards)) and table.version == version
    again = table_to_cluster(table, cluster)
    assert (again.servers, again.cards_per_server, again.cards) == (cluster.servers, cluster.cards_per_server, cards)
    assert ring_hops(table)[0] == ring_hops(table)[1]


def test_super_pods_reach_the_cluster():
    cluster = with_cards(load_cluster('atlas-900-a3'), 1536)
    table = read_rank_table(write_rank_table(cluster, '1.2'))
    assert len(table.super_pods) == 2 and super_pod_of(table)[[0, 767, 768, 1535]].tolist() == [0, 0, 1, 1]
    assert table_to_cluster(table, cluster).link([767, 768]).name == 'roce'


@given(st.permutations(range(1, 13)))
def test_merging_does_not_depend_on_the_order_of_files(order):  # MindSpore hccl_tools
    parts = [{'status': 'completed', 'version': '1.0', 'server_count': '1', 'server_list': [{'server_id': f'10.0.0.{n}', 'device': [
        {'device_id': str(card), 'device_ip': f'10.1.{n}.{card}', 'rank_id': str(card)} for card in range(2)]}]} for n in order]
    merged = merge_rank_tables(map(read_rank_table, parts))
    assert merged.servers == tuple(f'10.0.0.{n}' for n in range(1, 13))


# ---- start-up errors -----------------------------------------------------------------------------------------------------

def test_missing_ranks():  # HCCL guide, EI0015
    [odd] = missing_ranks(8, [0, 2, 4, 6])
    assert '4 of 8' in odd.message and '1, 3, 5, 7' in odd.message and 'All odd ranks' in odd.fix
    [single] = missing_ranks(16, [rank for rank in range(16) if rank != 9])
    assert 'card 1 of server 1' in single.fix and 'HCCL_SOCKET_IFNAME' in single.fix and '60000' in single.fix


def test_link_timeout():  # HCCL guide, EI0006; vllm-ascend 486
    [finding] = link_timeouts([LinkError(1, 0, tls=False), LinkError(0, 1, tls=True)])
    assert 'rank 0 and rank 1' in finding.message and 'TLS' in finding.message and 'hccn_tool' in finding.fix
    [silent] = link_timeouts([LinkError(1, 0)])
    assert 'different operators' in silent.fix
    [other] = link_timeouts([LinkError(1, 0)], {0: 'EI0004'})
    assert 'Mend that error first' in other.fix


# ---- size and harm -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('version', ['1.0', '1.2', '2.0'])
def test_4096_ranks(version, tmp_path):
    cluster = with_cards(load_cluster('atlas-900-a3' if version == '1.2' else 'atlas-800t-a2'), 4096)
    file = tmp_path / 'large.json'
    write_rank_table(cluster, version, file)
    assert check_rank_table(file) == [] and file.stat().st_size < MAX_BYTES / 8


@pytest.mark.parametrize('text, code', [
    ('[' * 1_000_000, 'nesting'), ('{"a":' * 200_000, 'nesting'), ('{"version": "1.0", "server_list": ' + '[' * 900 + ']' * 900 + '}', 'type'),
    ('', 'json'), ('{', 'json'), ('null', 'type'), ('"x"', 'type'), ('{"version": ' + '9' * 100_000 + '}', 'json'), ('{"version": 1e999}', 'version'),
    ('{"status": NaN}', 'version'), ('\xff\xfe', 'json'), ('// no comments\n{}', 'json'), ('{"version": "1.0", "version": "1.0"}', 'key'),
    ('{"version": ["1.0"], "server_list": {"a": 1}}', 'version'), ('{"group_list": [1, null, {"instance_list": [[]]}]}', 'legacy'),
    ('{"version": "2.0", "rank_list": [{"level_list": [{"rank_addr_list": [{"addr_type": ["x"], "addr": {}}]}]}]}', 'missing'),
    ('{"version": "1.0", "server_list": [{"server_id": "' + 'n' * 100_000 + '", "device": [{"rank_id": "' + '1' * 5000 + '"}]}]}', 'missing'),
])
def test_hostile_text(text, code, tmp_path):
    file = tmp_path / 'hostile.json'
    file.write_text(text, encoding='latin-1')
    findings = check_rank_table(file)
    assert f'rank_table.{code}' in {finding.code for finding in findings}
    assert all(len(finding.message) < 500 for finding in findings)
    with pytest.raises(ValueError, match='rank table'):
        read_rank_table(file)


def test_100_mb_are_not_read(tmp_path):
    file = tmp_path / 'huge.json'
    with file.open('wb') as out:
        out.truncate(100_000_000)  # a hole: takes no space
    tracemalloc.start()
    [finding] = check_rank_table(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert finding.code == 'rank_table.size' and '100,000,000 B' in finding.message and peak < 1_000_000


@pytest.mark.parametrize('path', ['/dev/zero', '.', 'no such file', '/dev/null'])
def test_paths_that_are_no_files(path):
    assert [finding.code for finding in check_rank_table(path)] == ['rank_table.file']


def test_many_defects_are_counted_not_listed():
    table = {'version': '1.0', 'status': 'completed', 'server_count': '1', 'server_list': [{'server_id': 'a', 'device': [{'device_id': []}] * 20_000}]}
    findings = check_rank_table(table)
    assert len(findings) < 100 and any('more of this kind' in finding.message for finding in findings)


GOOD = [json.loads((TABLES / f'{name}.json').read_text(encoding='utf-8')) for name in VERDICTS if name.startswith('good')]
GOOD.append(write_rank_table(with_cards(load_cluster('atlas-800t-a2'), 16), '2.0'))
junk = st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.sampled_from(['device', 'rank_id', 'server_id', 'device_id', 'level_list', 'x']), inner, max_size=3), max_leaves=8)


def damage(value, draw):
    "Replace one place somewhere in a table."
    while isinstance(value, dict | list) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        if not isinstance(value[key], dict | list) or not draw(st.integers(0, 4)):
            value[key] = draw(junk)
            return
        value = value[key]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_damage_never_fails(data):
    table = copy.deepcopy(data.draw(st.sampled_from(GOOD)))
    for _ in range(data.draw(st.integers(1, 4))):
        damage(table, data.draw)
    findings = check_rank_table(table, data.draw(st.sampled_from([None, '910A', 'A2', 'A3'])))
    assert all(finding.message and finding.code.startswith('rank_table.') for finding in findings)
    if not any(finding.severity == 'error' for finding in check_rank_table(table)):
        assert read_rank_table(table).devices
