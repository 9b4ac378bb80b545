"""Any files of a run: recognised, read without trust, ranked; the article's troubleshooting rows; cases C24, C35, C36, C38-C40, C42, C43, C45-C47, C50 end to end."""
import gzip
import json
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from test_doctor_config import script as launch_script

from hybridlab.core.findings import Finding
from hybridlab.doctor.diagnose import CHAIN, SYMPTOMS, collect_files, diagnose, diagnose_json, explore_doctor, plot_symptoms, rank_findings, recognise, report_table, symptoms
from hybridlab.doctor.order import Call, make_calls
from hybridlab.doctor.run_logs import ERRORS, check_hccl_test, check_run_log, compare_run_logs, explore_run_log, read_run_log
from hybridlab.doctor.traces import make_traces
from hybridlab.spec.cluster import load_cluster, with_cards
from hybridlab.spec.rank_table import check_rank_table, write_rank_table

TABLES = Path(__file__).parent / 'rank_tables'
codes = lambda findings: [finding.code for finding in findings]
plog_line = lambda text, pid=1, level='ERROR', s=1: f'[{level}] HCCL({pid},py):2025-11-21-01:20:0{s}.625.103 [x.cc:1] [{pid}]{text}\n'


def megatron_log(path, steps=200, seed=0, nan_at=None, spike_at=None, slow_every=None, scale=1.0, norm_factor=1.0, flat=False, parts=False):
    rng, lines = np.random.default_rng(seed), []
    for step in range(1, steps + 1):
        loss, norm, ms = (10.5 if flat else 10 * 0.99**step + 2) + rng.normal(0, 0.01), rng.lognormal(0, 0.2), 1000 * rng.normal(1, 0.02)
        loss, norm = (loss + 5, norm * 500) if spike_at and spike_at <= step < spike_at + 2 else (loss, norm)
        loss *= 1 + (0.001 * step if parts else 0)
        ms *= 6 if slow_every and step % slow_every == 0 else 1
        said = 'nan' if nan_at and step >= nan_at else f'{loss:.6E}'
        lines.append(f' iteration {step:8d}/{steps:8d} | consumed samples: {step * 64} | elapsed time per iteration (ms): {ms:.1f} | lm loss: {said} | loss scale: {scale} | grad norm: {norm * norm_factor:.6f} | '
                     f'number of skipped iterations:   0 | number of nan iterations:   0 |\n')
    Path(path).write_text(''.join(lines))


def write_calls(folder, calls):
    for rank in sorted({call.rank for call in calls}):
        own = [call for call in calls if call.rank == rank]
        groups = list(dict.fromkeys((call.group, call.members) for call in own))
        rows = [{'format': 'hybridlab.calls', 'version': 1, 'rank': rank, 'world': 8}] + [{'g': g, 'group': group, 'members': members} for g, (group, members) in enumerate(groups)]
        rows += [{'g': groups.index((call.group, call.members)), 'seq': call.seq, 't': call.start_s or 0.0, 'op': call.op, 'numel': call.numel, 'dtype': call.dtype, 'detail': call.detail, 'site': call.site} for call in own]
        Path(folder, f'calls_rank_{rank}.jsonl').write_text(''.join(json.dumps(row, separators=(',', ':')) + '\n' for row in rows))


# ---- rank tables ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('path', sorted(TABLES.glob('*.json')), ids=lambda path: path.stem)
def test_rank_tables_as_their_own_check_says(path):
    expected, found = check_rank_table(path), diagnose(path)
    assert Counter((finding.severity, finding.code, finding.message) for finding in found) == Counter((finding.severity, finding.code, finding.message) for finding in expected)
    assert all(finding.where.startswith(str(path)) for finding in found)


def test_a_table_of_another_world_is_found(tmp_path):
    (tmp_path / 'run.sh').write_text(launch_script(32, tensor_model_parallel_size=8, pipeline_model_parallel_size=2))
    write_rank_table(with_cards(load_cluster('atlas-800t-a2'), 16), path=tmp_path / 'hccl_16p.json')
    assert '16 ranks, the launch starts 32' in next(finding.message for finding in diagnose(tmp_path) if finding.code == 'rank_table.world')


