"""Order of collectives: real gloo runs that go wrong, logs of several formats, published cases, hostile files."""
import json
import os
import pickle
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridlab.core.launch import RankError, RankTimeout, run
from hybridlab.doctor.order import (Call, WaitGraph, check_logs, check_order, check_plogs, check_watchdog, complete_members, explore_order, expected_seconds,
                                    judge_wait, late_ranks, load_plain_pickle, make_calls, missing_pattern, order_cycle, plog_calls, plot_wait_for,
                                    rank_text, read_calls, read_flight_recorder, read_plog, read_record, record_calls, wait_graph)

HERE = Path(__file__).name
codes = lambda findings: [finding.code for finding in findings]


# ---- real runs -----------------------------------------------------------------------------------------------------------

def recorded_run(fn, folder, world_size, timeout_s=2):
    "Findings of the records of a run, however it ended."
    def body(folder):
        with record_calls(folder):
            fn()

    try:
        run(body, str(folder), world_size=world_size, backend='gloo', timeout_s=timeout_s)
    except (RankError, RankTimeout):
        pass
    calls, problems = read_calls(folder)
    assert not problems and {call.rank for call in calls} == set(range(world_size))
    return check_order(calls)


def line_of(fn, text):
    "Place of the only line of a function that holds a text, as a call site is written."
    lines = Path(__file__).read_text().splitlines()
    start = fn.__code__.co_firstlineno
    [number] = [number for number, line in enumerate(lines[start - 1:start + 30], start) if text in line]
    return f'tests/{HERE}:{number} in {fn.__name__}'


def wrong_op():
    import torch
    import torch.distributed as dist
    x = torch.ones(64)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        dist.broadcast(x, src=0) # the wrong one
    else:
        dist.all_reduce(x) # the right one


def missing_call():
    import torch
    import torch.distributed as dist
    x = torch.ones(64)
    dist.all_reduce(x)
    if dist.get_rank() != 1:
        dist.all_reduce(x) # skipped by rank 1


def wrong_size():
    import torch
    import torch.distributed as dist
    dist.all_reduce(torch.ones(64 if dist.get_rank() else 63)) # sizes differ


def wrong_dtype():
    import torch
    import torch.distributed as dist
    dist.all_reduce(torch.ones(64, dtype=torch.int32 if dist.get_rank() else torch.float32)) # types differ


def cross_group_cycle():
    import torch
    import torch.distributed as dist
    rank, x = dist.get_rank(), torch.ones(64)
    left, right = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 3])
    if rank in (0, 2):
        dist.all_reduce(x, group=left) # enters left
    if rank in (1, 3):
        dist.all_reduce(x, group=right) # enters right
    dist.barrier()


def creation_order():
    import torch.distributed as dist
    dist.new_group([0, 3] if dist.get_rank() in (0, 3) else [1, 2]) # PyTorch issue 130102


def test_wrong_operation_on_two_ranks(tmp_path):
    [finding] = recorded_run(wrong_op, tmp_path, 2)
    assert (finding.code, finding.where) == ('order.op', 'group 0, call 1')
    assert f'rank 0: all_reduce(64 float32, sum) at {line_of(wrong_op, "right one")}' in finding.message
    assert f'rank 1: broadcast(64 float32, src 0) at {line_of(wrong_op, "wrong one")}' in finding.message


def test_wrong_operation_on_four_ranks(tmp_path):
    finding = recorded_run(wrong_op, tmp_path, 4)[0]
    assert finding.code == 'order.op' and 'ranks 0, 2-3: all_reduce' in finding.message and 'rank 1: broadcast' in finding.message


def test_missing_call(tmp_path):
    [finding] = recorded_run(missing_call, tmp_path, 2)
    assert (finding.code, finding.where) == ('order.missing_rank', 'group 0, call 1')
    assert finding.message.startswith('rank 1 did not come. Waiting: rank 0: all_reduce') and line_of(missing_call, 'skipped by rank 1') in finding.message
    assert 'Last seen: rank 1: all_reduce(64 float32, sum) of group 0' in finding.message


