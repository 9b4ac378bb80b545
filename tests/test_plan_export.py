"""plan.export: every file read back by its own parser, nothing lost in silence, and what a shell or a framework really does with it."""
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields, replace

import numpy as np
import pytest
import yaml
from hypothesis import given, settings, strategies as st

from hybridlab.comm.topology import check_hccl_algo
from hybridlab.pipeline.schedule import Schedule, make_schedule
from hybridlab.plan.export import (
    IN_CODE, NOT_SETTINGS, SCHEDULES_OF, TARGETS, VARIABLES, ExportPanel, check_arguments, compare_targets, explore_export, export_plan, fit_plan, load_arguments, plan_differences,
    plan_files, plot_targets, read_arguments, read_back, read_env, read_launch, read_model, stage_layout, targets_table, to_deepspeed, to_hccl_env, to_launch, to_megatron_args,
    to_mindspeed_args, to_mindspore, to_schedule_csv, to_torchtitan)
from hybridlab.spec.cluster import load_cluster
from hybridlab.spec.layout import ORDERS, RECOMPUTE, SCHEDULE_NAMES, Layout, TrainSpec, check_grid, even_out
from hybridlab.spec.model import load_model
from hybridlab.spec.rank_table import check_rank_table, read_rank_table

A2, A3, DGX = (load_cluster(name) for name in ('atlas-800t-a2', 'atlas-900-a3', 'dgx-h100'))
LLAMA, STEP = load_model('llama3-70b'), TrainSpec(4096, 512)
DEEPSEEK, V_SPLIT = load_model('deepseek-v3'), (4,) * 13 + (3,) * 3
MODELS = {'llama3-8b': dict(tp=2, pp=2, vpp=2), 'llama3-70b': dict(tp=8, pp=4, layer_split=(19, 21, 21, 19)), 'gpt3-175b': dict(tp=8, pp=8, vpp=3, order='tp-cp-ep-pp-dp'),
          'mixtral-8x7b': dict(tp=2, pp=4, ep=8, etp=1, cp=2), 'deepseek-v3': dict(tp=4, pp=8, vpp=2, ep=32, etp=1, layer_split=V_SPLIT)}


def texts(target, model, cluster, layout, train):
    "The text that is read back, its world if the text does not hold it, and the findings."
    files, findings = plan_files(model, cluster, layout, train, [target])
    name = {'torchtitan': 'torchtitan.toml', 'mindspore': 'mindspore.yaml', 'deepspeed': 'deepspeed.json'}.get(target, f'{target}.sh')
    return files[name], layout.world if target == 'deepspeed' else None, findings


def lost(findings, target):
    return {finding.where.removeprefix(f'{target}: ') for finding in findings if finding.code == 'export.cannot' and finding.where.startswith(f'{target}: ')}


# ---- round trips ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('target', TARGETS)
@pytest.mark.parametrize('cluster', [A2, A3, DGX], ids=lambda cluster: cluster.name)
@pytest.mark.parametrize('name', MODELS)
def test_five_models_on_three_clusters(name, cluster, target):
    model, layout = load_model(name), Layout(256, **MODELS[name])
    train = TrainSpec(4096, 1024, schedule='dualpipe-v' if name == 'deepseek-v3' else '1f1b', recompute='full', zero=1)
    text, world, findings = texts(target, model, cluster, layout, train)
    assert not [finding for finding in findings if finding.code in ('export.readback', 'export.unread')]
    assert set(plan_differences(model, (layout, train), read_back(target, text, world))) == lost(findings, target)
    told = read_model(target, text, world)
    assert told == {field: getattr(model, field) for field in told}
    if target in ('megatron', 'mindspeed', 'mindspore'):
        assert {'layers', 'hidden', 'heads', 'ffn', 'vocab'} <= set(told)


SCHEDULES = st.sampled_from(SCHEDULE_NAMES)