# ---- a whole launch ------------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def launch(tmp_path_factory):
    "A launch on two servers with what its users left behind."
    folder = tmp_path_factory.mktemp('job')
    for name in ('logs', 'profile', 'calls', 'conf'):
        (folder / name).mkdir()
    (folder / 'pretrain_qwen.sh').write_text("""#!/bin/bash
source /usr/local/Ascend/ascend-toolkit/set_env.sh
export HCCL_CONNECT_TIMEOUT=120
export HCCL_EXEC_TIMEOUT=600
export HCCL_INTRA_ROCE_ENABLE=1
export HCCL_REDUCE_ALGO=HD
export CUDA_DEVICE_MAX_CONNECTIONS=1
NPUS_PER_NODE=8
NNODES=2
TP=8
PP=2
DISTRIBUTED_ARGS="--nproc_per_node $NPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port 6000"
GPT_ARGS="
    --use-mcore-models \\
    --tensor-model-parallel-size ${TP} \\
    --pipeline-model-parallel-size ${PP} \\
    --sequence-parallel \\
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \\
    --group-query-attention --num-query-groups 8 \\
    --seq-length 4096 --max-position-embeddings 4096 \\
    --micro-batch-size 2 \\
    --global-batch-size 6 \\
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear \\
    --untie-embeddings-and-output-weights --vocab-size 32000 --bf16 --use-flash-attn --use-distributed-optimizer
"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS --distributed-backend nccl | tee logs/train.log
""")
    (folder / 'env.txt').write_text('HOSTNAME=node-0\nPATH=/usr/bin\nHCCL_SOCKET_IFNAME=ib0\nPWD=/job\nLANG=C\n')
    (folder / 'pip_list.txt').write_text('Package   Version\ntorch     2.5.1\ntorch-npu 2.1.0.post6\n')
    write_rank_table(with_cards(load_cluster('atlas-800t-a2'), 16), path=folder / 'conf' / 'rank_table.json')
    megatron_log(folder / 'logs' / 'train.log', spike_at=120, slow_every=40)
    with (folder / 'logs' / 'train.log').open('a') as file:
        file.write('RuntimeError: NPU out of memory. Tried to allocate 1.00 GiB (NPU 0; 60.97 GiB total capacity; 58.00 GiB already allocated)\n')
    write_calls(folder / 'calls', make_calls(8, 20, 2, 'wrong op', 3))
    for trace in make_traces(2, 12, 100, 30, [0, 60], blocking=True):
        (folder / 'profile' / f'rank{trace["distributedInfo"]["rank"]}.json').write_text(json.dumps(trace))
    (folder / 'logs' / 'plog-9.log').write_text(plog_line('[DisplayConnectionedRank]need connect rankNum is [16]') + plog_line(f'[DisplayConnectionedRank]connected rankinfo[LINE 0]: {",".join(f"[{rank:016d}]" for rank in range(16) if rank != 9)};'))
    (folder / 'photo.jpg').write_bytes(bytes(range(256)) * 50)
    (folder / 'logs' / 'rank7.log').touch()
    return folder, diagnose(folder)


EXPECTED = {'hccl.init', 'env.unknown', 'memory.full', 'order.op', 'run.oom', 'run.oom_tensor', 'run.exploding', 'versions.torch', 'env.lower', 'env.no_effect', 'env.infiniband', 'layout.bubble', 'run.spike', 'run.slow_steps',
            'files.empty', 'env.default'}


@pytest.mark.parametrize('code', sorted(EXPECTED))
def test_the_launch_is_understood(launch, code):
    assert code in codes(launch[1])


def test_every_finding_has_evidence_cause_and_remedy(launch):
    folder, found = launch
    for finding in found:
        assert finding.message and (finding.fix or finding.severity == 'info') and finding.where, finding
    for name in ('pretrain_qwen.sh', 'train.log'):
        numbered = [finding.where for finding in found if name in finding.where]
        assert numbered and all(part.rpartition(':')[2].isdigit() for where in numbered for part in where.split(', ') if name in part)
    assert 'files.failed' not in codes(found)


