"""The command as a user runs it."""
import json
import subprocess
import sys

import pytest

from hybridlab import __version__
from hybridlab.cli import main


def hybridlab(*args: str, cwd=None) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, '-m', 'hybridlab', *args], capture_output=True, text=True, timeout=300, cwd=cwd)


def test_version_and_help():
    assert hybridlab('--version').stdout.strip() == f'hybridlab {__version__}'
    for verb in ('lab', 'test', 'run', 'docs', 'bench'):
        assert verb in hybridlab().stdout


def test_bench_prints_one_json_object():
    result = hybridlab('bench', 'chunking', '--json')
    assert result.returncode == 0, result.stderr
    parsed = json.loads(result.stdout)
    assert parsed['bench'] == 'chunking' and parsed['machine']['cores']
    assert all(set(row) == {'case', 'metric', 'unit', 'ours', 'peer', 'peer_name', 'ratio'} for row in parsed['rows'])


@pytest.mark.parametrize('args, text', [(('bench', 'chunk'), 'valid here: allreduce, chunking'), (('run', 'missing.ipynb'), 'missing.ipynb')])
def test_mistakes_end_in_one_line(args, text):
    result = hybridlab(*args)
    assert result.returncode == 2 and text in result.stderr and 'Traceback' not in result.stderr


def test_outside_a_checkout_the_remedy_is_named(tmp_path, monkeypatch, capsys):
    import hybridlab.site as site

    def nowhere(start=None):
        raise FileNotFoundError('no checkout; clone the repository')
    monkeypatch.setattr(site, 'find_checkout', nowhere)
    assert main(['run']) == 2 and 'clone the repository' in capsys.readouterr().err


def test_unknown_options_are_refused_where_they_would_be_lost():
    result = hybridlab('bench', 'chunking', '--jsn')
    assert result.returncode == 2 and '--jsn' in result.stderr