@st.composite
def plans(draw):
    "Any plan whose grid and batch fit: dense, MoE, MLA, tied embeddings."
    model = load_model(draw(st.sampled_from(['llama3-8b', 'mixtral-8x7b', 'deepseek-v3', 'gpt2-small'])))
    schedule = draw(SCHEDULES)
    tp, cp, pp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    vpp = 1 if pp == 1 else 2 if schedule in ('zb-v', 'v-half', 'v-min', 'dualpipe-v') else draw(st.sampled_from([1, 2])) if schedule in ('1f1b', 'interleaved', 'looped-bfs') else 1
    ep, etp = (draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))) if model.experts else (1, None)
    uneven = tuple(np.roll(even_out(model.layers + draw(st.integers(0, 1)), pp * vpp), draw(st.integers(0, 3))).tolist()) if draw(st.booleans()) else None
    split = uneven if uneven and sum(uneven) == model.layers and min(uneven) > 0 else None
    layout = Layout(tp * cp * pp * dp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vpp=vpp, order=draw(st.sampled_from(ORDERS)), layer_split=split,
                    sequence_parallel=True if model.experts and tp > 1 else draw(st.booleans()))
    micro = draw(st.sampled_from([1, 2]))
    train = TrainSpec(draw(st.sampled_from([1024, 4096])), micro * dp * cp * pp * draw(st.integers(1, 5)), micro, dtype=draw(st.sampled_from(['bf16', 'fp16', 'fp32', 'int8'])),
                      recompute=draw(st.sampled_from(RECOMPUTE)), zero=draw(st.integers(0, 3)), capacity_factor=draw(st.sampled_from([None, 1.0, 1.25])), schedule=schedule,
                      flash_attention=draw(st.booleans()), dropout=draw(st.booleans()), gradient_dtype=draw(st.sampled_from(['fp32', 'fp16', 'bf16', 'bf16+fp32'])),
                      gradient_bits=draw(st.sampled_from([None, 8, 4])), weights_dtype=draw(st.sampled_from([None, 'fp32', 'bf16'])), master_weights=draw(st.booleans()),
                      moments_dtype=draw(st.sampled_from(['fp32', 'bf16', 'int8'])), recompute_layers=draw(st.sampled_from([None, 1, 2])), fused_kernels=draw(st.booleans()),
                      vocab_multiple=draw(st.sampled_from([1, 128])))
    return model, layout, train


@pytest.mark.parametrize('target', TARGETS)
@settings(max_examples=20, deadline=None)
@given(plan=plans())
def test_what_comes_back_differently_is_said(target, plan):
    model, layout, train = plan
    if check_grid(layout):
        return
    text, world, findings = texts(target, model, A2, layout, train)
    assert set(plan_differences(model, (layout, train), read_back(target, text, world))) == lost(findings, target)
    fitted = fit_plan(target, model, A2, layout, train)
    assert not lost(fit_plan(target, model, A2, *fitted[:2])[2], target), 'what a target was given must be what it can run'


@pytest.mark.parametrize('target', TARGETS)
def test_every_field_of_the_step_is_read_back(target):
    text, world, _ = texts(target, LLAMA, A2, Layout(64, tp=8, pp=4), STEP)
    _, step = read_back(target, text, world)
    assert set(step) == {field.name for field in fields(TrainSpec)} - set(NOT_SETTINGS) - set(IN_CODE.get(target, ()))


# ---- what targets lack ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('target', TARGETS)
@pytest.mark.parametrize('schedule', SCHEDULE_NAMES)
def test_a_schedule_that_is_missing_is_a_finding(schedule, target):
    two = 2 if schedule in ('interleaved', 'looped-bfs', 'zb-v', 'v-half', 'v-min', 'dualpipe-v') else 1
    layout, train = Layout(64, tp=8, pp=4, vpp=two), replace(STEP, schedule=schedule)
    fitted, run, findings = fit_plan(target, LLAMA, A2, layout, train)
    assert ('schedule' in lost(findings, target)) == (schedule not in SCHEDULES_OF[target])
    assert run.schedule in SCHEDULES_OF[target]
    if schedule not in SCHEDULES_OF[target]:
        [finding] = [finding for finding in findings if finding.where == f'{target}: schedule']
        assert schedule in finding.message and run.schedule in finding.fix