def test_lines_are_the_right_ones(launch):
    folder, found = launch
    lines = (folder / 'pretrain_qwen.sh').read_text().splitlines()
    line = lambda code: lines[int(next(finding.where for finding in found if finding.code == code).rpartition(':')[2]) - 1]
    assert 'HCCL_EXEC_TIMEOUT' in line('env.lower') and 'HCCL_REDUCE_ALGO' in line('env.unknown') and 'micro-batch-size' in line('memory.full') and 'global-batch-size' in line('layout.bubble')


def test_the_report_is_ranked(launch):
    found = launch[1]
    severities, areas = [finding.severity for finding in found], {area: place for place, area in enumerate(CHAIN)}
    assert severities == sorted(severities, key=('error', 'warning', 'info').index)
    errors = [areas[finding.code.split('.')[0]] for finding in found if finding.severity == 'error']
    assert errors == sorted(errors)
    assert {finding.code.split('.')[0] for finding in found} <= set(CHAIN)


def test_json_and_table(launch):
    from rich.console import Console

    data = json.loads(json.dumps(diagnose_json(launch[1])))
    assert data['counts']['error'] == codes_of(launch[1], 'error') and data['findings'][0]['severity'] == 'error' and set(data['symptoms']) <= set(SYMPTOMS)
    console = Console(width=120, record=True, file=open(os.devnull, 'w'))
    console.print(report_table([*launch[1], Finding('error', 'x.y', '[bold] is no markup here [/x]', 'a [b', 'c[0]')]))
    text = console.export_text()
    assert 'memory.full' in text and '[bold] is no markup' in text


def codes_of(findings, severity):
    return sum(finding.severity == severity for finding in findings)


def test_same_answer_file_by_file(launch):
    folder, found = launch
    files = [path for path in folder.rglob('*') if path.is_file()]
    assert Counter(codes(diagnose(*files))) == Counter(codes(found))


# ---- the article's troubleshooting table (B23) and its two lists of steps (A13, A14) -------------------------------------

def evidence_for(row, folder):
    if row == 'training does not start':
        write_rank_table(with_cards(load_cluster('atlas-800t-a2'), 16), path=folder / 't.json')
        (folder / 't.json').write_text((folder / 't.json').read_text().replace('198.18.0.16', '198.18.0.1'))
    elif row == 'training stops in the middle':
        write_calls(folder, make_calls(8, 20, 2, 'cycle', 3))
    elif row == 'out of memory':
        (folder / 'run.sh').write_text(launch_script(8, num_layers=80, hidden_size=8192, num_attention_heads=64, pipeline_model_parallel_size=8))
    elif row == 'low utilization':
        (folder / 'run.sh').write_text(launch_script(8, pipeline_model_parallel_size=8, global_batch_size=4))
    elif row == 'slow communication':
        (folder / 'run.sh').write_text(launch_script(32, tensor_model_parallel_size=16, sequence_parallel=True, head='export HCCL_BUFFSIZE=400\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\n'))
    elif row == 'exploding gradients':
        megatron_log(folder / 'a.log', spike_at=100)
    else:
        megatron_log(folder / 'one.log')
        megatron_log(folder / 'two.log', steps=150, parts=True)


@pytest.mark.parametrize('row', SYMPTOMS)
def test_each_row_of_the_table_is_a_check(row, tmp_path):
    evidence_for(row, tmp_path)
    found = diagnose(tmp_path)
    assert row in symptoms(found), codes(found)
    assert all(finding.fix for finding in symptoms(found)[row])


def test_a13_deadlock_by_group_creation(tmp_path):  # C39
    write_calls(tmp_path, [Call(rank, 'new_group', (0, 1, 2, 3), 0, 'new_group', detail='0,3' if rank in (0, 3) else '1,2', site=f'train.py:{10 + rank}') for rank in range(4)])
    finding = diagnose(tmp_path)[0]
    assert finding.code == 'order.group_creation' and 'train.py:10' in finding.message and 'in one order' in finding.fix


def test_a14_three_checks_for_nan(tmp_path):
    megatron_log(tmp_path / 'a.log', nan_at=90)
    finding = next(finding for finding in diagnose(tmp_path) if finding.code == 'run.nan')
    assert 'step 90' in finding.message and finding.where.endswith('a.log:90')
    assert all(name in finding.fix for name in ('compare_quantized', 'check_equal', 'checked_all_reduce'))


