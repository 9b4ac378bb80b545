"""Launch files as a shell reads them, five frameworks' settings as layouts, HCCL's variables, versions; cases of group A, B15, B16, B19, B20, B25."""
import json
import random
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from hybridlab.core.findings import Finding
from hybridlab.doctor.config_files import (
    MAX_NODES, PRODUCTS, Setting, check_configs, check_environment, check_versions, config_kind, effective_exec_timeout, explore_exec_timeout, explore_launch, find_launches,
    find_versions, launch_specs, load_variables, plot_findings, read_config, read_environment, read_python, read_shell, read_tree)
from hybridlab.plan.export import fit_plan, load_arguments, to_deepspeed, to_launch, to_megatron_args, to_mindspeed_args, to_mindspore, to_torchtitan
from hybridlab.spec.cluster import load_cluster, with_cards
from hybridlab.spec.layout import Layout, TrainSpec
from hybridlab.spec.model import load_model

ROOT = Path(__file__).resolve().parents[1]
codes = lambda findings: [finding.code for finding in findings]
of_code = lambda findings, code: [finding for finding in findings if finding.code == code]


# ---- shell: against a real one -------------------------------------------------------------------------------------------

SHOW = "show() { for word; do printf '%s\\0' \"$word\"; done; printf '\\1'; }\n"


def bash_words(script):
    "Arguments of every call of `show`, as bash sees them."
    if not shutil.which('bash'):
        pytest.skip('bash is not installed')
    done = subprocess.run(['bash', '--norc', '-c', SHOW + script], capture_output=True, env={'PATH': '/usr/bin:/bin'}, timeout=20)
    return [call.decode().split('\0')[:-1] for call in done.stdout.split(b'\1')[:-1]]


def our_words(script):
    return [list(command.words[1:]) for command in read_shell(script).commands if command.words[0] == 'show']


@pytest.mark.parametrize('script', [
    'A=1; show $A "$A" \'$A\' \\$A "a\\"b" a\\ b',
    'A="x  y"; show $A "$A" pre$A"post"',
    'A=(1 "2 3"); B=("${A[@]}" 4); show "${B[@]}" ${#B[@]} "${B[1]}" ${A[0]}',
    'A=(a); A+=(b "c d"); show "${A[@]}" ${A[2]} | cat',
    'show ${X:-8} ${X:=9} $X ${X:+set} ${Y+set} ${#X} "${Z:-a b}"',
    'G=8; N=2; show $((G*N)) $(( (G + N) / 3 )) $((-G % 3)) $(($G*${N}))',
    'show one \\\n  two # three \\\nshow four',
    'cat > /dev/null <<EOF\nshow not\nEOF\nshow yes',
    'if true; then A=1; fi; for i in 5; do show $i $A; done',
    'A="\n  --tp 8 \\\n  --pp 4\n"; show $A',
    'show a 2>/dev/null b; show c 2>&1 d; show "#no" no#comment',
    'A=1 B="$A"; export C=$B D; D=2; show $C $D; unset C; show "[${C-gone}]"',
    "show 'a'\"b\"c; show a;show b&& show c",
    'ARGS="$ARGS --x 1"; ARGS="$ARGS --y 2"; show $ARGS',
])
def test_words_are_those_of_bash(script):
    assert our_words(script) == bash_words(script)


VALUE = st.sampled_from(['1', '8', 'x', 'a b', '--tp 8', '', 'p=q', 'a;b', 'c|d', '#h'])
PIECES = st.sampled_from(['$A', '"$A"', '${B}', '"${B} $A"', "'$A'", 'lit', '"two words"', '$((N * 2 + 1))', '${A:-d}', '"${L[@]}"', '${#L[@]}', 'a\\ b', '\\\n', 'x"y"z', '--k=$N'])


@settings(max_examples=60, deadline=None)
@given(a=VALUE, b=VALUE, n=st.integers(0, 99), items=st.lists(VALUE, min_size=1, max_size=4), pieces=st.lists(PIECES, min_size=1, max_size=8), comment=st.booleans())
def test_generated_scripts_like_bash(a, b, n, items, pieces, comment):
    quoted = lambda text: f"'{text}'"
    script = (f'A={quoted(a)}\nB="{b}"; N={n}\nL=({" ".join(map(quoted, items))})\n{"# show nothing" if comment else ""}\n' f'show {" ".join(pieces)}{" # end" if comment else ""}\n')
    assert our_words(script) == bash_words(script)


