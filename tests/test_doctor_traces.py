"""Profiles: values of Holistic Trace Analysis on its own files, Ascend's tables, stragglers, and 200 broken files."""
import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridlab.core.findings import Finding
from hybridlab.doctor.traces import (COMMUNICATION, COMPUTE, HOST_COMMUNICATION, Breakdown, Link, breakdown, breakdown_table, check_links, check_ranks,
                                     check_traces, compare_bubble, complete_steps, covered, explore_stragglers, explore_trace, group_times, length, make_traces, overlap,
                                     plot_breakdown, plot_lateness, plot_trace, read_communication, read_kernels, read_steps, read_trace,
                                     straggler_table, union, write_perfetto)

HTA = Path(__file__).resolve().parents[2] / 'shared' / 'cases' / 'hta'
codes = lambda findings: {finding.code for finding in findings}


def write(folder, trace, name=None):
    path = Path(folder, name or f'rank{trace["distributedInfo"]["rank"]}.json')
    data = json.dumps(trace).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)
    return path


def third_party(name):
    if not HTA.exists():
        pytest.skip('no ../shared here: the third-party traces are not part of this repository; test_own_small_traces covers the same')
    trace, findings = read_trace(HTA / name)
    assert not findings
    return trace


# ---- intervals -----------------------------------------------------------------------------------------------------------

pairs = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=25).map(lambda rows: np.array([(a, a + n) for a, n in rows], np.int64).reshape(-1, 2))
mask = lambda intervals: np.array([any(a <= t < b for a, b in intervals) for t in range(80)])


@settings(max_examples=60, deadline=None)
@given(pairs, pairs)
def test_intervals_against_a_mask(a, b):
    one, other = union(a), union(b)
    assert length(one) == mask(a).sum() and overlap(one, other) == (mask(a) & mask(b)).sum() == overlap(other, one)
    assert (one[1:, 0] > one[:-1, 1]).all() and (one[:, 1] > one[:, 0]).all()
    assert covered(one, np.arange(80)).tolist() == [mask(a)[:t].sum() for t in range(80)]


# ---- third-party files: HolisticTraceAnalysis 0.5.0 on its own test data, in microseconds ----------------------------------
# get_temporal_breakdown and get_comm_comp_overlap, without cuda_sync events, which HTA counts as device work; it leaves out the last
# step and cuts times to whole microseconds, so the same is done here.