# ---- cases ---------------------------------------------------------------------------------------------------------------

def test_c24_the_tensor_of_an_oom(tmp_path):
    (tmp_path / 'run.sh').write_text('torchrun --nproc-per-node 1 pretrain_gpt.py --num-layers 36 --hidden-size 1280 --num-attention-heads 20 --seq-length 1024 --micro-batch-size 4 --global-batch-size 4 '
                                     '--max-position-embeddings 1024 --vocab-size 50257 --fp16\n')
    (tmp_path / 'out.log').write_text('step\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB (GPU 0; 31.75 GiB total capacity; 28.82 GiB already allocated)\n')
    finding = next(finding for finding in diagnose(tmp_path) if finding.code == 'run.oom_tensor')
    assert 'logits of one micro-batch, fp32' in finding.message and '28.82 GiB held' in finding.message and finding.where.endswith('out.log:2')


@pytest.mark.parametrize('need, connected, words', [(8, [0, 2, 4, 6], 'ranks 1, 3, 5, 7 of 8'), (16, [rank for rank in range(16) if rank != 9], 'rank 9 of 16')])
def test_c35_missing_ranks(tmp_path, need, connected, words):
    (tmp_path / 'plog-1.log').write_text(plog_line(f'[DisplayConnectionedRank]need connect rankNum is [{need}]') + plog_line(f'[DisplayConnectionedRank]connected rankinfo[LINE 0]: {",".join(f"[{rank:016d}]" for rank in connected)};'))
    assert words in next(finding.message for finding in diagnose(tmp_path) if finding.code == 'hccl.init')


def test_c36_link(tmp_path):
    row = '   |  192.0.2.199(0)   |  16666  |   192.0.2.198(1)   |  3234403008  |  client  | time out |   DISABLE  | LinkInfo'
    (tmp_path / 'plog-11.log').write_text(plog_line(row))
    finding = next(finding for finding in diagnose(tmp_path) if finding.code == 'hccl.link')
    assert finding.where == 'ranks 1 and 0'


def test_c38_who_is_waited_for(tmp_path):
    for rank in (25, 3):
        (tmp_path / f'plog-{rank}.log').write_text(plog_line(f'[TaskExecStage][Timeout][Host]Task run failed, groupRank information is group:[w], user define information[], rankSize[32], rankId[{rank}].')
                                                   + plog_line('Task run failed, para information is notify id:[0x1], stage:[2], remote rank:[24].'))
    assert 'waited for rank 24' in next(finding.message for finding in diagnose(tmp_path) if finding.code == 'hccl.notify_wait')


def test_c40_opposite_order(tmp_path):
    write_calls(tmp_path, [Call(rank, group, (0, 1), 0, 'all_reduce', 8, 'float32', site=f'{group}.py:{rank}') for rank in (0, 1) for group in (('A', 'B') if rank == 0 else ('B', 'A'))])
    finding = next(finding for finding in diagnose(tmp_path) if finding.code.startswith('order.deadlock'))
    assert 'A.py:0' in finding.message and 'B.py:1' in finding.message


def test_c42_watchdog(tmp_path):
    (tmp_path / 'stderr.log').write_text('[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=_REDUCE_SCATTER_BASE, NumelIn=3121908768, NumelOut=32519883, Timeout(ms)=1800000) ran for 1800123 milliseconds\n')
    finding = next(finding for finding in diagnose(tmp_path) if finding.code == 'order.hang')
    assert '96' in finding.message and '0.494 s' in finding.message


def test_c43_late_rank(tmp_path):
    write_calls(tmp_path, [Call(rank, '0', (0, 1, 2, 3), 0, 'all_reduce', 8, 'float32', site='post.py:9', start_s=2000.0 * (rank == 0)) for rank in range(4)])
    assert 'rank 0' in next(finding.message for finding in diagnose(tmp_path) if finding.code == 'order.late_rank')


def test_c45_host_bound_rank(tmp_path):
    for trace in make_traces(2, 24, 100, 30, [0, 90], blocking=True):
        (tmp_path / f'rank{trace["distributedInfo"]["rank"]}.json').write_text(json.dumps(trace))
    found = [finding for finding in diagnose(tmp_path) if finding.code.startswith('traces.') and 'rank 1' in f'{finding.message} {finding.where}']
    assert found, codes(diagnose(tmp_path))