def test_arguments_lost_to_a_comment_or_a_blank_are_found():
    script = 'torchrun x.py --a 1 \\ \n  --b 2 \\\n  # note \\\n  --c 3\nexport HCCL_ALGO=level0:NA;level1:ring\nHCCL_BUFFSIZE=400\n'
    found = read_shell(script, 'run.sh').findings
    assert [(finding.code, finding.where) for finding in found] == [
        ('shell.continuation', 'run.sh:1'), ('shell.lost_arguments', 'run.sh:2'), ('shell.lost_arguments', 'run.sh:4'), ('shell.semicolon', 'run.sh:5'), ('shell.not_exported', 'run.sh:6')]
    assert codes(read_shell('A=1\r\nrun x\r\n').findings) == ['shell.crlf'] and read_shell('A=1\r\nrun $A\r\n').commands[0].words == ('run', '1')
    assert codes(read_shell('run "never closed\nA=1').findings) == ['shell.quote']


def test_nothing_of_a_script_runs(tmp_path):
    script = f'touch {tmp_path}/a; `touch {tmp_path}/b`; x=$(touch {tmp_path}/c); eval "touch {tmp_path}/d"; : $((a[$(touch {tmp_path}/e)]))\nenv | tee {tmp_path}/f\n'
    (tmp_path / 'x.sh').write_text(script)
    read_config(tmp_path / 'x.sh')
    check_configs([read_config(tmp_path / 'x.sh')])
    assert [path.name for path in tmp_path.iterdir()] == ['x.sh']


@pytest.mark.parametrize('text', ['A="$A$A$A"\n' * 400 + 'run $A\n', 'A=xxxxxxxx\n' + 'A="$A$A"\n' * 200 + 'run ' + '$A ' * 5000, '$(' * 20000, '"${A:-' * 5000, 'a' * 10**6, '\\\n' * 10**5, "'" * 99999, '((' * 10**5, 'B=(' * 10**4])
def test_hostile_scripts_end(text):
    assert sum(map(len, (word for command in read_shell(text).commands for word in command.words))) < 1 << 26


def test_scripts_of_many_commands_and_variables_end():
    lines = [f'torchrun --nproc-per-node 8 x.py --tensor-model-parallel-sizes{n} 8 --num-layers 3 --hidden-size {n}\nexport HCCL_NAME_{n}=1\n' for n in range(6000)]
    found = check_configs([read_shell(''.join(lines))])
    assert 50 <= len(of_code(found, 'env.unknown')) <= 60 and all(isinstance(finding, Finding) for finding in found)
    assert our_words('L=(1 2); show $L ${L[9]} ${L[99999999999999999999]}') == [['1', '', '']] or our_words('L=(1 2); show $L "${L[9]}"') == [['1', '']]


# ---- trees ---------------------------------------------------------------------------------------------------------------

def test_trees_give_values_with_lines():
    text = '# c\n[parallelism]\ntensor_parallel_degree = 8\n[training]\nseq_len = 4096\n'
    read = read_tree(text, 'toml', 'a.toml')
    assert read.settings == {'parallelism.tensor_parallel_degree': Setting(8, 'a.toml:3'), 'training.seq_len': Setting(4096, 'a.toml:5')}
    read = read_tree('{\n "a": {"b": [1, 2],\n  "c": null}}', 'json', 'a.json')
    assert read.settings == {'a.b': Setting([1, 2], 'a.json:2'), 'a.c': Setting(None, 'a.json:3')}


@pytest.mark.parametrize('kind, text', [
    ('json', '{"a": 1,}'), ('json', ''), ('json', '[' * 10**5), ('json', '{"a": ' + '9' * 5000 + '}'), ('toml', 'a = 1\na = 2'), ('toml', 'a = ' + '[' * 10**4), ('yaml', 'a: [1'), ('yaml', '\t- a'),
    ('yaml', 'a: !!python/name:os.system'), ('yaml', '? [a]\n: 1'), ('yaml', '- ' * 5000), ('yaml', 'a: 2026-99-99'), ('yaml', 'x' * 300_000)])