def test_zb_v_goes_to_mindspore_and_torchtitan_only():
    layout, train = Layout(64, tp=8, pp=4, vpp=2), replace(STEP, schedule='zb-v')
    frame = compare_targets(LLAMA, A2, layout, train)
    assert frame.loc['schedule'].to_dict() == {'megatron': 'warning', 'mindspeed': 'warning', 'mindspore': '', 'torchtitan': '', 'deepspeed': 'warning'}
    [finding] = [finding for finding in fit_plan('megatron', LLAMA, A2, layout, train)[2] if finding.where == 'megatron: schedule']
    assert 'MindSpore Transformers, torchtitan' in finding.message
    words, _ = to_megatron_args(LLAMA, A2, layout, train)
    assert words[words.index('--num-layers-per-virtual-pipeline-stage') + 1] == '10'  # layers of a chunk, not chunks
    assert 'zero_bubble_v' in to_mindspore(LLAMA, A2, layout, train)[0] and 'ZBVZeroBubble' in to_torchtitan(LLAMA, A2, layout, train)[0]


def test_a_replaced_schedule_without_room_for_chunks_joins_them():
    layout = Layout(4, pp=4, vpp=2, layer_split=(9, 11, 10, 10, 10, 10, 9, 11))
    fitted, run, findings = fit_plan('megatron', LLAMA, A2, layout, TrainSpec(4096, 6, schedule='zb-v'))  # 6 micro-batches are no multiple of 4
    assert (run.schedule, fitted.vpp, fitted.layer_split) == ('1f1b', 1, None) and {'schedule', 'vpp', 'layer_split'} == lost(findings, 'megatron')


@pytest.mark.parametrize('changes, model, words', [
    (dict(cp=2), 'llama3-70b', 'context parallelism'), (dict(tp=1), 'gpt2-small', 'tied embeddings'), (dict(m=5), 'llama3-70b', 'm=5 below 2 pp - 1 = 7'), (dict(zero=3), 'llama3-70b', 'FSDP')])
def test_mindspeed_refuses_dualpipev(changes, model, words):  # dualpipev_feature.py
    changes = dict(changes)
    train = TrainSpec(4096, 2 * changes.pop('m', 16), schedule='dualpipe-v', zero=changes.pop('zero', 1))
    layout = Layout(2 * 4 * changes.get('cp', 1) * changes.get('tp', 2), pp=4, vpp=2, **{'tp': 2, **changes})
    _, run, findings = fit_plan('mindspeed', load_model(model), A2, layout, train)
    assert run.schedule in ('1f1b', 'interleaved')
    assert any(finding.where == 'mindspeed: schedule' and words in finding.message for finding in findings)


@pytest.mark.parametrize('target, changes, field, written, severity', [
    ('megatron', dict(gradient_bits=8), 'gradient_bits', None, 'warning'), ('mindspeed', dict(gradient_bits=8), 'gradient_bits', None, 'warning'),
    ('torchtitan', dict(zero=1), 'zero', 2, 'warning'), ('torchtitan', dict(dtype='fp16', gradient_dtype='fp16'), 'dtype', 'bf16', 'error'),
    ('megatron', dict(moments_dtype='bf16', zero=0), 'moments_dtype', 'fp32', 'warning'), ('deepspeed', dict(gradient_bits=8, zero=3), 'gradient_bits', None, 'warning'),
    ('mindspeed', dict(fused_kernels=False), 'fused_kernels', True, 'warning')])
def test_settings_that_a_target_lacks(target, changes, field, written, severity):
    _, train, findings = fit_plan(target, LLAMA, A2, Layout(64, tp=8), replace(STEP, **changes))
    [finding] = [finding for finding in findings if finding.where == f'{target}: {field}']
    assert (finding.severity, getattr(train, field)) == (severity, written)


def test_int4_gradients_exist_in_deepspeed_with_zero_3():
    text, findings = to_deepspeed(LLAMA, A2, Layout(64, tp=8), replace(STEP, gradient_bits=4, zero=3))
    assert json.loads(text)['zero_optimization'] == {'stage': 3, 'overlap_comm': True, 'zero_quantized_gradients': True}
    assert 'gradient_bits' not in lost(findings, 'deepspeed')