def test_c46_endless_skips(tmp_path):
    scale, lines = 65536.0, []
    while scale > 3.23e-27:
        lines.append(f'[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {scale}, reducing to {scale / 2}\n')
        scale /= 2
    (tmp_path / 'ds.log').write_text(''.join(lines))
    finding = next(finding for finding in diagnose(tmp_path) if finding.code == 'numerics.endless_skips')
    assert len(lines) in (104, 105) and f'{len(lines)} steps skipped in a row' in finding.message and finding.where.endswith(f':{len(lines)}')


def test_c47_pinned_scale(tmp_path):
    rows = [f'iteration {step}/ 400 | lm loss: 9.1 | loss scale: {max(1.0, 65536 / 2**step)} | grad norm: 1.0 |\n' for step in range(1, 60)]
    (tmp_path / 'a.log').write_text(''.join(rows))
    assert 'numerics.pinned_scale' in codes(diagnose(tmp_path))


def test_c50_scaled_once(tmp_path):
    megatron_log(tmp_path / 'good.log', steps=120)
    megatron_log(tmp_path / 'bad.log', steps=60, norm_factor=1 / 65536)
    finding = next(finding for finding in diagnose(tmp_path) if finding.code == 'numerics.scale_once')
    assert '2^-16' in finding.message and 'bad.log and' in finding.where


# ---- logs ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('text, key', [
    ('ImportError: libhccl.so: cannot open shared object file: No such file or directory', 'library'), ('RuntimeError: Two accelerators cannot be used at the same time in PyTorch: npu and cuda', 'two_accelerators'),
    ('OSError: [Errno 98] Address already in use', 'port'), ('[W socket.cpp:663] Connection refused', 'unreachable'), ('torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 3/4 clients joined.', 'store'),
    ('AssertionError: world size (12) is not divisible by total_model_size', 'world'), ('size mismatch for embedding.weight: copying a param', 'shape'), ("ModuleNotFoundError: No module named 'apex'", 'missing_module'),
    ('Signal 9 (SIGKILL) received by PID 77', 'killed'), ('exitcode  : -11 (pid: 3)', 'segfault'), ('HBM multi bit ECC error', 'ecc'), ('NPU out of memory. Tried to allocate 2.00 GiB', 'oom')])
def test_known_errors(tmp_path, text, key):
    assert key in ERRORS
    (tmp_path / 'x.log').write_text(f'start\n{text}\n{text}\n')
    found = [finding for finding in diagnose(tmp_path) if finding.code == f'run.{key}']
    assert len(found) == 1 and found[0].where.endswith('x.log:2') and '(2 times)' in found[0].message


def test_quiet_log_is_quiet(tmp_path):
    megatron_log(tmp_path / 'a.log')
    assert diagnose(tmp_path) == []


def test_front_and_end_of_a_large_log(tmp_path, monkeypatch):
    monkeypatch.setattr('hybridlab.doctor.run_logs.HEAD_BYTES', 20_000)
    monkeypatch.setattr('hybridlab.doctor.run_logs.TAIL_BYTES', 5_000)
    megatron_log(tmp_path / 'a.log', steps=1000)
    with (tmp_path / 'a.log').open('a') as file:
        file.write('NPU out of memory. Tried to allocate 2.00 GiB\n')
    found = diagnose(tmp_path)
    assert codes(found) == ['run.oom', 'run.size'] and found[0].where.endswith('a.log:1001')
    log = read_run_log(tmp_path / 'a.log')
    assert 100 < len(log.lines) < 200 and (log.lines == log.columns['step']).all()  # one step per line here


def test_rhythm_of_slow_steps(tmp_path):
    megatron_log(tmp_path / 'a.log', slow_every=25)
    [finding] = diagnose(tmp_path)
    assert finding.code == 'run.slow_steps' and 'every 25 lines' in finding.message and finding.severity == 'warning'


def test_flat_loss(tmp_path):
    megatron_log(tmp_path / 'a.log', steps=260, flat=True)
    assert codes(diagnose(tmp_path)) == ['run.flat']