def test_wrong_size(tmp_path):
    finding = recorded_run(wrong_size, tmp_path, 2)[0]
    assert finding.code == 'order.count' and 'rank 0: all_reduce(63 float32' in finding.message and 'rank 1: all_reduce(64 float32' in finding.message
    assert finding.message.count(line_of(wrong_size, 'sizes differ')) == 2


def test_wrong_dtype_is_found_even_if_the_run_goes_through(tmp_path):
    finding = recorded_run(wrong_dtype, tmp_path, 2)[0]
    assert finding.code == 'order.dtype' and 'rank 0: all_reduce(64 float32' in finding.message and 'rank 1: all_reduce(64 int32' in finding.message
    assert finding.message.count(line_of(wrong_dtype, 'types differ')) == 2


def test_cross_group_cycle(tmp_path):
    finding = recorded_run(cross_group_cycle, tmp_path, 4)[0]
    assert finding.code == 'order.deadlock' and finding.message.startswith('ranks 0-1 wait for each other in a circle')
    assert line_of(cross_group_cycle, '# enters left') in finding.message and line_of(cross_group_cycle, '# enters right') in finding.message


def test_group_creation_order(tmp_path):
    finding = recorded_run(creation_order, tmp_path, 4)[0]
    place = line_of(creation_order, '130102')
    assert (finding.code, finding.where) == ('order.group_creation', 'group new_group, call 0')
    assert f'ranks 0, 3: new_group(0,3) at {place}; ranks 1-2: new_group(1,2) at {place}' in finding.message


def test_recorder_restores_everything_and_keeps_results(tmp_path):
    def body(folder):
        import torch
        import torch.distributed as dist
        before = {name: getattr(dist, name) for name in ('all_reduce', 'new_group', 'isend')} | {'send': dist.ProcessGroup.send}
        x = torch.full((4,), float(dist.get_rank() + 1))
        with record_calls(folder):
            dist.all_reduce(x)
            everyone = [None, None]
            dist.all_gather_object(everyone, dist.get_rank())
            if dist.get_rank() == 0:
                dist.send(x, 1)
            else:
                dist.recv(x, 0)
        after = {name: getattr(dist, name) for name in ('all_reduce', 'new_group', 'isend')} | {'send': dist.ProcessGroup.send}
        return x.tolist(), everyone, before == after

    assert run(body, str(tmp_path), world_size=2, backend='gloo', timeout_s=30) == [([3.0] * 4, [0, 1], True)] * 2
    calls, problems = read_calls(tmp_path)
    assert not problems and not check_order(calls) and {'send', 'recv', 'all_gather'} <= {call.op for call in calls}


# ---- flight recorder -----------------------------------------------------------------------------------------------------

def entry(seq, op='nccl:all_reduce', group=('0', 'default_pg'), numel=64, state='completed', **more):
    return {'frames': [{'name': 'all_reduce', 'filename': '/x/torch/distributed/distributed_c10d.py', 'line': 1}, {'name': 'step', 'filename': '/x/a/train.py', 'line': 9}],
            'record_id': seq, 'pg_id': int(group[0]), 'process_group': group, 'collective_seq_id': seq, 'p2p_seq_id': 0, 'op_id': seq, 'profiling_name': op,
            'time_created_ns': 1_700_000_000_000_000_000 + seq, 'input_sizes': [[numel]], 'input_dtypes': ['Float'], 'output_sizes': [[numel]], 'output_dtypes': ['Float'],
            'state': state, 'retired': state == 'completed', 'timeout_ms': 600000, 'is_p2p': ':send' in op or ':recv' in op} | more