def test_broken_trees_are_findings(kind, text):
    read = read_tree(text, kind, 'f')
    assert read.findings and all(finding.code == f'config.{kind}' and finding.where.startswith('f') for finding in read.findings)


def test_anchors_do_not_grow():
    laughs = 'a: &a [x, x, x, x, x, x, x, x, x]\n' + ''.join(f'{chr(98 + n)}: &{chr(98 + n)} [{", ".join([f"*{chr(97 + n)}"] * 9)}]\n' for n in range(9))
    assert len(read_tree(laughs, 'yaml').settings) <= MAX_NODES


def test_environment_in_containers():
    inspect = json.dumps([{'Config': {'Env': ['HCCL_CONNECT_TIMEOUT=1200', 'PATH=/bin']}}])
    pod = 'spec:\n  containers:\n  - name: main\n    env:\n    - name: HCCL_BUFFSIZE\n      value: "400"\n    - name: TASK_QUEUE_ENABLE\n      value: 2\n'
    assert read_tree(inspect, 'json').environment['HCCL_CONNECT_TIMEOUT'].value == '1200'
    assert {name: setting.value for name, setting in read_tree(pod, 'yaml', 'pod.yaml').environment.items()} == {'HCCL_BUFFSIZE': '400', 'TASK_QUEUE_ENABLE': '2'}
    assert read_environment('export A="b c"\nnoise here\nD=1').environment == {'A': Setting('b c', 'environment:1'), 'D': Setting('1', 'environment:3')}


def test_python_is_parsed_not_imported(tmp_path):
    read = read_python(f"import os\nopen('{tmp_path}/x', 'w')\nos.environ['HCCL_ALGO'] = 'ring'\nctx.set_auto_parallel_context(device_num=64, pipeline_stages=f())\n", 'a.py')
    assert read.environment == {'HCCL_ALGO': Setting('ring', 'a.py:3')} and read.settings['set_auto_parallel_context.device_num'].value == 64
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('text, name, kind', [
    ('HOME=/root\nPWD=/x\nHCCL_BUFFSIZE=200\n', 'env.txt', 'environment'), ('declare -x A="1"\ndeclare -x B="2"\n', 'e', 'environment'), ('export A=1\ntorchrun x.py\n', 'launch', 'shell'), ('{"a": 1}', 'x.conf', 'json'),
    ('model:\n  layers: 3\n', 'cfg', 'yaml'), ('[model]\nname = "x"\n', 'cfg', 'toml'), ('import os\n', 'train.py', 'python'), ('iteration 3/9 | lm loss: 2.0\n' * 30, 'out', ''), ('', 'a.sh', ''), ('\0\1', 'a.sh', '')])
def test_kinds(text, name, kind):
    assert config_kind(text, name) == kind


# ---- environment: B16, B19, B25 ------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name, value, severity, code, words', [
    ('HCCL_EXEC_TIMEOUT', '600', 'warning', 'env.lower', 'below the default of 1836 s'), ('HCCL_CONNECT_TIMEOUT', '120', 'info', 'env.default', 'is the default'),
    ('HCCL_WHITELIST_DISABLE', '1', 'info', 'env.default', 'is the default'), ('HCCL_INTRA_ROCE_ENABLE', '1', 'warning', 'env.no_effect', 'no effect on Atlas A2'),
    ('HCCL_ALGO', 'ring', 'error', 'hccl_algo.value', "'ring'"), ('HCCL_REDUCE_ALGO', 'HD', 'error', 'env.unknown', 'no component reads'), ('HCCL_TRACE_FILE', 'comm.log', 'error', 'env.unknown', 'no component reads'),
    ('HCCL_CONNECT_TIMEOUT', '30', 'error', 'env.range', 'out of range'), ('HCCL_EXEC_TIMEOUT', 'ten', 'error', 'env.value', 'no number'), ('HCCL_EXEC_TIMEOUT', 'nan', 'error', 'env.value', 'no number'),
    ('HCCL_EXEC_TIMEOUT', '0', 'warning', 'env.zero', 'never reported'), ('HCCL_BUFFSIZE', '20', 'warning', 'env.lower', 'slower'), ('HCCL_BUFSIZE', '400', 'warning', 'env.unknown', 'no list'),
    ('HCCL_SOCKET_IFNAME', 'ib0', 'warning', 'env.infiniband', 'InfiniBand'), ('HCCL_SOCKET_IFNAME', 'eth0', 'info', 'env.interface', 'begins so'), ('HCCL_IF_IP', '192.0.2.300', 'error', 'env.value', 'no address'),
    ('HCCL_OP_EXPANSION_MODE', 'AICPU_CacheDisable', 'error', 'env.value', 'not accepted'), ('HCCL_OP_EXPANSION_MODE', 'AIV', 'warning', 'env.aiv', 'inference'), ('ASCEND_LAUNCH_BLOCKING', '1', 'warning', 'env.debugging', 'debugging'),
    ('TASK_QUEUE_ENABLE', '0', 'warning', 'env.zero', 'bottleneck'), ('HCCL_DFS_CONFIG', 'stuck_detection:on, cluster_heartbeat:on', 'error', 'env.value', 'without blanks'), ('HCCL_RDMA_TC', '131', 'error', 'env.range', 'multiple of 4'),
    ('HCCL_HOST_SOCKET_PORT_RANGE', '80-90', 'warning', 'env.ports', 'below 1024'), ('HCCL_NPU_SOCKET_PORT_RANGE', '70000', 'error', 'env.range', '65535')])
