"""Every name and parameter of torch_npu that the library or a notebook uses exists in the real wheel, checked without importing it."""
import ast
import json
import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WHEEL = 'torch_npu==2.13.0'
OPERATORS = {'npu_dynamic_quant', 'npu_moe_gating_top_k', 'npu_moe_gating_top_k_softmax'} # fused ones that the library calls
STREAMS = ('current_stream', 'Stream') # functions of a device module that return a stream


def code_cells(path):
    "Every code cell of a notebook that is Python alone."
    for cell in json.loads(path.read_text(encoding='utf-8'))['cells']:
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'code' and not re.search(r'^\s*[%!]', source, re.MULTILINE):
            yield source


@cache
def sources():
    "The code of the library and of every notebook."
    library = [path.read_text(encoding='utf-8') for path in sorted((ROOT / 'hybridlab').rglob('*.py'))]
    notebooks = [path for path in sorted((ROOT / 'nbs').rglob('*.ipynb')) if '.ipynb_checkpoints' not in path.parts]
    return library + [cell for path in notebooks for cell in code_cells(path)]


def dotted(node):
    "'a.b.c' of an attribute chain, '' for anything else."
    if isinstance(node, ast.Attribute):
        return f'{base}.{node.attr}' if (base := dotted(node.value)) else ''
    return node.id if isinstance(node, ast.Name) else ''