def dump(entries, world=2, version='2.10', state_key='nccl_comm_state'):
    return {'version': version, 'pg_config': {'0': {'name': '0', 'desc': 'default_pg', 'ranks': str(list(range(world)))}}, 'pg_status': {}, 'comm_lib_version': 'x',
            'entries': entries, state_key: {}}


def as_json(value):
    "The JSON twin of a dump: counters as text, no frames, tuples as lists."
    for item in value['entries']:
        item.pop('frames')
        item['collective_seq_id'] = str(item['collective_seq_id'])
    return json.dumps(value).encode()


@pytest.mark.parametrize('prefix, backend, state_key', [('nccl_trace_rank_', 'nccl', 'nccl_comm_state'), ('hccl_trace_rank_', 'hccl', 'hccl_comm_state')])
@pytest.mark.parametrize('pack', [lambda value: pickle.dumps(value, 2), as_json], ids=['pickle', 'json'])
def test_flight_recorder_dumps(tmp_path, prefix, backend, state_key, pack):
    for rank in range(2):
        last = entry(3, f'{backend}:{"all_gather" if rank else "all_reduce"}', state='started')
        name = f'{prefix}{rank}' + ('.json' if pack is as_json else '')
        (tmp_path / name).write_bytes(pack(dump([entry(1, f'{backend}:all_reduce'), entry(2, f'{backend}:broadcast'), last], version='2.4', state_key=state_key)))
    [finding] = check_logs(tmp_path)
    assert (finding.code, finding.where) == ('order.op', 'group 0, call 3')
    assert ('a/train.py:9 in step' in finding.message) == (pack is not as_json)


def test_missing_dump_and_wrapped_ring_buffer(tmp_path):
    (tmp_path / 'trace_0').write_bytes(pickle.dumps(dump([entry(n) for n in range(5, 9)] + [entry(9, state='started')], world=3)))
    (tmp_path / 'trace_1').write_bytes(pickle.dumps(dump([entry(n) for n in range(7, 9)] + [entry(9, state='started')], world=3)))
    [finding] = check_logs(tmp_path)
    assert finding.code == 'order.missing_rank' and 'rank 2 did not come. Waiting: ranks 0-1:' in finding.message and 'No log of rank 2' in finding.message


def test_messages_in_dumps(tmp_path):
    (tmp_path / 'trace_0').write_bytes(pickle.dumps(dump([entry(1, 'nccl:send 0->1', state='started')])))
    (tmp_path / 'trace_1').write_bytes(pickle.dumps(dump([entry(1, 'nccl:recv 1<-0', numel=32, state='started')])))
    [finding] = check_logs(tmp_path)
    assert (finding.code, finding.where) == ('order.count', 'group 0: 0 to 1, call 0')


def test_real_gloo_dumps_of_both_formats(tmp_path):
    def body(folder):
        import torch
        import torch.distributed as dist
        dist.all_reduce(torch.ones(8))
        dist.all_reduce(torch.ones(8, dtype=torch.int32 if dist.get_rank() else torch.float32)) # gloo adds them up all the same
        binding = torch._C._distributed_c10d
        Path(folder, f'trace_{dist.get_rank()}').write_bytes(binding._dump_fr_trace(includeStackTraces=False))
        Path(folder, f'json_{dist.get_rank()}.json').write_bytes(binding._dump_fr_trace_json())

    run(body, str(tmp_path), world_size=2, backend='gloo', timeout_s=20, env={'TORCH_FR_BUFFER_SIZE': '100'})
    for kind in ('trace_*', 'json_*'):
        calls = complete_members([call for path in sorted(tmp_path.glob(kind)) for call in read_flight_recorder(path)[0]])
        assert len(calls) == 4 and codes(check_order(calls)) == ['order.dtype']


# ---- plog: cases C35, C36, C38 -------------------------------------------------------------------------------------------