def test_variable(name, value, severity, code, words):
    [finding] = check_environment({name: Setting(value, 'run.sh:3')})
    assert (finding.severity, finding.code, finding.where) == (severity, code, 'run.sh:3') and words in finding.message and finding.fix


def test_remedies_name_the_real_variable():
    fix = lambda name: check_environment({name: 'x'})[0].fix
    assert 'level0:NA;level1:H-D_R' in fix('HCCL_REDUCE_ALGO') and 'recursive halving-doubling' in fix('HCCL_REDUCE_ALGO')
    assert 'HCCL_ENTRY_LOG_ENABLE' in fix('HCCL_TRACE_FILE') and fix('HCCL_CONECT_TIMEOUT') == 'Did you mean HCCL_CONNECT_TIMEOUT?'


def test_good_environment_is_silent():
    good = {'HCCL_CONNECT_TIMEOUT': '1200', 'HCCL_EXEC_TIMEOUT': '3600', 'HCCL_EVENT_TIMEOUT': '3700', 'HCCL_ALGO': 'level0:NA;level1:H-D_R', 'HCCL_BUFFSIZE': '512', 'HCCL_SOCKET_IFNAME': '=eth0', 'HCCL_IF_BASE_PORT': '50000',
            'HCCL_NPU_SOCKET_PORT_RANGE': '61000-61050,61100', 'TORCH_HCCL_TRACE_BUFFER_SIZE': '2000', 'TASK_QUEUE_ENABLE': '2', 'PATH': '/bin', 'OMP_NUM_THREADS': '1'}
    assert check_environment(good) == []


def test_products_differ():
    assert codes(check_environment({'HCCL_OP_EXPANSION_MODE': 'AICPU_CacheDisable'}, 'a3')) == [] and codes(check_environment({'HCCL_RDMA_TIMEOUT': '24'}, '910a')) == []
    [finding] = check_environment({'HCCL_EXEC_TIMEOUT': '600'}, '910a')
    assert 'acts as 544 s' in finding.message
    assert codes(check_environment({'HCCL_INTER_HCCS_DISABLE': 'TRUE'}, 'a2')) == ['env.no_effect']
    with pytest.raises(ValueError, match='a2, a3'):
        check_environment({}, 'b7')


@pytest.mark.parametrize('variables, code', [
    ({'HCCL_EXEC_TIMEOUT': '7200'}, 'env.event_timeout'), ({'HCCL_INTRA_ROCE_ENABLE': '1', 'HCCL_INTRA_PCIE_ENABLE': '1'}, 'env.conflict'), ({'HCCL_WHITELIST_DISABLE': '0'}, 'env.conflict'),
    ({'HCCL_DETERMINISTIC': 'true', 'HCCL_ALGO': 'level0:NA;level1:pipeline'}, 'env.conflict'), ({'PYTORCH_NPU_ALLOC_CONF': 'a', 'PYTORCH_ALLOC_CONF': 'b'}, 'env.conflict'), ({'NCCL_IB_DISABLE': '1'}, 'env.foreign')])
def test_combinations(variables, code):
    assert code in codes(check_environment(variables))