def used_names(code):
    "Names below torch_npu: keyword arguments and number of positional ones passed; (set(), 0) where it is only looked at."
    used = {}
    for node in ast.walk(ast.parse(code)):
        keywords, positions, name = set(), 0, ''
        if isinstance(node, ast.Call) and dotted(node.func) in ('hasattr', 'getattr') and dotted(node.args[0]) == 'torch_npu':
            name = f'torch_npu.{ast.literal_eval(node.args[1])}'
        elif isinstance(node, ast.Call):
            name, keywords, positions = dotted(node.func), {keyword.arg for keyword in node.keywords}, len(node.args)
        elif isinstance(node, ast.Attribute):
            name = dotted(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == 'torch_npu':
            raise AssertionError(f'line {node.lineno}: write import torch_npu and its names in full, so that this test sees them')
        if name.startswith('torch_npu.'):
            known, most = used.get(name.removeprefix('torch_npu.'), (set(), 0))
            used[name.removeprefix('torch_npu.')] = known | keywords, max(most, positions)
    return used


def used_everywhere():
    used = {}
    for code in (code for code in sources() if 'torch_npu' in code):
        for name, (keywords, positions) in used_names(code).items():
            known, most = used.get(name, (set(), 0))
            used[name] = known | keywords, max(most, positions)
    return used


def device_names(code):
    "(names used of a device module such as torch.npu, names used of its streams)."
    tree, modules, names, streams = ast.parse(code), set(), set(), set()

    def is_module(node):
        return (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == 'get_device_module') or dotted(node) in modules | {'torch.npu'}

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_module(node.value):
            modules |= {dotted(target) for target in node.targets}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_module(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
            if node.value.func.attr in STREAMS and is_module(node.value.func.value):
                streams.add(node.attr)
    return names, streams


# ---- without the wheel ---------------------------------------------------------------------------------------------------

def test_every_way_to_use_a_name_is_seen():
    code = ('import torch_npu\nif hasattr(torch_npu, "a"): torch_npu.b(1, 2, k=3)\nx = torch_npu.profiler.profile(on=torch_npu.c)\n'
            'm = torch.get_device_module("npu")\nm.stream(m.Stream())\nm.current_stream().wait_event(0)\ntorch.npu.synchronize()')
    assert used_names(code) == {'a': (set(), 0), 'b': ({'k'}, 2), 'profiler.profile': ({'on'}, 0), 'profiler': (set(), 0), 'c': (set(), 0)}
    assert device_names(code) == ({'stream', 'Stream', 'current_stream', 'synchronize'}, {'wait_event'})
    with pytest.raises(AssertionError, match='in full'):
        used_names('from torch_npu import x')


def test_all_fused_operators_are_seen():
    "Neither the library nor a notebook names an operator that the checks below miss."
    used = set(used_everywhere())
    written = {name for code in sources() for name in re.findall(r'torch_npu\.(npu_\w+)|torch\.ops\.npu\.(\w+)', code) for name in name if name}
    assert written <= used and OPERATORS <= used
    assert {name for name in used if name.startswith('npu_')} == OPERATORS, 'add the operator to OPERATORS, and a comparison with the plain form to guides/ascend_node'


# ---- against the wheel ---------------------------------------------------------------------------------------------------

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


@pytest.fixture(scope='session')
def texts(wheel) -> dict[str, str]:
    return {name: wheel.read(name).decode('utf-8', 'replace').replace('\r\n', '\n') for name in wheel.namelist() if name.endswith('.py')}


def signatures(texts, name):
    "Parameters of everything that is called so: documented operators by their signature, functions and classes by their definition."
    if '.' in name:
        texts = {path: text for path, text in texts.items() if path.startswith(f'torch_npu/{name.rpartition(".")[0].replace(".", "/")}')}
    last = name.rpartition('.')[2]
    everything = '\n'.join(text for text in texts.values() if last in text)
    found = re.findall(rf'(?<![\w.])(?:torch_npu\.)?{last}\(([^()]*(?:\([^()]*\)[^()]*)*)\)', everything)
    return found + re.findall(rf'class {last}\b.*?def __init__\((.*?)\):', everything, flags=re.DOTALL)


def positions_of(signature):
    "Parameters that may be given by position."
    return len([part for part in signature.partition('*')[0].split(',') if part.strip() and part.strip() != 'self'])


@pytest.mark.network
def test_names_and_parameters_exist(texts):
    for name, (keywords, positions) in used_everywhere().items():
        if any(path.startswith(f'torch_npu/{name.replace(".", "/")}/') for path in texts): # a subpackage
            continue
        found = signatures(texts, name)
        assert found, f'torch_npu has no {name}'
        fits = [one for one in found if all(re.search(rf'\b{keyword}\b', one) for keyword in keywords) and positions_of(one) >= positions]
        assert fits, f'torch_npu.{name} does not take {positions} positional arguments and {sorted(keywords)}; it has {found[:3]}'


@pytest.mark.network
def test_gating_operators_return_the_experts_second(texts):
    "What the library takes from them: scores first, then expert numbers; documented with the operator."
    for name in sorted(OPERATORS - {'npu_dynamic_quant'}):
        documented = texts['torch_npu/_op_plugin_docs.py'].split(f'"{name}",\n')[1].split('"""')[1]
        assert re.search(r'-> ?\(Tensor, Tensor, Tensor\)', documented) and documented.index('expert_idx') > documented.index(f'{name}(')
    documented = texts['torch_npu/_op_plugin_docs.py'].split('"npu_dynamic_quant",\n')[1].split('"""')[1]
    assert '->(Tensor, Tensor)' in documented and 'output, scale = torch_npu.npu_dynamic_quant(x)' in documented


@pytest.mark.network
def test_device_module_and_streams_have_what_is_used(texts):
    [names] = [ast.literal_eval(node.value) for node in ast.parse(texts['torch_npu/npu/__init__.py']).body
               if isinstance(node, ast.Assign) and dotted(node.targets[0]) == '__all__'][:1]
    methods = {node.name for tree in ast.walk(ast.parse(texts['torch_npu/npu/streams.py'])) if isinstance(tree, ast.ClassDef) and tree.name == 'Stream'
               for node in tree.body if isinstance(node, ast.FunctionDef)}
    wanted, of_streams = (set().union(*parts) for parts in zip(*(device_names(code) for code in sources() if 'get_device_module' in code or 'torch.npu' in code)))
    assert {'set_device', 'device_count', 'stream', 'current_stream', 'synchronize'} <= wanted and {'wait_event', 'record_event'} <= of_streams
    assert not wanted - set(names), f'torch.npu lacks {sorted(wanted - set(names))}'
    assert not of_streams - methods, f'a stream of torch.npu lacks {sorted(of_streams - methods)}'


@pytest.mark.network
def test_the_wheel_behaves_as_the_stand_ins_assume(wheel, texts):
    entry = next(name for name in wheel.namelist() if name.endswith('entry_points.txt'))
    assert re.search(r'\[torch\.backends\]\s+torch_npu\s*=\s*torch_npu:_autoload', wheel.read(entry).decode())
    code = '\n'.join(texts.values()).replace("'", '"')
    assert 'rename_privateuse1_backend("npu")' in code and '_register_device_module("npu"' in code
    assert re.search(r'register_backend\(\s*"hccl"', code)