LINE = '[{level}] HCCL({pid},py):2025-11-21-01:20:0{s}.625.103 [x.cc:1] [{pid}]{text}\n'
line = lambda text, pid=1, level='ERROR', s=1: LINE.format(text=text, pid=pid, level=level, s=s)


def plog(folder, name, *lines):
    path = Path(folder, name)
    path.write_text(''.join(lines))
    return path


@pytest.mark.parametrize('need, connected, missing, words', [
    (8, [0, 2, 4, 6], 'ranks 1, 3, 5, 7', 'all odd ranks'), (16, [r for r in range(16) if r != 9], 'rank 9', 'local rank 1 of server 1')])
def test_c35_missing_ranks(tmp_path, need, connected, missing, words):
    ranks = ','.join(f'[{rank:016d}]' for rank in connected)
    path = plog(tmp_path, 'plog-1.log', line('[InitGroupStage]topo exchange server get socket timeout! timeout[120 s]'), line(f'[DisplayConnectionedRank]need connect rankNum is [{need}]'),
                line(f'[DisplayConnectionedRank]connected rankinfo[LINE 0]: {ranks};'))
    [finding] = check_logs(path)
    assert finding.code == 'hccl.init' and f'{missing} of {need}' in finding.message and words in finding.message


def test_c35_the_agents_say_the_same(tmp_path):
    [finding] = check_logs(plog(tmp_path, 'plog-2.log', line('TopoDetect ERROR occur !!! fault_type[1], fault_info["Failed to connect agent[1,3,5,7,]"]')))
    assert finding.code == 'hccl.init' and 'ranks 1, 3, 5, 7' in finding.message and 'all odd' in finding.message


def link_row(own, peer, tls='DISABLE', s=1):
    return line(f'   |  192.0.2.199({peer})   |  16666  |   192.0.2.198({own})   |  3234403008  |  client  | time out |   {tls}  | LinkInfo', s=s)


@pytest.mark.parametrize('peer_lines, words', [
    (None, 'log of rank 0 is not here'), ([], 'reports no error'), ([line('device memory EI0011')], 'has another error, EI0011'),
    ([link_row(0, 5)], 'itself waiting for rank 5'), ([link_row(0, 1, 'ENABLE')], 'TLS differs: DISABLE and ENABLE'), ([link_row(0, 1)], 'both ends timed out on each other')])
def test_c36_link_decision_tree(tmp_path, peer_lines, words):
    plog(tmp_path, 'plog-11.log', link_row(1, 0))
    if peer_lines is not None:
        plog(tmp_path, 'plog-10.log', line('Entry-HcclCommInitRootInfoInner:ranks[2], rank[0], rootinfo: host ip[192.0.2.1] port[60000] nicDeploy[1] identifier[g], deviceLogicId[0]', level='INFO'), *peer_lines)
    found = [finding for finding in check_logs(tmp_path) if finding.code == 'hccl.link' and 'rank 1 could not' in finding.message]
    assert len(found) == 1 and words in found[0].message and found[0].where == 'ranks 1 and 0'


def test_c38_notify_wait(tmp_path):
    for rank in (25, 3, 31):
        plog(tmp_path, f'plog-{rank}.log', line(f'[TaskExecStage][Timeout][Host]Task run failed, groupRank information is group:[w], user define information[], rankSize[32], rankId[{rank}].'),
             line('Task run failed, para information is notify id:[0x1], stage:[2], remote rank:[24].'))
    finding = next(finding for finding in check_logs(tmp_path) if finding.code == 'hccl.notify_wait')
    assert 'ranks 3, 25, 31 waited for rank 24' in finding.message
    assert WaitGraph(((25, 24),), {}).suspects == (24,)