@given(st.dictionaries(st.sampled_from([*load_variables(), 'HCCL_X', 'NCCL_Y']), st.text(max_size=30) | st.integers(-5, 10**12).map(str), max_size=5), st.sampled_from([*PRODUCTS, None]))
@settings(max_examples=150, deadline=None)
def test_any_environment_gives_findings(variables, product):
    assert all(isinstance(finding, Finding) for finding in check_environment(variables, product))


def test_tables_agree_with_the_planner():
    rules = load_variables()
    for name, rule in load_arguments('hccl').items():
        assert {key: rules[name].get(key) for key in ('default', 'least', 'most') if key in rule} == {key: rule[key] for key in ('default', 'least', 'most') if key in rule}, name


def test_every_value_has_a_source():
    table = tomllib.loads((ROOT / 'data/hccl_environment.toml').read_text())
    assert all(source['how'] in ('read', 'measured', 'derived', 'recalled') and source['source'] for source in table['sources']) and table['sources'][-1]['fields'] == ['*']
    pairs = tomllib.loads((ROOT / 'data/versions.toml').read_text())
    assert all(source['how'] in ('read', 'measured', 'derived', 'recalled') for source in pairs['sources'])
    assert all(row[0].split('.post')[0].split('rc')[0] == row[1] for row in pairs['torch_npu'])  # torch_npu carries torch's number
    assert {row[3] for row in pairs['torch_npu']} >= set(pairs['compatible']) and {row[1] for row in pairs['torch_npu']} - set(pairs['python']) <= {'2.0.1'}


def test_exec_timeout_figures():
    assert [effective_exec_timeout(600, product) for product in ('a2', '910a')] == [600, 544] and effective_exec_timeout(5000, 'a3', 'AIV') == 1091
    assert explore_exec_timeout().image.value[:4] == b'\x89PNG'


# ---- versions: B15 -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('versions, severity, words', [
    ({'cann': '7.0', 'mindspore': '2.0'}, 'error', 'For CANN 7.0 take MindSpore 2.2.10 or 2.2.0'), ({'cann': '8.0', 'mindspore': '2.2'}, 'error', 'for MindSpore 2.2 take CANN 7.0.0'),
    ({'cann': '8.1.RC1', 'mindspore': '2.6.0rc1'}, None, ''), ({'cann': '8.5.0', 'mindspore': '2.7.2'}, None, ''), ({'cann': '8.3.RC1', 'mindspore': '2.7.1'}, None, ''),
    ({'cann': '9.9.0', 'mindspore': '9.9.9'}, 'warning', 'not in our table'), ({'cann': '8.0.RC2', 'torch_npu': '2.1.0.post6'}, None, ''), ({'cann': '8.5.0', 'torch_npu': '2.1.0.post6'}, 'error', 'nobody tests'),
    ({'cann': '8.3.RC1', 'torch_npu': '2.5.1'}, 'info', 'listed as compatible'), ({'torch': '2.1.0', 'torch_npu': '2.1.0.post6'}, None, ''), ({'torch': '2.5.1', 'torch_npu': '2.1.0.post6'}, 'error', 'torch==2.1.0'),
    ({'torch': '2.13.0', 'torch_npu': '2.13.0', 'python': '3.9'}, 'error', 'no build for Python 3.9')])
def test_version_pairs(versions, severity, words):
    found = check_versions(versions)
    assert [finding.severity for finding in found] == ([severity] if severity else [])
    assert all(words in f'{finding.message} {finding.fix}' for finding in found)


def test_versions_are_found():
    assert find_versions('FROM ascend/cann:8.1.rc1-910b-ubuntu22.04-py3.10\ntorch==2.5.1\ntorch_npu==2.5.1') == {'torch_npu': '2.5.1', 'torch': '2.5.1', 'cann': '8.1.RC1'}
    assert find_versions('no versions, torchrun 2 --torch-npu') == {}


# ---- launches ------------------------------------------------------------------------------------------------------------

BASE = {'num-layers': 32, 'hidden-size': 4096, 'num-attention-heads': 32, 'seq-length': 4096, 'micro-batch-size': 1, 'global-batch-size': 64, 'vocab-size': 32000, 'bf16': True}