def test_compare_needs_common_steps(tmp_path):
    megatron_log(tmp_path / 'a.log', steps=4)
    log = read_run_log(tmp_path / 'a.log')
    assert compare_run_logs(log, log) == [] and check_run_log(read_run_log(tmp_path / 'none.log'))[0].code == 'run.unreadable'
    assert check_hccl_test('nothing') == [] and explore_run_log().image.value[:4] == b'\x89PNG'


# ---- files that mean harm ------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def originals(launch):
    folder, _ = launch
    files = {path.relative_to(folder).as_posix().replace('/', '_'): path.read_bytes()[:60_000] for path in sorted(folder.rglob('*')) if path.is_file() and path.stat().st_size}
    files |= {'ds.json': b'{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}', 'titan.toml': b'[parallelism]\ntensor_parallel_degree = 8\n[training]\nseq_len = 4096\n',
              'conf.yaml': b'parallel_config:\n  data_parallel: 2\n  model_parallel: 8\nmodel:\n  model_config:\n    seq_length: 4096\n    num_hidden_layers: 32\n', 'trace.json.gz': gzip.compress(files['profile_rank0.json']),
              'kernel_details.csv': b'Name,Type,Start Time(us),Duration(us)\nmm,MatMulV2,"1\t",2\n', 'step_trace_time.csv': b'Device_id,Step,Computing,Communication(Not Overlapped),Free,Stage,Bubble\n0,1,10,2,3,15,1\n',
              'communication.json': b'{"step": {"collective": {"op": {"Communication Time Info": {"Elapse Time(ms)": 1}}}}}', 'trace_0.pkl': b'\x80\x04}\x94\x8c\x07entries\x94]\x94s.', 'train.py': b'import os\nos.environ["HCCL_ALGO"] = "ring"\n'}
    return files


def mutate(rng, data):
    "One of ten ways to spoil a file."
    at = rng.randrange(len(data) + 1)
    ways = [lambda: data[:at], lambda: data[:at] + rng.randbytes(rng.randint(1, 300)) + data[at:], lambda: b'', lambda: data + data, lambda: data[:at] + b'[' * 60_000 + data[at:], lambda: data[:at] + b'{"a":' * 30_000,
            lambda: data.replace(b':', b'\0'), lambda: data.replace(b'1', b'9' * rng.randint(1, 5000), 3), lambda: data.replace(b'"', b"'"), lambda: bytes(byte ^ (1 << rng.randrange(8)) if rng.random() < 0.02 else byte for byte in data[:20_000])]
    return rng.choice(ways)()


def test_two_hundred_spoiled_files_give_findings_only(tmp_path, originals):
    rng, failed = random.Random(20), []
    for number in range(200):
        name = rng.choice(sorted(originals))
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_bytes(mutate(rng, originals[name]))
        found = diagnose(folder)
        assert all(isinstance(finding, Finding) for finding in found)
        failed += [(number, name, finding.message) for finding in found if finding.code == 'files.failed']
    assert not failed


@pytest.mark.parametrize('payload', [b'\x80\x04cos\nsystem\n(S"touch %s"\ntR.', b"cos\nsystem\n(S'touch %s'\ntR.", b'a: !!python/object/apply:os.system ["touch %s"]\n', b'touch %s; $(touch %s)\n', b'import os\nos.system("touch %s")\n',
                                     b'{"entries": "__import__(\'os\').system(\'touch %s\')"}'])
@pytest.mark.parametrize('name', ['a.pkl', 'a.yaml', 'a.sh', 'a.py', 'a.json', 'trace_0', 'plog-1.log'])
def test_no_file_runs_code(tmp_path, payload, name):
    target = tmp_path / 'ran'
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in' / name).write_bytes(payload.replace(b'%s', str(target).encode()))
    diagnose(tmp_path / 'in')
    assert not target.exists()


def test_special_files(tmp_path):
    os.mkfifo(tmp_path / 'pipe.log')
    (tmp_path / 'loop').symlink_to(tmp_path)
    (tmp_path / 'dead.json').symlink_to(tmp_path / 'gone')
    (tmp_path / 'x.json').mkdir()
    assert codes(diagnose(tmp_path)) == ['files.nothing']
    assert codes(diagnose(tmp_path / 'pipe.log', tmp_path / 'gone', 'a\0b'))[:3] == ['files.missing', 'files.missing', 'files.special']


