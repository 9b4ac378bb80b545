"""Every torch_npu name and parameter used here exists in the real wheel, checked without importing it."""
import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WHEEL = 'torch_npu==2.13.0'
SOURCES = sorted((ROOT / 'hybridlab').rglob('*.py'))


def used_names() -> dict[str, set[str]]:
    "torch_npu.NAME calls in the library: name → keyword arguments passed."
    used: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == 'torch_npu':
                used.setdefault(node.func.attr, set()).update(keyword.arg for keyword in node.keywords)
    return used


@pytest.fixture(scope='session')
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp('torch_npu')
    command = [sys.executable, '-m', 'pip', 'download', '-q', '--no-deps', '--only-binary=:all:', '-d', str(folder), WHEEL]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        pytest.skip(f'{WHEEL} did not download in 300 s')
    if result.returncode:
        pytest.skip(f'{WHEEL} cannot be downloaded here: {result.stderr.strip().splitlines()[-1]}')
    return zipfile.ZipFile(next(folder.glob('*.whl')))


@pytest.mark.network
def test_names_and_parameters_exist(wheel):
    "Operators are documented in torch_npu's _op_plugin_docs.py by their signature; others are defined or imported in __init__.py."
    texts = {name: wheel.read(name).decode('utf-8', 'replace') for name in wheel.namelist() if name.endswith('.py')}
    everything = '\n'.join(texts.values())
    for name, keywords in used_names().items():
        signatures = re.findall(rf'\b{name}\((.*?)\)', everything, flags=re.S)
        assert signatures, f'torch_npu has no {name}'
        for keyword in keywords:
            assert any(re.search(rf'\b{keyword}\b', signature) for signature in signatures), f'torch_npu.{name} has no parameter {keyword}'


@pytest.mark.network
def test_the_wheel_behaves_as_the_stand_ins_assume(wheel):
    entry = next(name for name in wheel.namelist() if name.endswith('entry_points.txt'))
    assert re.search(r'\[torch\.backends\]\s+torch_npu\s*=\s*torch_npu:_autoload', wheel.read(entry).decode())
    code = '\n'.join(wheel.read(name).decode('utf-8', 'replace') for name in wheel.namelist() if name.endswith('.py')).replace("'", '"')
    assert 'rename_privateuse1_backend("npu")' in code and '_register_device_module("npu"' in code
    assert re.search(r'register_backend\(\s*"hccl"', code)
