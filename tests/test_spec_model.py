"""Models: published counts, sources of every value, and files of users."""
import math
import tomllib
from importlib.resources import files

import pytest
from hypothesis import given, settings, strategies as st

from hybridlab.spec.model import (
    GradientList, ModelSpec, check_model, list_models, load_model, model_sources, plot_flops, plot_parameters, published_parameters)

TABLES = tomllib.loads((files('hybridlab.data') / 'models.toml').read_text(encoding='utf-8'))
COUNTS = published_parameters()
HOWS = {'read', 'measured', 'derived', 'recalled'}
each_model = pytest.mark.parametrize('name', list_models())


@pytest.mark.parametrize('row', list(COUNTS[COUNTS.model != 'pangu-ultra'].itertuples()), ids=lambda row: f'{row.model}-{row.of}')
def test_published_counts(row):
    assert row.equal, f'{row.ours:,} against {row.published}'


def test_the_count_that_is_not_met():
    [row] = COUNTS[~COUNTS.equal].itertuples()
    assert row.model == 'pangu-ultra' and abs(row[5]) < 1


def test_issue_list_is_complete():
    wanted = {'gpt2-small', 'gpt3-175b', 'bert-large', 'resnet-152', 'megatron-1.7b', 'megatron-1t', 'llama2-7b', 'llama3-70b', 'mixtral-8x7b', 'qwen3-30b-a3b',
              'deepseek-v3', 'pangu-ultra', 'pangu-ultra-moe', 'pangu-pro-moe', 'article-moe-128'}
    assert wanted <= set(list_models())


@each_model
def test_every_value_has_a_source(name):
    for field, fact in model_sources(name).items():
        assert fact and fact[0] in HOWS and len(fact[1]) > 5, field
    fields = [field for row in TABLES[name]['sources'] for field in row['fields'] if field != '*']
    assert len(set(fields)) == len(fields) and set(fields) <= set(TABLES[name])
    assert all(claim['source'] for claim in TABLES[name].get('published', ()))


@each_model
def test_layers_and_tensors_add_up(name):
    model = load_model(name)
    assert model.parameters() == sum(math.prod(shape) for _, shape in model.tensors())
    assert len({tensor for tensor, _ in model.tensors()}) == len(list(model.tensors()))
    if isinstance(model, GradientList):
        return
    layers = model.layer_parameters(mtp=True)
    assert len(layers) == model.layers + 2 + model.mtp == len(model.kinds)
    assert sum(layer.total for layer in layers) == model.parameters(mtp=True) == sum(math.prod(shape) for _, shape in model.tensors(mtp=True))
    assert model.parameters(active=True) <= model.parameters() and (model.experts == 0) == (model.parameters(active=True) == model.parameters())
    assert model.flops_per_token(1, causal=True) < model.flops_per_token(2) < model.flops_per_token(2, mtp=True) + (model.mtp == 0)
    assert model.flops_per_token(64, backward=False) * 3 == model.flops_per_token(64)


def test_article_model_is_some_hundred_billion():
    model = load_model('article-moe-128')
    assert (model.layers, model.experts) == (64, 8) and 0.9e11 < model.parameters() < 1.1e11


def test_every_mistake_of_a_file(tmp_path):
    file = tmp_path / 'mine.toml'
    file.write_text('[mine]\nlayers = "4"\nhiden = 64\nheads = 4.0\nffn = -1\nvocab = true\nnorm = "batchnorm"\ntied = 1\n', encoding='utf-8')
    with pytest.raises(ValueError, match=r'9 errors') as caught:
        load_model('mine', file)
    text = str(caught.value)
    for part in ('Did you mean hidden?', 'hidden is missing', 'max_seq is missing', "layers='4'", 'heads=4.0', 'ffn=-1', 'vocab=True', 'rmsnorm, layernorm', 'tied=1', str(file)):
        assert part in text


@pytest.mark.parametrize('text', ['layers = ', 'x = 1', '[a]\nb = [' + '[' * 5000, 'a = "\ud800"'.encode('utf-8', 'surrogatepass').decode('latin-1')])
def test_files_that_are_no_models(text, tmp_path):
    file = tmp_path / 'bad.toml'
    file.write_text(text, encoding='latin-1')
    with pytest.raises(ValueError):
        load_model('a', file)


values = st.one_of(st.integers(-2, 10**9), st.booleans(), st.none(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(['layers', 'hidden', 'heads', 'ffn', 'vocab', 'max_seq', 'experts', 'top_k', 'kv_lora', 'tied', 'norm', 'nam']), values))
def test_check_model_never_fails(table):
    findings = check_model(table)
    assert all(finding.severity == 'error' and finding.fix for finding in findings)
    if not findings:
        assert ModelSpec(name='x', **table).parameters() > 0


def test_plots():
    model = load_model('pangu-pro-moe')
    assert '23%' in plot_parameters(model).get_title(loc='left') and plot_flops(model, 4096).get_xlabel()