def test_plog_heartbeat_parameters_streams_and_order(tmp_path):
    init = lambda rank: line(f'Entry-HcclCommInitRootInfoInner:ranks[2], rank[{rank}], rootinfo: host ip[192.0.2.1] port[60000] nicDeploy[1] identifier[g], deviceLogicId[{rank}]', level='INFO')
    call = lambda op, count, stream=2: line(f'Entry-Hccl{op}: tag[{op}_g], sendBuf[0x1], recvBuf[0x2], count[{count}], dataType[float32], op[sum], localRank[0], streamId[{stream}],comm[0x3], deviceLogicId[0]', level='INFO')
    plog(tmp_path, 'plog-1.log', init(0), call('AllReduce', 8), call('AllReduce', 16, 7), line('[HeartbeatAbnormal]local rank [192.0.2.1/1]: crimer rank [192.0.2.2/2] status[LOST] by informer rank [192.0.2.3/3]'))
    plog(tmp_path, 'plog-2.log', init(1), call('AllReduce', 8), call('AllReduce', 32), line('CMD information cmdType check fail. local[6], remote[2]'))
    found = {finding.code: finding for finding in check_logs(tmp_path)}
    assert set(found) == {'order.count', 'hccl.heartbeat', 'hccl.parameters', 'hccl.streams'}
    assert 'LOST at 192.0.2.2/2' in found['hccl.heartbeat'].message and 'rank 1: all_reduce(32 float32, sum)' in found['order.count'].message


# ---- cases C39, C40, C42, C43 --------------------------------------------------------------------------------------------

def test_c39_creation_of_groups():
    calls = [Call(rank, 'new_group', (0, 1, 2, 3), 0, 'new_group', detail='0,3' if rank in (0, 3) else '1,2') for rank in range(4)]
    [finding] = check_order(calls)
    assert finding.code == 'order.group_creation' and finding.where.endswith('call 0')
    both = [Call(rank, 'new_group', (0, 1, 2, 3), seq, 'new_group', detail=detail) for rank in range(4) for seq, detail in enumerate(('0,3', '1,2'))]
    assert check_order(both) == []


def crossed(**more):
    return [Call(rank, group, (0, 1), 0, 'all_reduce', 8, 'float32', site=f'r{rank}.py:{n}', **more) for rank, order in ((0, 'AB'), (1, 'BA')) for n, group in enumerate(order)]


def test_c40_two_communicators_in_opposite_order():
    [risk] = check_order(crossed())
    assert (risk.severity, risk.code) == ('warning', 'order.deadlock_risk')
    for site in ('r0.py:0', 'r0.py:1', 'r1.py:0', 'r1.py:1'):
        assert site in risk.message
    [hang] = check_order(crossed(done=False))
    assert (hang.severity, hang.code) == ('error', 'order.deadlock')


def test_c42_hang_not_slowness():
    assert 3121908768 / 32519883 == 96
    assert expected_seconds('reduce_scatter', 3121908768 * 4, 96) == pytest.approx(0.494, abs=5e-4)
    finding = judge_wait('reduce_scatter', 3121908768 * 4, 96, 1800)
    assert finding.code == 'order.hang' and '3.64e+03 times' in finding.message
    [finding] = check_watchdog('x WorkNCCL(SeqNum=7, OpType=_REDUCE_SCATTER_BASE, NumelIn=3121908768, NumelOut=32519883, Timeout(ms)=1800000) ran for 1800000 milliseconds')
    assert finding.code == 'order.hang' and 'input / output = 96' in finding.message


def test_c43_late_rank():
    calls = [Call(rank, '0', tuple(range(8)), 3, 'all_reduce', 1, 'float32', site='post.py:5', start_s=2000.0 * (rank == 0)) for rank in range(8)]
    [finding] = late_ranks(calls)
    assert finding.severity == 'error' and 'rank 0 came 2000 s after' in finding.message and 'above 4000 s' in finding.fix


# ---- the checks themselves -----------------------------------------------------------------------------------------------

