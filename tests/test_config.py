"""Settings from strangers' files and environments: every mistake is a finding, none a traceback."""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridlab.core.config import Config, check_config, load_config

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.lists(st.integers(), max_size=2))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.one_of(st.sampled_from(list(vars(Config()))), st.text(max_size=12)), scalars, max_size=6))
def test_any_mapping_is_checked_or_accepted(values):
    findings = check_config(values)
    if findings:
        assert all(finding.fix for finding in findings)
    else:
        Config(**values)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([f'HYBRIDLAB_{name.upper()}' for name in vars(Config())]), st.text(max_size=10), max_size=4))
def test_any_environment_gives_settings_or_one_value_error(env):
    try:
        assert isinstance(load_config(env=env), Config)
    except ValueError as error:
        assert 'settings:' in str(error)


@pytest.mark.parametrize('text, message', [
    ('chunk_bytes = ', 'cannot read settings'), ('hybridlab = 3', 'is not a table'), ('chunk_bytes = "12 parsecs"', "chunk_bytes='12 parsecs'"),
    ('[hybridlab]\nchunk_byte = 1', 'Did you mean chunk_bytes'), ('pipeline_depth = [1]', 'pipeline_depth=')])
def test_bad_files_name_the_mistake(tmp_path, text, message):
    (tmp_path / 'bad.toml').write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path / 'bad.toml', env={})


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / 'x.toml').write_bytes(b'\xff\xfe\x00')
    with pytest.raises(ValueError, match='cannot read settings'):
        load_config(tmp_path / 'x.toml', env={})


def test_order_of_strength(tmp_path):
    (tmp_path / 'h.toml').write_text('chunk_bytes = "1M"\nbucket_bytes = "2M"\npipeline_depth = 1\n')
    made = load_config(tmp_path / 'h.toml', env={'HYBRIDLAB_BUCKET_BYTES': '3M', 'HYBRIDLAB_PIPELINE_DEPTH': '2'}, pipeline_depth=3)
    assert (made.chunk_bytes, made.bucket_bytes, made.pipeline_depth, made.quantize_bits) == (1 << 20, 3 << 20, 3, 8)