def script(world, launcher='torchrun --nproc-per-node {each} --nnodes {servers}', head='export CUDA_DEVICE_MAX_CONNECTIONS=1\n', **arguments):
    given = BASE | {name.replace('_', '-'): value for name, value in arguments.items()}
    words = ' \\\n  '.join(f'--{name}{"" if value is True else f" {value}"}' for name, value in given.items() if value is not None)
    return f'{head}{launcher.format(each=min(8, world), servers=-(-world // 8), world=world)} pretrain_gpt.py \\\n  {words}\n'


CASES = { # case: (script, code, words that the answer must hold)
    'C01': (script(4, num_layers=30, pipeline_model_parallel_size=4), 'layout.layers', ['build 28', '1, 2, 3, 5, 6, 10, 15, 30']),
    'C03': (script(16, num_layers=80, pipeline_model_parallel_size=16, num_layers_per_virtual_pipeline_stage=2), 'layout.layers', ['leave 16 over', 'build 64', 'vpp may be 1, 5']),
    'C03 by stages': (script(16, num_layers=80, pipeline_model_parallel_size=16, num_virtual_stages_per_pipeline_rank=2), 'layout.layers', ['leave 16 over']),
    'C04': (script(64, num_layers=46, tensor_model_parallel_size=8, pipeline_model_parallel_size=4, num_experts=128, expert_model_parallel_size=16, expert_tensor_parallel_size=1, micro_batch_size=2, global_batch_size=16,
                   sequence_parallel=True, num_attention_heads=96, hidden_size=4096, kv_channels=128), 'layout.layers', ['46 layers', '(11, 12, 12, 11)']),
    'C04 bubble': (script(64, num_layers=48, tensor_model_parallel_size=8, pipeline_model_parallel_size=4, num_experts=128, expert_model_parallel_size=16, expert_tensor_parallel_size=1, micro_batch_size=2, global_batch_size=16,
                          sequence_parallel=True), 'layout.bubble', ['42.9%', 'm=8 and 27.3%']),
    'C06': (script(8, num_attention_heads=28, hidden_size=3584, tensor_model_parallel_size=8), 'layout.heads', ['1, 2, 4, 7, 14, 28', 'inside a server of 8 cards: 1, 2, 4']),
    'C08': (script(2, vocab_size=65535, tensor_model_parallel_size=2), 'layout.vocab', ['65536']),
    'C09': (script(16, seq_length=8200, context_parallel_size=2, tensor_model_parallel_size=8, sequence_parallel=True), 'layout.sequence', ['leaves 8', '8192, 8208']),
    'C12': (script(4, num_experts=8, expert_model_parallel_size=8, expert_tensor_parallel_size=1), 'layout.ep', ['ep=4 with 2 experts on a rank']),
}


@pytest.mark.parametrize('case', CASES)
def test_case_answered_from_its_script(case):
    text, code, words = CASES[case]
    found = of_code(check_configs([read_shell(text, 'run.sh')]), code)
    assert found, f'{case}: no {code}'
    assert all(word in f'{found[0].message} {found[0].fix}' for word in words), found[0]
    assert found[0].where.startswith('run.sh:') and found[0].where != 'run.sh:0'


def test_c13_is_accepted():
    text = script(16, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=2, num_experts=8, expert_model_parallel_size=4, expert_tensor_parallel_size=1, sequence_parallel=True, num_layers=8)
    [launch] = find_launches([read_shell(text)])
    _, layout, _, _ = launch_specs(launch)
    assert (layout.dp, layout.edp) == (2, 2) and not [finding for finding in check_configs([read_shell(text)]) if finding.severity == 'error']


def test_c10_two_values_of_one_axis():
    text = script(32, tensor_model_parallel_size=8, context_parallel_size=2).replace('pretrain_gpt.py', 'pretrain_gpt.py --config cp.yaml')
    tree = read_tree('tensor_model_parallel_size: 8\ncontext_parallel_size: 4\nnum_layers: 32\n', 'yaml', 'cp.yaml')
    found = of_code(check_configs([read_shell(text, 'run.sh'), tree]), 'layout.effective')
    assert [finding.message for finding in found] == ['two cp values in effect: 2 configured, 4 derived from the group.']