def test_the_large_cycle():
    calls = make_calls(64, 2000, 8, 'cycle', at=42)
    assert len(calls) > 128_000
    found = check_order(calls)
    assert codes(found) == ['order.deadlock'] and 'ranks 42-43, 51 wait' in found[0].message


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(2, 4), st.sampled_from(['wrong op', 'missing call', 'wrong size', 'wrong dtype', 'missing rank', 'cycle']), st.data())
def test_each_fault_is_named_with_its_rank(rows, width, fault, data):
    at = data.draw(st.integers(0, rows * width - 1))
    found = check_order(make_calls(rows * width, 12, width, fault, at))
    expected = {'wrong op': 'order.op', 'missing call': 'order.missing_call', 'wrong size': 'order.count', 'wrong dtype': 'order.dtype',
                'missing rank': 'order.missing_rank', 'cycle': 'order.deadlock'}[fault]
    assert found[0].code == expected
    if fault == 'cycle':
        assert at in wait_graph(make_calls(rows * width, 12, width, fault, at)).cycles[0]
    elif fault in ('missing call', 'missing rank'):
        assert f'rank {at}' in found[0].message
    assert check_order(make_calls(rows * width, 12, width)) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=30))
def test_cycles_are_those_of_networkx(pairs):
    networkx = pytest.importorskip('networkx')
    pairs = [(a, b) for a, b in pairs if a != b]
    expected = {tuple(sorted(component)) for component in networkx.strongly_connected_components(networkx.DiGraph(pairs)) if len(component) > 1}
    assert set(WaitGraph(tuple(pairs), {}).cycles) == expected


def test_order_cycle_is_a_circle_of_events():
    circle = order_cycle(crossed())
    assert all(later[1:4] == following[0][1:4] for (_, later), following in zip(circle, circle[1:] + circle[:1]))


def test_small_texts():
    assert rank_text([3, 1, 2]) == 'ranks 1-3' and len(rank_text(range(0, 1000, 2))) < 120
    assert missing_pattern([], 8) == 'nobody is missing' and 'server 1' in missing_pattern(range(8, 16), 24)


def test_plots():
    graph = wait_graph(make_calls(8, 20, 2, 'cycle', 3))
    assert plot_wait_for(graph).get_title('left').startswith('Deadlock')
    with pytest.raises(ValueError, match='at most 64'):
        plot_wait_for(WaitGraph(tuple((rank, rank + 1) for rank in range(100)), {}))
    widget = explore_order()
    for control, value in (('fault', 'wrong op'), ('rows', 2), ('at', 31), ('width', 4)):
        widget.controls[control].value = value
        assert not widget.message.value


# ---- hostile files -------------------------------------------------------------------------------------------------------

class Evil:
    def __reduce__(self):
        return os.mkdir, ('evil_was_here',)


@pytest.mark.parametrize('make', [
    lambda: pickle.dumps(Evil()), lambda: pickle.dumps({'entries': [Evil()]}), lambda: b'\x80\x02cos\nsystem\n(S"echo"\ntR.', lambda: b'\x80\x04\x8c\x02os\x8c\x06system\x93.',
    lambda: b'\x80\x02' + b']' * 200_000 + b'a' * 199_999 + b'.', lambda: b'\x80\x02Nr\xff\xff\xff\x7f.', lambda: b'\x80\x02X\xff\xff\xff\xffabc.', lambda: b'\x80\x02.', lambda: b'\x80',
    lambda: b'\x80\x02}(' + b'K\x01' * 3 + b'u.', lambda: b'\x80\x02}]N s.', lambda: b'{"entries": ' + b'[' * 100_000, lambda: b'{"entries": {"a": 1}}', lambda: b'{"pg_config": 3, "entries": [1, "x", null, {}]}',
    lambda: pickle.dumps({'entries': [entry(1) | {'process_group': [[[[]]]], 'input_sizes': [['x']]}]}), lambda: b''])