@pytest.mark.parametrize('name, span, compute, other, idle, hidden, collectives', [
    ('benchmark_result_2869224_1695835535_trace.json.gz', 12920244, 10630, 55511, 12854103, None, 0),
    ('benchmark_result_493459_1694039959_trace.json.gz', 16025575, 10670, 39088, 15975817, None, 0),
    ('event_sync_trace.json.gz', 19506, 369, 3, 19134, None, 0),
    ('nccl_data.json.gz', 435586, 75169, 21636, 338781, 0.1431, 14),
    ('sampled_rank-0.json.gz', 600058, 106252, 172428, 321378, 0.1181, 5),
    ('sampled_rank-1.json.gz', 600674, 135548, 136455, 328671, 0.2005, 5),
])
def test_breakdown_equals_hta(name, span, compute, other, idle, hidden, collectives):
    trace = complete_steps(third_party(name))
    inward = np.stack([-(-trace.times[:, 0] // 1000), trace.times[:, 1] // 1000], axis=1) * 1000
    b = breakdown(replace(trace, times=inward))
    found = [value * 1e6 for value in (b.span_s, b.compute_s, b.exposed_s + b.memory_s, b.idle_s)]
    assert found == pytest.approx([span, compute, other, idle], abs=2)
    assert (trace.kind == COMMUNICATION).sum() == collectives
    if hidden is not None:
        assert b.hidden_s / b.communication_s == pytest.approx(hidden, abs=1e-4)
    assert 0 <= b.host_wait_s <= b.idle_s


def test_host_wait_of_the_benchmark_files_is_nearly_all_of_the_idle_time():
    b = breakdown(third_party('benchmark_result_493459_1694039959_trace.json.gz'))
    assert b.host_wait_s > 0.7 * b.idle_s
    assert codes(check_ranks([b])) == {'traces.host_bound'}


def test_collectives_of_nccl_data_carry_their_details():
    trace = third_party('nccl_data.json.gz')
    details = list(trace.details.values())
    assert (trace.rank, trace.world) == (0, 2)
    kernels = [trace.details[event] for event in np.flatnonzero(trace.kind == COMMUNICATION).tolist()]
    assert kernels[0] == ('0', 'allreduce', 6637568, 'Float', 2) and {ranks for *_, ranks in kernels} == {2}
    assert sum(operation == 'allreduce' for _, operation, *_ in kernels) == 15 and len(details) >= 21


def test_sampled_ranks_side_by_side():
    traces = [third_party(f'sampled_rank-{rank}.json.gz') for rank in (0, 1)]
    assert [trace.rank for trace in traces] == [0, 1] and {trace.world for trace in traces} == {128}
    [times] = group_times(traces)
    assert times.start.shape == (10, 2) and not times.matched # a sample of the kernels: the k-th of one rank is not the k-th of the other
    assert 'traces.unmatched' in codes(check_ranks(map(breakdown, traces), [times]))


def test_cpu_only_traces_which_hta_cannot_read():
    trace = third_party('rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz')
    assert (trace.rank, trace.world, trace.on_device) == (34, 300, False) and (trace.kind == HOST_COMMUNICATION).sum() == 10
    b = breakdown(trace)
    assert b.communication_s == pytest.approx(length(union(trace.times[trace.kind == HOST_COMMUNICATION])) / 1e9)
    assert (b.span_s, b.compute_s) == (pytest.approx(1.264557, abs=2e-4), pytest.approx(3.9e-6, abs=2e-7))
    other = third_party('rank_non_gpu.json.gz')
    assert not other.on_device and (other.kind == HOST_COMMUNICATION).sum() == 6
    b = breakdown(other)
    assert b.compute_s + b.exposed_s + b.idle_s == pytest.approx(b.span_s, rel=1e-9) and 0 < b.compute_s < b.span_s


# ---- our own small traces ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', ['rank0.json', 'rank0.json.gz'])
def test_own_small_traces(tmp_path, name):
    trace, findings = read_trace(write(tmp_path, make_traces(2, 4, 100, 60)[0], name))
    b = breakdown(trace)
    assert not findings and (trace.rank, trace.world, (trace.kind == COMMUNICATION).sum()) == (0, 2, 4)
    assert [round(value * 1e6, 6) for value in (b.span_s, b.compute_s, b.hidden_s, b.exposed_s, b.idle_s)] == [460, 400, 180, 60, 0]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 12), st.floats(1, 300), st.floats(0, 300), st.floats(0, 200), st.booleans())
def test_parts_add_up(ranks, layers, compute, comm, late, blocking):
    from hybridlab.doctor.traces import _loaded
    for made in make_traces(ranks, layers, compute, comm, late, blocking):
        b = breakdown(_loaded(made))
        assert b.compute_s + b.exposed_s + b.memory_s + b.idle_s == pytest.approx(b.span_s, abs=2e-9)
        assert b.compute_s * 1e6 == pytest.approx(layers * compute, abs=0.01 * layers) and b.host_wait_s <= b.idle_s + 1e-9


@pytest.mark.parametrize('cause, words', [('compute', 'computes'), ('host', 'host-bound')])
@pytest.mark.parametrize('skew', [0, 10**9])
def test_straggler_and_its_cause_in_any_clock(tmp_path, cause, words, skew):
    extra = [0, 0, 60, 0]
    made = make_traces(4, 20, [100 + e * (cause == 'compute') for e in extra], 20, [e * (cause == 'host') for e in extra], blocking=True)
    for rank, trace in enumerate(made):
        for event in trace['traceEvents']:
            event['ts'] += rank * skew
        write(tmp_path, trace)
    found = [finding for finding in check_traces(tmp_path).findings if finding.code == 'traces.straggler']
    assert len(found) == 1 and found[0].where == 'rank 2' and words in found[0].message and 'last in 20 of 20' in found[0].message or cause == 'host' and 'last in 19 of 20' in found[0].message


def test_base_time_and_text_times(tmp_path):
    events = [{'ph': 'X', 'cat': 'kernel', 'name': 'k', 'ts': '1712867402332545.123', 'dur': 1.5}, {'ph': 'X', 'cat': 'kernel', 'name': 'k', 'ts': '1712867402332547.001\t', 'dur': '2'}]
    trace, _ = read_trace(write(tmp_path, {'traceEvents': events, 'distributedInfo': {'rank': 3}, 'baseTimeNanoseconds': 7}))
    assert trace.times.tolist() == [[1712867402332545130, 1712867402332546630], [1712867402332547008, 1712867402332549008]] and trace.rank == 3


def test_case_c45_the_other_rank_is_host_bound():
    rank0 = Breakdown(0, 0.1972, 0.102648, 0.154671 - 0.102648, 0.0, 0.0, 0.042515, 0.035829)
    rank1 = Breakdown(1, 0.1882, 0.102648, 0.0, 0.0, 0.0, 0.085520, 0.081151)
    found = [finding for finding in check_ranks([rank0, rank1]) if 'more than the best rank' in finding.message]
    assert [finding.where for finding in found] == ['rank 1'] and '45.3 ms more' in found[0].message and 'CPU binding' in found[0].fix


# ---- Ascend's files ------------------------------------------------------------------------------------------------------

def ascend_folder(root, rank, bubble=300000):
    folder = Path(root, f'host_{rank}_ascend_pt', 'ASCEND_PROFILER_OUTPUT')
    folder.mkdir(parents=True)
    (folder.parent / f'profiler_info_{rank}.json').write_text('{}')
    (folder / 'kernel_details.csv').write_text(
        'Step Id,Name,Type,Accelerator Core,Start Time(us),Duration(us),Wait Time(us),Stream ID\n'
        '1,MatMul1,MatMulV2,AI_CORE,"1712867402332000.100\t",100.5,0,2\n1,hcom_allReduce__844_0_1,hcom_allReduce_,HCCL,1712867402332050.100\t,100.5,0,7\n'
        '1,Add1,Add,AI_VECTOR_CORE,1712867402332200.600\t,N/A,0,2\n')
    (folder / 'step_trace_time.csv').write_text(
        'Device_id,Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free,Stage,Bubble,Communication(Not Overlapped and Exclude Receive),Preparing\n'
        f'{rank},4,700000,200000,50000,250000,100000,650000,{bubble},10,5\n')
    bands = {'HCCS': {'Transit Size(MB)': 100.0, 'Transit Time(ms)': 5.0, 'Bandwidth(GB/s)': 20.0}, 'RDMA': {'Transit Size(MB)': 50.0, 'Transit Time(ms)': 4.0 if rank != 2 else 40.0}}
    times = {'Elapse Time(ms)': 20, 'Transit Time(ms)': 9.0, 'Wait Time(ms)': 6.0, 'Synchronization Time(ms)': 6.0 if rank == 1 else 0.1}
    entry = {'Communication Time Info': times, 'Communication Bandwidth Info': bands}
    (folder / 'communication.json').write_text(json.dumps({'step4': {'p2p': {}, 'collective': {'hcom_allReduce__844_0_1@9': entry, 'Total Op Info': entry}}}))
    return folder


def test_ascend_folder(tmp_path):
    for rank in range(4):
        ascend_folder(tmp_path, rank)
    found = check_traces(tmp_path, pipeline=(8, 16, 1, '1f1b'))
    assert sorted(trace.rank for trace in found.traces) == [0, 1, 2, 3] and len(found.steps) == 4
    b = next(part for part in found.parts if part.rank == 0)
    assert [round(value * 1e6, 3) for value in (b.span_s, b.compute_s, b.hidden_s, b.exposed_s)] == [150.5, 100.5, 50.5, 50.0]
    by_code = {finding.code: finding for finding in found.findings}
    assert {'traces.synchronisation', 'traces.slow_link', 'traces.bubble', 'traces.event'} <= set(by_code)
    assert by_code['traces.synchronisation'].where == 'rank 1' and by_code['traces.slow_link'].where == 'rank 2, RDMA' and by_code['traces.bubble'].severity == 'info'


def test_older_step_files_lack_the_device_column(tmp_path):
    path = tmp_path / 'step_trace_time.csv'
    path.write_text('Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free,Bubble\n1,10,5,1,6,5,2\n,,,,,,\n')
    [step], findings = read_steps(path)
    assert (step.total_s, step.bubble_s) == (pytest.approx(20e-6), pytest.approx(2e-6)) and codes(findings) == {'traces.event'}


def test_trace_view(tmp_path):
    events = [{'ph': 'M', 'name': 'process_name', 'pid': 5, 'args': {'name': 'Overlap Analysis'}}, {'ph': 'X', 'name': 'Computing', 'pid': 5, 'tid': 0, 'ts': '100.000', 'dur': 50.0, 'args': {}},
              {'ph': 'X', 'name': 'Communication(Not Overlapped)', 'pid': 5, 'tid': 2, 'ts': '150.000', 'dur': 30.0}, {'ph': 'X', 'name': 'Free', 'pid': 5, 'tid': 3, 'ts': '180.000', 'dur': 20.0},
              {'ph': 'X', 'name': 'MatMulV2', 'pid': 4, 'tid': 2, 'ts': '100.000', 'dur': 50.0, 'args': {'Task Type': 'AI_CORE', 'Stream Id': 2}},
              {'ph': 'X', 'name': 'hcom_allReduce__844_0_1', 'pid': 6, 'tid': 1, 'ts': '130.000', 'dur': 50.0, 'args': {}}, {'ph': 's', 'name': 'HostToDevice', 'pid': 4, 'ts': '1.0', 'id': 3},
              {'ph': 'X', 'name': 'aten::mm', 'cat': 'cpu_op', 'pid': 1, 'tid': 1, 'ts': '90.000', 'dur': 5.0}]
    folder = tmp_path / 'x_ascend_pt' / 'ASCEND_PROFILER_OUTPUT'
    folder.mkdir(parents=True)
    (folder.parent / 'profiler_info_6.json').write_text('{}')
    (folder / 'trace_view.json').write_text(json.dumps(events))
    found = check_traces(tmp_path)
    [b] = found.parts
    assert (b.rank, found.traces[0].details) == (6, {2: ('844', 'allReduce', None, '', None)})
    assert [round(value * 1e6, 6) for value in (b.span_s, b.compute_s, b.hidden_s, b.exposed_s, b.idle_s)] == [80, 50, 20, 30, 0]


def test_links_and_bubble():
    links = [Link(0, f'0-{n}', 'HCCS', 100.0, 5.0 if n != 2 else 10.0) for n in range(1, 8)] + [Link(0, '0-9', 'RDMA', 100.0, 50.0)]
    assert [finding.where for finding in check_links(links)] == ['rank 0, 0-2']
    assert 'measured, 30.4% by the formula' in compare_bubble(0.3045, 8, 16).message
    assert compare_bubble(0.6, 8, 16).severity == 'warning' and compare_bubble(0.068, 8, 16, 6, 'interleaved').severity == 'info'


# ---- pictures and export -------------------------------------------------------------------------------------------------

def test_plots_and_perfetto(tmp_path):
    for trace in make_traces(3, 20, [100, 100, 150], 20, blocking=True):
        write(tmp_path, trace)
    found = check_traces(tmp_path)
    assert plot_lateness(found.groups).get_title('left').startswith('Rank 2 comes last')
    assert plot_trace(found.traces, (0.2, 0.4)) and plot_breakdown(found.parts) and len(breakdown_table(found.parts)) == 3
    assert write_perfetto(found.traces, tmp_path / 'merged.json') == len(json.loads((tmp_path / 'merged.json').read_text())['traceEvents'])
    for bad in (lambda: plot_trace([]), lambda: plot_trace(found.traces, (0.5, 0.1)), lambda: plot_breakdown([]), lambda: plot_lateness([])):
        with pytest.raises(ValueError):
            bad()


@pytest.mark.parametrize('explore, moves', [(explore_trace, {'late_us': 80.0, 'comm_us': 0.0}), (explore_stragglers, {'rank': 3, 'late_us': 0.0, 'cause': 'compute'})])
def test_widgets(explore, moves):
    widget = explore()
    for name, value in moves.items():
        widget.controls[name].value = value
        assert not widget.message.value


# ---- broken files --------------------------------------------------------------------------------------------------------

def mutate(data, rng):
    "A broken version of a file: cut, bytes changed, a value replaced, nested deeply, pieces swapped."
    kind, data = rng.randrange(6), bytearray(data)
    if kind == 0:
        return bytes(data[:rng.randrange(len(data))])
    if kind == 1:
        for _ in range(rng.randrange(1, 40)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    if kind == 2:
        text = data.decode('utf-8', 'replace')
        old = rng.choice(['"ts"', '"dur"', '"X"', 'args', '100', '"name"', 'step', 'Start Time(us)', 'Computing', '{', ','])
        return text.replace(old, rng.choice(['null', '1e999', '-1', '"\\ud800"', '[[]]', '{"a": {}}', 'NaN', '9' * 400, ''])).encode('utf-8', 'replace')
    if kind == 3:
        at = rng.randrange(len(data))
        return bytes(data[:at]) + rng.choice([b'[', b'{"a":']) * 50_000 + bytes(data[at:])
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    return bytes(data[:b] + data[a:]) if kind == 4 else bytes(data[b:] + data[:a])


@pytest.mark.parametrize('name', ['rank0.json', 'rank0.json.gz', 'kernel_details.csv', 'step_trace_time.csv', 'communication.json'])
def test_200_broken_files_give_findings_only(tmp_path, name):
    if name.startswith('rank'):
        original = write(tmp_path, make_traces(2, 4)[0], name).read_bytes()
    else:
        original = (ascend_folder(tmp_path, 0) / name).read_bytes()
    rng, path = random.Random(name), tmp_path / 'x' / name
    path.parent.mkdir()
    for _ in range(40):
        path.write_bytes(mutate(original, rng))
        found = check_traces(path)
        assert all(isinstance(finding, Finding) and len(finding.message) < 600 for finding in found.findings)
        for b in found.parts:
            assert b.compute_s + b.exposed_s + b.memory_s + b.idle_s == pytest.approx(b.span_s, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize('text', ['', '{', '[', '[1, 2', '{"traceEvents": 3}', '{"traceEvents": [{}]}', '"x"', '{"traceEvents": [' + '[' * 100_000, 'null', '\x00' * 100])
def test_empty_and_odd_traces(tmp_path, text):
    path = tmp_path / 'a.json'
    path.write_text(text)
    trace, findings = read_trace(path)
    assert trace is None and findings
    for read in (read_kernels, read_steps, read_communication):
        assert read(path)[-1]
    assert check_traces(path).findings and check_traces(tmp_path / 'nothing').findings


def test_a_truncated_trace_keeps_what_came_before(tmp_path):
    path = write(tmp_path, make_traces(2, 50)[0])
    whole, _ = read_trace(path)
    path.write_bytes(path.read_bytes()[:-4000])
    part, findings = read_trace(path)
    assert codes(findings) == {'traces.broken'} and 0.7 * len(whole.kind) < len(part.kind) < len(whole.kind)
    packed = tmp_path / 'rank0.json.gz'
    packed.write_bytes(gzip.compress(json.dumps(make_traces(2, 4000)[0]).encode())[:-20_000])
    part, findings = read_trace(packed)
    assert findings and len(part.kind) > 1000