def test_c15_batch_for_two_processes():
    config = read_tree('{"train_batch_size": 64,\n "train_micro_batch_size_per_gpu": 4,\n "gradient_accumulation_steps": 8}', 'json', 'ds.json')
    [finding] = of_code(check_configs([config, read_environment('WORLD_SIZE=1\n')]), 'layout.batch')
    assert finding.where == 'ds.json:1' and '2 replicas' in finding.fix
    assert not of_code(check_configs([config, read_shell('deepspeed --num_gpus 2 train.py --deepspeed ds.json\n')]), 'layout.batch')


def test_c27_and_c29_do_not_fit():
    text = script(8, num_layers=80, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=28672, swiglu=True, pipeline_model_parallel_size=8, use_distributed_optimizer=True, group_query_attention=True, num_query_groups=8)
    [finding] = of_code(check_configs([read_shell(text, 'run.sh')]), 'memory.full')
    assert finding.severity == 'error' and 'GiB' in finding.message


def test_b20_rank_table_argument():
    text = 'export RANK_SIZE=64\nmpirun -n 64 --hostfile hostfile python train.py --config config.yaml --rank_table rank_table.json\n'
    [finding] = of_code(check_configs([read_shell(text, 'a.sh')]), 'launch.rank_table')
    assert finding.severity == 'error' and 'RANK_TABLE_FILE' in finding.fix and 'torchrun or msrun' in finding.fix and finding.where == 'a.sh:2'


@pytest.mark.parametrize('line, world, cards', [
    ('torchrun --nproc_per_node 8 --nnodes=4 x.py', 32, 8), ('python -m torch.distributed.run --nproc-per-node=16 x.py', 16, 16), ('msrun --worker_num=64 --local_worker_num=8 --join=True x.py', 64, 8),
    ('mpirun --allow-run-as-root -np 16 python x.py', 16, None), ('deepspeed --num_nodes 2 --num_gpus 8 x.py', 16, 8), ('srun -n 32 --ntasks-per-node=8 python x.py', 32, 8),
    ('bash scripts/msrun_launcher.sh "run_mindformer.py --config a.yaml" 16 8', 16, 8), ('OMP_NUM_THREADS=1 nohup torchrun --standalone --nproc-per-node 4 -m pkg.train > log 2>&1 &', 4, 4),
    ('torchrun --nproc-per-node $N x.py', None, None)])
def test_launchers(line, world, cards):
    [launch] = find_launches([read_shell(line)])
    assert (launch.world, launch.cards) == (world, cards)


def test_findings_point_at_their_lines():
    text = script(16, tensor_model_parallel_size=3, head='export HCCL_EXEC_TIMEOUT=600\n')
    found = check_configs([read_shell(text, 'run.sh')])
    lines = text.splitlines()
    line = lambda code: lines[int(of_code(found, code)[0].where.rpartition(':')[2]) - 1]
    assert 'tensor-model-parallel-size' in line('layout.heads') and 'HCCL_EXEC_TIMEOUT' in line('env.lower')


def test_misspelled_and_wrong_values():
    text = script(8, tensor_model_paralel_size=2, recompute_granularity='everything', pipeline_model_parallel_size='two', micro_batch_size='$MBS')
    found = check_configs([read_shell(text, 'run.sh')])
    assert '--tensor-model-parallel-size' in of_code(found, 'launch.argument')[0].fix
    assert sorted(finding.message.split('=')[0].split()[0] for finding in of_code(found, 'launch.value')) == ['--pipeline-model-parallel-size', '--recompute-granularity']
    assert '$MBS' in of_code(found, 'launch.unresolved')[0].message


def test_launcher_and_configuration_disagree():
    plan = to_mindspore(load_model('llama3-8b'), with_cards(load_cluster('atlas-800t-a2'), 32), Layout(32, tp=8, pp=2), TrainSpec(4096, 64, zero=1))[0]
    found = check_configs([read_tree(plan, 'yaml', 'p.yaml'), read_shell('msrun --worker_num=16 --local_worker_num=8 run_mindformer.py --config conf/p.yaml\n', 'a.sh')])
    assert '32 ranks, the launcher starts 16' in of_code(found, 'launch.world')[0].message


PLANS = [('llama3-8b', dict(tp=2, pp=2)), ('llama2-70b', dict(tp=8, pp=2)), ('mixtral-8x7b', dict(tp=2, pp=2, ep=4, etp=1)), ('qwen3-30b-a3b', dict(tp=2, pp=2, ep=8, etp=1)), ('gpt2-xl', dict(tp=1, pp=2))]