def test_hostile_dumps_give_findings(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / 'trace_0'
    path.write_bytes(make())
    calls, findings = read_flight_recorder(path)
    assert not calls and findings and all(len(finding.message) < 400 for finding in findings)
    assert check_logs(path) and not (tmp_path / 'evil_was_here').exists()


def mutate(data, rng):
    "A broken version of a file: cut, bytes changed, pieces doubled or swapped."
    data = bytearray(data)
    kind = rng.randrange(4)
    if kind == 0:
        return bytes(data[:rng.randrange(len(data))])
    if kind == 1:
        for _ in range(rng.randrange(1, 30)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    return bytes(data[:b] + data[a:]) if kind == 2 else bytes(data[b:] + data[:a])


@pytest.mark.parametrize('kind', ['pickle', 'json', 'record', 'plog'])
def test_mutated_logs_never_raise(tmp_path, kind):
    good = dump([entry(n) for n in range(1, 5)] + [entry(5, 'nccl:send 0->1'), entry(6, state='started')])
    record = '\n'.join(map(json.dumps, [{'format': 'hybridlab.calls', 'version': 1, 'rank': 0, 'world': 2}, {'g': 0, 'group': '0', 'members': [0, 1]},
                                        {'g': 0, 'seq': 0, 't': 1.0, 'op': 'all_reduce', 'numel': 8, 'dtype': 'float32', 'site': 'a.py:1'}, {'end': [0, 0], 't': 2.0}]))
    original = {'pickle': pickle.dumps(good, 2), 'json': json.dumps(good).encode(), 'record': record.encode(),
                'plog': (link_row(1, 0) + line('connected rankinfo[LINE 0]: [0000],[0002]; need connect rankNum is [8] EI0013')).encode()}[kind]
    rng = random.Random(f'order {kind}')
    for number in range(100):
        path = tmp_path / f'trace_{number % 2}'
        path.write_bytes(mutate(original, rng))
        for finding in [*check_logs(path), *read_record(path)[1], *read_flight_recorder(path)[1], *check_plogs([read_plog(path)[0]])]:
            assert finding.severity in ('error', 'warning', 'info') and str(path.parent) not in finding.message
    assert plog_calls([read_plog(path)[0]]) is not None


def test_plain_pickle_equals_pickle():
    rng = random.Random(5)

    def value(depth=0):
        kinds = [lambda: rng.randrange(-2**70, 2**70), lambda: rng.random(), lambda: 'é' * rng.randrange(300), lambda: None, lambda: rng.random() < 0.5]
        if depth < 4:
            kinds += [lambda: [value(depth + 1) for _ in range(rng.randrange(5))], lambda: tuple(value(depth + 1) for _ in range(rng.randrange(5))),
                      lambda: {str(n): value(depth + 1) for n in range(rng.randrange(5))}]
        return rng.choice(kinds)()

    for _ in range(200):
        thing, protocol = value(), rng.randrange(2, 6)
        assert load_plain_pickle(pickle.dumps(thing, protocol)) == thing


def test_record_survives_a_cut_line(tmp_path):
    path = tmp_path / 'calls_rank_0.jsonl'
    path.write_text('{"format":"hybridlab.calls","version":1,"rank":0,"world":1}\n{"g":0,"group":"0","members":[0]}\n{"g":0,"seq":0,"t":1.0,"op":"barrier"}\n{"end":[0,')
    calls, findings = read_record(path)
    assert [(call.op, call.done) for call in calls] == [('barrier', False)] and not findings


def test_threads_do_not_hide_calls(tmp_path):
    def body(folder):
        import torch
        import torch.distributed as dist
        group = dist.new_group([0, 1])
        with record_calls(folder):
            thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(2), group=group))
            thread.start()
            dist.all_reduce(torch.ones(4))
            thread.join()

    run(body, str(tmp_path), world_size=2, backend='gloo', timeout_s=20)
    calls, _ = read_calls(tmp_path)
    assert len(calls) == 4 and all(call.done for call in calls)