@pytest.mark.parametrize('target, etp', [('torchtitan', 2), ('mindspore', 4), ('deepspeed', 2)])
def test_expert_tensor_parallelism_outside_megatron(target, etp):
    layout, model = Layout(64, tp=4, pp=2, ep=2, etp=etp), load_model('mixtral-8x7b')
    findings = fit_plan(target, model, A2, layout, STEP)[2]
    assert any(finding.where == f'{target}: etp' and finding.severity == 'error' for finding in findings)
    assert 'etp' not in lost(fit_plan('megatron', model, A2, layout, STEP)[2], 'megatron')


def test_a_batch_that_does_not_fit_is_no_plan():
    with pytest.raises(ValueError, match='no multiple of micro_batch 1 x dp 2'):
        to_megatron_args(LLAMA, A2, Layout(16, tp=8), TrainSpec(4096, 3))


def test_an_encoder_is_not_described_by_pretrain_gpt():
    findings = fit_plan('megatron', load_model('bert-large'), A2, Layout(8), TrainSpec(512, 64))[2]
    assert any(finding.code == 'export.model' and 'an encoder' in finding.message for finding in findings)
    with pytest.raises(ValueError, match='no transformer'):
        fit_plan('megatron', load_model('resnet-152'), A2, Layout(8), STEP)


# ---- arguments -----------------------------------------------------------------------------------------------------------

def test_names_of_published_scripts_are_in_the_table():
    "Arguments that decide the parallel plan in MindSpeed-LLM's DeepSeek-V3 recipe (64 servers of 8) and in Megatron's MoE documentation."
    script = ('--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --expert-model-parallel-size 32 --sequence-parallel --context-parallel-size 1 '
              '--context-parallel-algo megatron_cp_algo --num-layers 64 --noop-layers 61,62,63 --schedules-method dualpipev --use-distributed-optimizer --micro-batch-size 1 '
              '--global-batch-size 3840 --seq-length 4096 --num-experts 256 --moe-router-topk 8 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --first-k-dense-replace 3 '
              '--multi-head-latent --bf16').replace('--multi-head-latent', '--multi-latent-attention').split()
    values = read_arguments('mindspeed', script)
    assert (values['--num-layers'], values['--noop-layers']) == (64, '61,62,63')
    layout, step = read_back('mindspeed', shlex.join([*script, '--expert-tensor-parallel-size', '1']), 512)
    assert (layout.dp, layout.ep, layout.edp, layout.vpp) == (16, 32, 2, 2)
    assert layout.layer_split == (4,) * 15 + (1,) and step['schedule'] == 'dualpipe-v' and step['global_batch'] == 3840


@pytest.mark.parametrize('target, words, message', [
    ('megatron', '--schedules-method dualpipev', 'unrecognized'), ('megatron', '--tensor-model-parallel 8', 'unrecognized'), ('megatron', '--num-layers x', 'invalid'),
    ('mindspeed', '--attention-backend flash', 'unrecognized'), ('mindspeed', '--noop-layers 3,a', 'intlist'), ('megatron', '--pipeline-model-parallel-size 0', 'at least 1'),
    ('megatron', '--hidden-dropout 1.5', 'from 0 to 1'), ('msrun', '--master_port 80', 'from 1024 to 65535'), ('torchrun', '--node-rank -1', 'at least 0')])
def test_a_command_line_that_a_framework_would_refuse(target, words, message):
    with pytest.raises(ValueError, match=message):
        read_arguments(target, words.split())


def test_every_target_has_a_version_and_sources():
    table = targets_table()
    assert table.version.str.len().min() > 5 and set(TARGETS) < set(table.target)
    for target in table.target:
        for name, rule in load_arguments(target).items():
            assert set(rule) <= {'type', 'least', 'most', 'choices', 'default'}, (target, name)
            default = rule.get('default', rule.get('choices', [None])[0])
            if default is not None:
                assert not check_arguments(target, {name: default}), (target, name)


def test_torchrun_itself_accepts_the_command():
    run = pytest.importorskip('torch.distributed.run')
    words = shlex.split(to_launch(A2, Layout(64, tp=8), 'pretrain_gpt.py', ['--bf16']).replace('\\\n', ' '))
    args = run.get_args_parser().parse_args([word.replace('$NODE_RANK', '3').replace('$MASTER_ADDR', 'h0').replace('$MASTER_PORT', '29500') for word in words[1:]])
    assert (args.nnodes, args.nproc_per_node, args.node_rank, args.master_addr, args.master_port) == ('8', '8', 3, 'h0', 29500)
    assert (args.training_script, args.training_script_args) == ('pretrain_gpt.py', ['--bf16'])
    module = run.get_args_parser().parse_args(shlex.split(to_launch(A2, Layout(8), ('-m', 'torchtitan.train'), ['--job.config_file', 'x.toml']).replace('\\\n', ' '))[1:])
    assert module.module and module.training_script == 'torchtitan.train'