def test_huge_files_are_not_read_whole(tmp_path):
    for name in ('rank_table.json', 'run.sh', 'trace_0.pkl', 'x.yaml'):
        with (tmp_path / name).open('wb') as file:
            file.write({'r': b'{"server_list": [', 't': b'\x80\x04', 'x': b'a: 1\n'}.get(name[0], b'torchrun x.py\n') if name != 'run.sh' else b'torchrun x.py\n')
            file.truncate(3 << 30)  # sparse
    found = diagnose(tmp_path)
    assert 'rank_table.size' in codes(found) and 'order.too_large' in codes(found) and 'files.failed' not in codes(found)


def test_many_files_end(tmp_path, monkeypatch):
    monkeypatch.setattr('hybridlab.doctor.diagnose.MAX_FILES', 20)
    for number in range(40):
        (tmp_path / f'{number}.bin').write_bytes(b'\0\1')
    files, findings = collect_files([tmp_path])
    assert len(files) == 20 and codes(findings) == ['files.many']


def test_a_reader_that_fails_costs_one_finding(tmp_path, monkeypatch):
    (tmp_path / 'run.sh').write_text('export HCCL_EXEC_TIMEOUT=600\n')
    def broken(evidence):
        raise KeyError('surprise')
    monkeypatch.setattr('hybridlab.doctor.diagnose.RULES', (broken, *__import__('hybridlab.doctor.diagnose', fromlist=['RULES']).RULES))
    assert codes(diagnose(tmp_path)) == ['env.lower', 'files.failed'] or codes(diagnose(tmp_path)) == ['files.failed', 'env.lower']


@pytest.mark.parametrize('name, text, kind', [
    ('a', b'', 'empty'), ('a', b' \n\n', 'empty'), ('t.json', b'{"server_list": []}', 'rank_table'), ('x', b'{"format":"hybridlab.calls","version":1}', 'calls'), ('nccl_trace_rank_0', b'\x80\x04}.', 'calls'), ('plog-3_1.log', b'x', 'plog'),
    ('trace_view.json', b'[{"ph": "X"}]', 'profile'), ('run', b'#!/bin/sh\nA=1\n', 'config'), ('train.log', b'iteration 1/3 | lm loss: 2', 'log'), ('photo', bytes(range(256)), 'other'), ('smi.txt', b'npu-smi 24.1\n HBM-Usage(MB)', 'cards'),
    ('t.out', b'data_size(Bytes) | aveg_time(us) | alg_bandwidth(GB/s)', 'hccl_test'), ('requirements.txt', b'torch_npu==2.1.0\n', 'config')])
def test_recognise(tmp_path, name, text, kind):
    (tmp_path / name).write_bytes(text)
    assert recognise(tmp_path / name) == kind


# ---- report and widget ---------------------------------------------------------------------------------------------------

def test_equal_findings_of_many_files_are_one():
    [finding] = rank_findings([Finding('error', 'a.b', 'm', 'f', f'x:{n}') for n in range(9)])
    assert finding.where == 'x:0, x:1, x:2 and 6 more'


def test_widget_takes_uploads_of_both_kinds():
    doctor = explore_doctor()
    files = {'../../evil.sh': b'export HCCL_EXEC_TIMEOUT=600\n', 'b.sh': b'export HCCL_REDUCE_ALGO=HD\n'}
    for value in ([{'name': name, 'content': memoryview(content)} for name, content in files.items()], {name: {'metadata': {'name': name}, 'content': content} for name, content in files.items()}):
        found = doctor.examine(value)
        assert codes(found) == ['env.unknown', 'env.lower'] and [finding.where for finding in found] == ['b.sh:1', 'evil.sh:1']
    doctor.show_findings(found)
    assert 'HCCL_REDUCE_ALGO' in doctor.details.value and doctor.image.value[:4] == b'\x89PNG' and 'image/png' in doctor._repr_mimebundle_()
    assert plot_symptoms(found).get_title(loc='left') == 'Most findings explain: training does not start'
