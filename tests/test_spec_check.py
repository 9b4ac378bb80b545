"""Layouts that users of public frameworks asked about, with what must be said; and the rules over many inputs."""
import pytest
from hypothesis import given, settings, strategies as st

from hybridlab.spec.cluster import load_cluster
from hybridlab.spec.layout import (
    SCHEDULE_NAMES, Layout, TrainSpec, check, check_batch, check_effective, check_grid, context_chunks, even_out, pad_vocab, placement, sequence_multiple, stage_layers,
    traffic_seconds, valid_values)
from hybridlab.spec.model import ModelSpec, load_model

A2 = load_cluster('atlas-800t-a2')
TINY = dict(layers=8, hidden=1024, heads=8, ffn=4096, vocab=32000, max_seq=32768)


def model(**changes):
    return ModelSpec(name='tiny', **{**TINY, **changes})


def found(spec, layout, train=None, cluster=A2):
    findings = check(spec, cluster, layout, train or TrainSpec(4096, global_batch=layout.dp * layout.pp * layout.vpp * 16))
    return {finding.code: finding for finding in findings}


def errors(findings):
    return sorted(code for code, finding in findings.items() if finding.severity == 'error')


def test_layers_that_do_not_divide():  # Megatron-LM 1304: 30 layers on 4 stages built 28
    finding = found(model(layers=30), Layout(4, pp=4))['layout.layers']
    assert 'leave 2 over' in finding.message and 'build 28' in finding.message
    assert '(7, 8, 8, 7)' in finding.fix and '1, 2, 3, 5, 6, 10, 15, 30' in finding.fix


def test_layers_on_virtual_stages():  # Megatron-LM 468: 80 layers, 16 stages of 2 chunks built 64
    finding = found(model(layers=80), Layout(16, pp=16, vpp=2))['layout.layers']
    assert 'leave 16 over' in finding.message and 'build 64' in finding.message and 'vpp may be 1, 5.' in finding.fix


def test_one_report_for_a_moe():  # ms-swift 5737
    findings = found(load_model('glm-4.5-air'), Layout(64, tp=8, pp=4, ep=16, etp=1), TrainSpec(4096, global_batch=16, micro_batch=2, recompute='full'))
    assert errors(findings) == ['layout.layers'] and '(11, 12, 12, 11)' in findings['layout.layers'].fix
    assert Layout(64, tp=8, pp=4).dp == 2
    assert 'm=4 ' in findings['layout.bubble'].message and '42.9%' in findings['layout.bubble'].message
    assert 'm=8 and 27.3%' in findings['layout.bubble'].fix
    [grid] = check_grid(Layout(32, tp=8, pp=4, ep=16, etp=1))
    assert 'etp 1 x ep 16 x pp 4 = 64' in grid.message


@pytest.mark.parametrize('heads, tp, valid, inside', [
    (28, 8, '1, 2, 4, 7, 14, 28', '1, 2, 4'), (52, 8, '1, 2, 4, 13, 26, 52', '1, 2, 4'), (40, 3, '1, 2, 4, 5, 8, 10, 20, 40', '1, 2, 4, 8')])
def test_heads(heads, tp, valid, inside):  # AdaptThink 1, DeepSpeed 3634, vllm 2652 and 596
    spec = model(heads=heads, hidden=heads * 128)
    finding = found(spec, Layout(tp, tp=tp))['layout.heads']
    assert f'Valid here: {valid}; inside a server of 8 cards: {inside}.' in finding.fix and 'use pp' in finding.fix
    assert valid_values(spec, None, 'tp') == [int(value) for value in valid.split(', ')]


@pytest.mark.parametrize('vocab, tp, least, padded', [
    (129280, 24, 129288, 132096), (151552, 6, 151554, 152064), (32000, 2, 32000, 32000), (32001, 2, 32002, 32256), (65535, 2, 65536, 65536), (128256, 8, 128256, 129024)])