def test_torch_knows_the_schedules_that_torchtitan_is_given():
    schedules = pytest.importorskip('torch.distributed.pipelining.schedules')
    for name in SCHEDULES_OF['torchtitan'].values():
        assert schedules.get_schedule_class(name)


@pytest.mark.parametrize('world, cluster, words', [(64, A2, ['--nnodes 8', '--nproc-per-node 8']), (4, A2, ['--nnodes 1', '--nproc-per-node 4']), (64, A3, ['--nnodes 4', '--nproc-per-node 16'])])
def test_servers_and_processes(world, cluster, words):
    text = to_launch(cluster, Layout(world), 'x.py')
    assert all(word in text for word in words) and read_launch(text) == (world, ['x.py'])
    assert read_launch(to_launch(cluster, Layout(world), 'x.py', launcher='msrun')) == (world, ['x.py'])
    with pytest.raises(ValueError, match='give 8 or 16'):
        to_launch(A2, Layout(12), 'x.py')


# ---- stages --------------------------------------------------------------------------------------------------------------

def test_thirty_layers_on_four_stages():  # Megatron-LM 1304
    model = replace(load_model('llama3-8b'), layers=30)
    words, _ = to_megatron_args(model, A2, Layout(4, pp=4), TrainSpec(4096, 16))
    assert words[words.index('--pipeline-model-parallel-layout') + 1] == 'Et*7|(t*8|)*2,t*7L'
    words, _ = to_mindspeed_args(model, A2, Layout(4, pp=4), TrainSpec(4096, 16))
    assert words[words.index('--num-layer-list') + 1] == '7,8,8,7' and '--pipeline-model-parallel-layout' not in words
    assert yaml.safe_load(to_mindspore(model, A2, Layout(4, pp=4), TrainSpec(4096, 16))[0])['model']['model_config']['offset'] == [0, 1, 1, 0]
    parts = tomllib.loads(to_torchtitan(model, A2, Layout(4, pp=4), TrainSpec(4096, 16))[0])['parallelism']['module_fqns_per_model_part']
    assert [sum(name.startswith('layers.') for name in part) for part in parts] == [7, 8, 8, 7] and parts[0][0] == 'tok_embeddings' and parts[-1][-2:] == ['norm', 'output']