@pytest.mark.parametrize('target', ['megatron', 'mindspeed', 'mindspore', 'torchtitan', 'deepspeed'])
@pytest.mark.parametrize('name, axes', PLANS)
def test_exported_plans_are_read_as_they_were(name, axes, target):
    model, cluster = load_model(name), with_cards(load_cluster('atlas-800t-a2' if target != 'torchtitan' else 'dgx-h100'), 32)
    layout, train = Layout(32, **axes), TrainSpec(min(4096, model.max_seq), 128, zero=1, recompute='full')
    fitted, step, _ = fit_plan(target, model, cluster, layout, train)
    if target in ('megatron', 'mindspeed'):
        words, _ = (to_megatron_args if target == 'megatron' else to_mindspeed_args)(model, cluster, layout, train)
        config = read_shell(to_launch(cluster, layout, 'pretrain_gpt.py', words), 'run.sh')
    else:
        text, _ = {'mindspore': to_mindspore, 'torchtitan': to_torchtitan, 'deepspeed': to_deepspeed}[target](model, cluster, layout, train)
        config = read_tree(text, {'mindspore': 'yaml', 'torchtitan': 'toml', 'deepspeed': 'json'}[target], 'plan')
    [launch] = find_launches([config])
    assert launch.target == target or (launch.target, target) == ('megatron', 'mindspeed')
    if target == 'deepspeed':
        launch = type(launch)(**{**vars(launch), 'world': 32})
    read, back, when, _ = launch_specs(launch)
    assert (back.world, back.tp, back.pp, back.dp, back.ep) == (fitted.world, fitted.tp, fitted.pp, fitted.dp, fitted.ep)
    if when is not None:
        assert (when.seq, when.global_batch, when.micro_batch, when.dtype, when.recompute, when.zero) == (step.seq, step.global_batch, step.micro_batch, step.dtype, step.recompute, step.zero)
    if read is not None:
        assert (read.layers, read.hidden, read.heads, read.kv_heads, read.experts, read.vocab) == (model.layers, model.hidden, model.heads, model.kv_heads, model.experts, model.vocab)
    allowed = {'memory.full', 'layout.width', 'layout.experts', 'layout.sequence', 'layout.heads'}  # of the plan itself
    assert not [finding for finding in check_configs([config]) if finding.severity == 'error' and finding.code not in allowed]


def test_random_values_never_raise():
    rng = random.Random(5)
    names = list(load_arguments('megatron')) + list(load_arguments('mindspeed'))
    for _ in range(150):
        words = [f'{rng.choice(names)} {rng.choice(["0", "-1", "1", "8", "3", "10000000", "x", "$Y", "1e9", "[1]", "9" * 40, ""])}' for _ in range(rng.randint(2, 30))]
        text = f'torchrun --nproc-per-node {rng.choice(["0", "8", "-3", "x", "99999999"])} pretrain_gpt.py --num-layers 8 --hidden-size 1024 {" ".join(words)}\n'
        assert all(isinstance(finding, Finding) for finding in check_configs([read_shell(text)]))


@pytest.mark.parametrize('target, kind', [('torchtitan', 'toml'), ('mindspore', 'yaml'), ('deepspeed', 'json')])
def test_random_trees_never_raise(target, kind):
    rng = random.Random(7)
    values = [0, -1, 1, 3, 8, 10**9, 'x', '', True, None, [1, 2], [], 1.5, 'auto', {'a': 1}]
    for _ in range(60):
        tree = {}
        for name in rng.sample(list(load_arguments(target)), rng.randint(1, len(load_arguments(target)))):
            *path, last = name.split('.')
            place = tree
            for part in path:
                place = place.setdefault(part, {}) if isinstance(place, dict) else {}
            if isinstance(place, dict):
                place[last] = rng.choice(values)
        text = json.dumps(tree)
        config = read_tree(text, 'json' if kind == 'json' else 'yaml', 'x')
        assert all(isinstance(finding, Finding) for finding in check_configs([config]))


def test_pictures():
    assert explore_launch().image.value[:4] == b'\x89PNG'
    assert plot_findings([]).get_title(loc='left') == 'Nothing found'
    assert plot_findings([Finding('error', 'a.b', 'cost $1 $2', '', 'x:1')] * 40).get_title(loc='left') == '40 errors'