def test_vocabulary(vocab, tp, least, padded):  # sglang 31799, vllm 31474, Megatron-LLM 103, ColossalAI 6167
    padding = pad_vocab(vocab, tp)
    assert (padding.least, padding.padded, padding.extra, padding.shard) == (least, padded, padded - vocab, padded // tp)


def test_vocabulary_of_another_rule():  # ColossalAI PR 6124
    padding = pad_vocab(128256, 8, multiple=64)
    assert (padding.padded, padding.shard) == (128512, 16064)


@pytest.mark.parametrize('layout, unit', [(Layout(16, tp=8, cp=2), 16), (Layout(16, tp=8, cp=2, sequence_parallel=False), 4), (Layout(8, tp=8), 8), (Layout(6, tp=3, cp=2), 12)])
def test_sequence_multiple(layout, unit):  # NeMo RL PR 3563
    assert sequence_multiple(layout) == unit


def test_sequence_of_8200():
    finding = found(model(), Layout(16, tp=8, cp=2), TrainSpec(8200, global_batch=1))['layout.sequence']
    assert 'leaves 8 of a multiple of 16' in finding.message and '8192, 8208' in finding.fix


def test_two_cp_values():  # Megatron-Bridge 1982
    layout = Layout(32, tp=8, cp=2)
    assert layout.dp == 2
    assert [[len(chunk) for chunk in chunks] for chunks in context_chunks(24576, 2)] == [[6144, 6144]] * 2
    assert {len(chunk) for chunks in context_chunks(24576, 4) for chunk in chunks} == {3072}
    [finding] = check_effective({'cp': layout.cp}, {'cp': 4})
    assert finding.message == 'two cp values in effect: 2 configured, 4 derived from the group.'


def test_ep_counts_ranks_not_experts():  # DeepSpeed 7535
    spec = model(experts=8, top_k=2, expert_ffn=512)
    findings = found(spec, Layout(4, ep=8))
    assert 'Give ep=4 with 2 experts on a rank' in findings['layout.ep'].fix
    assert 'layout.expert_grid' in errors(findings)


@pytest.mark.parametrize('layout, dp, edp', [(Layout(16, tp=2, pp=2, ep=4, etp=1), 4, 2), (Layout(16, tp=2, pp=2, cp=2, ep=4, etp=1), 2, 2)])
def test_ep_and_cp_go_together(layout, dp, edp):  # Megatron-Bridge PR 2530, Megatron-LM 1459
    assert (layout.dp, layout.edp, check_grid(layout)) == (dp, edp, [])
    assert errors(found(model(experts=8, top_k=2, expert_ffn=512), layout)) == []


def test_batch_of_a_lost_process():  # starcoder 77, DeepSpeed PR 1734
    [finding] = check_batch(64, 4, 8, dp=1)
    assert '4 x 8 x 1 = 32, global_batch=64' in finding.message and 'written for 2 replicas and 1 came up' in finding.fix


# ---- rules ---------------------------------------------------------------------------------------------------------------

def test_article_grid():
    moe = load_model('article-moe-128')
    findings = found(moe, Layout(128, tp=8, pp=8, dp=2, ep=4))
    assert errors(findings) == ['layout.expert_grid'] and findings['layout.etp_default'].severity == 'warning'
    assert 'etp may be 1, 2, 4' in findings['layout.expert_grid'].fix
    placed = placement(Layout(128, tp=8, pp=8, ep=4, etp=2), A2).set_index('axis')
    assert placed.link['ep'] == 'hccs'  # 'restrict EP to one server' changes nothing
    assert placement(Layout(128, tp=8, pp=8, ep=2, etp=8), A2).set_index('axis').link['ep'] == 'roce'
    assert 'layout.experts' in found(moe, Layout(128, tp=8, pp=8, ep=16, etp=1))


@pytest.mark.parametrize('dtype, cluster, code', [('bf16', 'atlas-800-910a', 'layout.dtype'), ('fp16', 'atlas-800-910a', None), ('bf16', 'atlas-800t-a2', None)])
def test_910a_has_no_bf16(dtype, cluster, code):
    findings = found(model(), Layout(4), TrainSpec(4096, 64, dtype=dtype), load_cluster(cluster))
    assert ('layout.dtype' in findings) == (code is not None)


def test_alignment_follows_the_data_type():  # the article says 16 for all
    spec = model(ffn=4096 + 64)
    assert 'ffn / tp = 520' in found(spec, Layout(8, tp=8))['layout.alignment'].message
    assert 'layout.alignment' not in found(spec, Layout(8, tp=8), TrainSpec(4096, 16, dtype='fp32'))
    assert 'layout.alignment' not in found(model(), Layout(8, tp=8))


def test_tp_over_servers_with_its_cost():
    findings = found(load_model('llama3-70b'), Layout(128, tp=16, pp=8), TrainSpec(8192, 256))
    assert 'over roce instead of' in findings['layout.tp_server'].message
    assert 'layout.tp_server' not in found(load_model('llama3-70b'), Layout(128, tp=8, pp=8), TrainSpec(8192, 256))


def test_on_a_super_pod_tp_16_stays_inside():
    findings = found(load_model('llama3-70b'), Layout(128, tp=16, pp=8), TrainSpec(8192, 256), load_cluster('atlas-900-a3'))
    assert 'layout.tp_server' not in findings


def test_a_wrong_order_is_named_with_the_better_one():
    findings = found(load_model('llama3-70b'), Layout(64, tp=8, pp=4, order='dp-tp-cp-ep-pp'), TrainSpec(8192, 128))
    assert "order='tp-" in findings['layout.placement'].fix


def test_every_mistake_at_once():
    findings = found(load_model('mixtral-8x7b'), Layout(96, tp=6, pp=5, ep=3, vpp=2, sequence_parallel=False), TrainSpec(4097, 7))
    assert {'layout.world', 'layout.expert_grid', 'layout.heads', 'layout.kv_heads', 'layout.layers', 'layout.experts', 'layout.moe_sp', 'layout.batch'} <= set(errors(findings))
    assert len(errors(findings)) >= 8 and all(finding.fix for finding in findings.values())


def test_uneven_split_given_by_hand():
    assert 'layout.layers' not in found(model(layers=30), Layout(4, pp=4, layer_split=(7, 8, 8, 7)))
    assert 'layout.layers' in found(model(layers=30), Layout(4, pp=4, layer_split=(8, 8, 8, 7)))


@given(layers=st.integers(1, 200), pp=st.integers(1, 16), vpp=st.integers(1, 4))
def test_every_layer_on_one_stage(layers, pp, vpp):
    stages = stage_layers(Layout(pp, pp=pp, vpp=vpp), layers)
    assert sorted(layer for stage in stages for layer in stage) == list(range(layers))
    assert max(even_out(layers, pp * vpp)) - min(even_out(layers, pp * vpp)) <= 1


@settings(max_examples=40, deadline=None)
@given(tp=st.integers(1, 9), pp=st.integers(1, 9), cp=st.integers(1, 3), ep=st.integers(1, 9), etp=st.none() | st.integers(1, 9), world=st.integers(1, 200),
       seq=st.integers(1, 9000), batch=st.integers(1, 300), name=st.sampled_from(['llama3-8b', 'mixtral-8x7b', 'deepseek-v3', 'gpt2-xl']))
def test_check_never_fails(tp, pp, cp, ep, etp, world, seq, batch, name):
    layout = Layout(world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    for finding in check(load_model(name), A2, layout, TrainSpec(seq, batch)):
        assert finding.message and finding.fix
    if not check_grid(layout):
        assert all(seconds > 0 for _, seconds in traffic_seconds(load_model(name), load_cluster('atlas-800-910a'), layout, TrainSpec(seq, batch)).values())


# ---- the step ------------------------------------------------------------------------------------------------------------

def test_schedule_names_are_those_of_the_pipeline():  # spec may not import pipeline, so it keeps its own list
    from hybridlab.pipeline.bubble import SCHEDULES
    from hybridlab.pipeline.schedule import KINDS

    assert set(SCHEDULE_NAMES) == set(KINDS) == set(SCHEDULES) and len(SCHEDULE_NAMES) == len(KINDS)


@pytest.mark.parametrize('field, value', [
    ('zero', 4), ('zero', True), ('schedule', '1F1B'), ('imbalance', 0.9), ('imbalance', float('nan')), ('capacity_factor', 0), ('gradient_bits', 16), ('weights_dtype', 'fp8'),
    ('moments_dtype', 'fp61'), ('gradient_dtype', None), ('recompute_layers', 0), ('vocab_multiple', 1.5), ('recompute', 'block')])
def test_a_wrong_setting_is_named(field, value):
    with pytest.raises(ValueError, match=f'TrainSpec: 1 error[^s](.|\n)*{field}='):
        TrainSpec(4096, 64, **{field: value})