@pytest.mark.parametrize('schedule', ['interleaved', 'zb-v'])
def test_offset_means_what_mindspore_makes_of_it(schedule):  # the rule of parallel_core/training_graph/transformer/utils.py
    layout = Layout(256, tp=4, pp=8, vpp=2, ep=32, etp=1, layer_split=V_SPLIT)
    config = yaml.safe_load(to_mindspore(DEEPSEEK, A2, layout, TrainSpec(4096, 1024, schedule=schedule))[0])['model']['model_config']
    rows = np.ones((2, 8), int) * (config['num_hidden_layers'] // 16) + np.array(config['offset'])
    if schedule == 'zb-v':
        rows[1] = rows[1][::-1]
    assert tuple(rows.ravel()) == V_SPLIT


def test_noop_layers_keep_the_chunks():
    words, _ = to_mindspeed_args(DEEPSEEK, A2, Layout(256, tp=4, pp=8, vpp=2, ep=32, etp=1, layer_split=V_SPLIT), TrainSpec(4096, 1024, schedule='dualpipe-v'))
    noops = {int(noop) for noop in words[words.index('--noop-layers') + 1].split(',')}
    total = int(words[words.index('--num-layers') + 1])
    assert total == 64 and tuple(sum(layer not in noops for layer in range(chunk * 4, chunk * 4 + 4)) for chunk in range(16)) == V_SPLIT
    assert '--overlap-grad-reduce' not in words and '--num-layer-list' not in words  # dualpipev refuses both


def test_stage_layout_of_one_stage():
    assert stage_layout(LLAMA, Layout(8, tp=8)).to_megatron_layout() == 'Et*80L'


@pytest.mark.parametrize('schedule', ['zb-h1', 'zb-h2'])
def test_torchtitan_gets_zero_bubble_as_a_file(schedule, tmp_path):
    layout, train = Layout(64, tp=8, pp=4), replace(STEP, global_batch=32, schedule=schedule)
    paths, findings = export_plan(LLAMA, A2, layout, train, tmp_path, ['torchtitan'])
    config = tomllib.loads((tmp_path / 'torchtitan.toml').read_text())['parallelism']
    assert 'schedule' not in lost(findings, 'torchtitan') and config['pipeline_parallel_schedule'] == 'PipelineScheduleSingle'
    order = (tmp_path / config['pipeline_parallel_schedule_csv']).read_text()
    assert order == to_schedule_csv(layout, train) == make_schedule(schedule, 4, 16).to_csv() and Schedule.from_csv(order).to_csv() == order


@pytest.mark.parametrize('pp, local, micro', [(1, 2, None), (4, 32, 2)])
def test_local_batch_of_torchtitan(pp, local, micro):
    config = tomllib.loads(to_torchtitan(LLAMA, A2, Layout(64, tp=8, pp=pp), replace(STEP, global_batch=32 * 8 // pp, micro_batch=2))[0])
    assert config['training']['local_batch_size'] == local and config['parallelism'].get('pipeline_parallel_microbatch_size') == micro


# ---- shells --------------------------------------------------------------------------------------------------------------

ODD = st.text(st.characters(codec='utf-8', exclude_characters='\0', exclude_categories=('Cs',)), min_size=1, max_size=12).filter(lambda word: word not in VARIABLES)


@settings(max_examples=50, deadline=None)
@given(program=ODD, value=ODD)
def test_odd_names_stay_one_word(program, value):
    words = shlex.split(to_launch(A2, Layout(8), program, ['--data-path', value]).replace('\\\n    ', ' '))
    assert words == ['torchrun', '--nnodes', '1', '--nproc-per-node', '8', program, '--data-path', value]


bash = pytest.mark.skipif(not shutil.which('bash'), reason='bash is not installed')


def run_script(script, *extra, **env):
    "The words that torchrun or msrun would get, from a real bash."
    stand_in = 'for name in torchrun msrun; do eval "$name() { printf \'%s\\0\' $name \\"\\$@\\"; }"; export -f $name; done; '
    done = subprocess.run(['bash', '-c', stand_in + 'bash "$0" "$@"', str(script), *extra], capture_output=True, env={'PATH': os.environ['PATH'], **env})
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split('\0')[:-1]


@bash
@pytest.mark.parametrize('target', TARGETS)
def test_scripts_run_in_bash(target, tmp_path):
    folder = tmp_path / "a b's $HOME"
    export_plan(LLAMA, A2, Layout(64, tp=8, pp=4), STEP, folder)
    words = run_script(folder / f'{target}.sh', '--lr', '1e-4', 'x y', NODE_RANK='3', MASTER_ADDR='192.0.2.1')
    assert words[-3:] == ['--lr', '1e-4', 'x y'] and '192.0.2.1' in words and '29500' in words
    assert words[0] == ('msrun' if target == 'mindspore' else 'torchrun')
    for word in words:
        if word.endswith(('.yaml', '.json')):
            assert os.path.samefile(word, folder / os.path.basename(word))
    missing = subprocess.run(['bash', str(folder / f'{target}.sh')], capture_output=True, env={'PATH': os.environ['PATH']})
    assert missing.returncode != 0 and b'unbound variable' in missing.stderr  # which server is this?


@bash
def test_a_name_cannot_break_out_of_a_comment(tmp_path):
    model = replace(LLAMA, name='llama\ntouch broken\n#')
    export_plan(model, replace(A2, name='x\rtouch broken'), Layout(8, tp=8), STEP, tmp_path)
    run_script(tmp_path / 'mindspeed.sh')
    for target in TARGETS:
        text = (tmp_path / f'{target}.sh').read_text()
        assert not any(line.startswith('touch') for line in text.splitlines())
    assert tomllib.loads((tmp_path / 'torchtitan.toml').read_text()) and yaml.safe_load((tmp_path / 'mindspore.yaml').read_text())
    assert sorted(path.name for path in tmp_path.iterdir() if path.name == 'broken') == []


# ---- HCCL ----------------------------------------------------------------------------------------------------------------

@bash
@pytest.mark.parametrize('cluster, product', [(A2, 'a2'), (A3, 'a3'), (load_cluster('atlas-800-910a'), '910a')], ids=['a2', 'a3', '910a'])
@pytest.mark.parametrize('zero', [0, 1])
def test_environment_of_hccl(cluster, product, zero, tmp_path):
    train = replace(STEP, zero=zero, dtype='fp16', gradient_dtype='fp16')
    text, _ = to_hccl_env(LLAMA, cluster, Layout(64, tp=4), train)
    values = read_env(text)
    assert values['HCCL_EXEC_TIMEOUT'] >= load_arguments('hccl')['HCCL_EXEC_TIMEOUT']['default'] == 1836  # B16: 600 would lower it
    assert values['HCCL_EVENT_TIMEOUT'] > values['HCCL_EXEC_TIMEOUT'] and 120 <= values['HCCL_CONNECT_TIMEOUT'] <= 7200
    assert values['HCCL_BUFFSIZE'] == 4096 * 8192 * 2 // 2**20 == 64
    assert check_hccl_algo(values['HCCL_ALGO'], product) == [] and values['HCCL_ALGO'].count('=level0:NA;') == 2 - (zero == 0)  # B19: level0 is NA, algorithms by operation
    assert all('#' in line for line in text.splitlines())  # a reason beside every line
    (tmp_path / 'env.sh').write_text(text)
    shown = subprocess.run(['bash', '-c', f'source {shlex.quote(str(tmp_path / "env.sh"))} && printf %s "$HCCL_ALGO"'], capture_output=True, text=True, check=True).stdout
    assert shown == values['HCCL_ALGO']


def test_hccl_algo_is_left_out_within_a_server():
    text, _ = to_hccl_env(LLAMA, A2, Layout(8, tp=2), STEP)
    assert 'HCCL_ALGO' not in read_env(text) and 'replicas stay inside a server' in text


def test_no_hccl_without_ascend(tmp_path):
    paths, findings = export_plan(LLAMA, DGX, Layout(64, tp=8, pp=4), STEP, tmp_path)
    assert {path.name for path in paths} == {'megatron.sh', 'torchtitan.toml', 'torchtitan.sh', 'deepspeed.json', 'deepspeed.sh', 'stage_layout.txt'}
    assert sum(finding.code == 'export.skipped' for finding in findings) == 3 and 'hccl_env' not in (tmp_path / 'megatron.sh').read_text()


@pytest.mark.parametrize('cluster, world, version', [(A2, 64, '1.0'), (A2, 4, '1.0'), (A3, 64, '1.2')])
def test_rank_table_holds_the_ranks_of_the_plan(cluster, world, version, tmp_path):
    _, findings = export_plan(LLAMA, cluster, Layout(world, tp=4), STEP, tmp_path, ['mindspeed'])
    table = read_rank_table(tmp_path / 'rank_table.json')
    assert (len(table.devices), table.version) == (world, version) and not check_rank_table(tmp_path / 'rank_table.json')
    assert any(finding.code == 'export.placeholder' for finding in findings)


# ---- the folder ----------------------------------------------------------------------------------------------------------

def test_nothing_is_replaced_without_saying(tmp_path):
    first, second = Layout(64, tp=8, pp=4), Layout(64, tp=4, pp=4)
    paths, _ = export_plan(LLAMA, A2, first, STEP, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert export_plan(LLAMA, A2, first, STEP, tmp_path)[0] == paths
    with pytest.raises(ValueError, match='megatron.sh.*overwrite=True'):
        export_plan(LLAMA, A2, second, STEP, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    _, findings = export_plan(LLAMA, A2, second, STEP, tmp_path, overwrite=True)
    assert 'megatron.sh' in {finding.where for finding in findings if finding.code == 'export.replaced'}
    assert '--tensor-model-parallel-size 4' in (tmp_path / 'megatron.sh').read_text()


def test_nothing_is_written_outside_the_folder(tmp_path):
    outside, folder = tmp_path / 'mine.txt', tmp_path / 'plan'
    outside.write_text('keep')
    folder.mkdir()
    (folder / 'rank_table.json').symlink_to(outside)
    for overwrite in (False, True):
        with pytest.raises(ValueError, match='rank_table.json .* links'):
            export_plan(LLAMA, A2, Layout(64, tp=8), STEP, folder, overwrite=overwrite)
    assert outside.read_text() == 'keep' and [path.name for path in folder.iterdir()] == ['rank_table.json']
    paths, _ = export_plan(LLAMA, A2, Layout(64, tp=8), STEP, tmp_path / 'new' / 'deep')
    assert {path.parent for path in paths} == {(tmp_path / 'new' / 'deep').resolve()} and all(os.access(path, os.X_OK) for path in paths if path.suffix == '.sh')


def test_a_file_that_is_damaged_is_not_read(tmp_path):
    text, findings = to_deepspeed(LLAMA, A2, Layout(64, tp=8), STEP)
    for target, broken in [('deepspeed', text[:-5]), ('deepspeed', '[]'), ('torchtitan', 'a = '), ('torchtitan', '[training]\nseq_len = "4096"'), ('mindspore', ': ['), ('mindspore', '- 1'),
                           ('mindspore', 'parallel_config:\n  data_parallel: true'), ('megatron', 'python pretrain_gpt.py --bf16'), ('megatron', 'torchrun x.py --bf16 --tp 8')]:
        with pytest.raises(ValueError):
            read_back(target, broken)
    with pytest.raises(ValueError, match='no multiple of dp'):
        read_back('deepspeed', text, 60)


def test_without_pyyaml_the_rest_is_still_checked(monkeypatch):
    monkeypatch.setitem(sys.modules, 'yaml', None)
    files, findings = plan_files(LLAMA, A2, Layout(64, tp=8), STEP)
    assert [finding.where for finding in findings if finding.code == 'export.unread'] == ['mindspore.yaml'] and 'mindspore.yaml' in files
    with pytest.raises(ValueError, match='pip install pyyaml'):
        read_back('mindspore', files['mindspore.yaml'])


def test_the_articles_command_is_no_interface():  # B20
    with pytest.raises(ValueError, match='no torchrun and no msrun'):
        read_launch('mpirun -n 64 --hostfile hosts python train.py --rank_table rank_table.json')


def test_unknown_targets_are_named():
    for call in (lambda: plan_files(LLAMA, A2, Layout(8), STEP, ['megatronn']), lambda: load_arguments('x'), lambda: read_back('x', ''), lambda: fit_plan('x', LLAMA, A2, Layout(8), STEP)):
        with pytest.raises(ValueError, match='megatron'):
            call()


# ---- pictures and widgets ------------------------------------------------------------------------------------------------

def test_figure_and_sliders():
    frame = compare_targets(LLAMA, A2, Layout(64, tp=8, pp=4), STEP)
    assert 'closest' in plot_targets(frame).get_title(loc='left') and 'whole plan' in plot_targets(frame.iloc[:0]).get_title(loc='left')
    widget = explore_export()
    first = widget.image.value
    for name, value in dict(model='llama3-70b', zero=0, gradient_bits=8, tp=8).items():
        widget.controls[name].value = value
    assert widget.image.value != first and not widget.message.value


def test_button_writes_or_says_why_not(tmp_path):
    panel = ExportPanel(lambda: (LLAMA, A2, Layout(64, tp=8, pp=4), STEP), str(tmp_path / 'out'))
    panel.children[2].click()
    assert 'mindspeed.sh' in panel.result.value and (tmp_path / 'out' / 'mindspeed.sh').is_file()
    panel.plan = lambda: (replace(LLAMA, name='<b>'), A2, Layout(64, tp=4), STEP)
    panel.press()
    assert 'overwrite=True' in panel.result.value
    panel.overwrite.value = True
    panel.press()
    assert 'was replaced' in panel.result.value and '<b>' not in panel.result.value.replace('<b style', '')
    assert 'text/html' in panel._repr_mimebundle_()
