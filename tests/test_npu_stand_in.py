"""The library on a stand-in for an NPU: a device of its own whose tensors do not mix with the CPU's, and an hccl that refuses what HCCL refuses.

It finds tensors on the wrong device and types that HCCL cannot add. It says nothing about an operator's result or speed on a card."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / 'tests' / 'npu_stand_in'
COMPILER = shutil.which('g++') or shutil.which('c++')


@pytest.fixture(scope='module')
def python(tmp_path_factory):
    "Runs a script where torch_npu is the stand-in, with two cards."
    if COMPILER is None or sys.platform != 'linux':
        pytest.skip('needs Linux and a C++ compiler, to build the device')
    from torch.utils.cpp_extension import include_paths, library_paths

    site = tmp_path_factory.mktemp('site')
    package, info = site / 'torch_npu', site / 'torch_npu-2.13.0.dist-info'
    for folder in (package, info):
        folder.mkdir()
    shutil.copy(HERE / 'torch_npu.py', package / '__init__.py')
    (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n')
    (info / 'entry_points.txt').write_text('[torch.backends]\ntorch_npu = torch_npu:_autoload\n')
    places = [f'-I{path}' for path in include_paths()] + [f'-L{path}' for path in library_paths()]
    built = subprocess.run([COMPILER, '-std=c++20', '-O0', '-fPIC', '-shared', str(HERE / 'device.cpp'), '-o', str(package / 'device.so'), *places, '-ltorch_cpu', '-lc10'],
                           capture_output=True, text=True)
    if built.returncode and 'No such file' in built.stderr:
        pytest.skip(f'this torch comes without headers: {built.stderr.splitlines()[0]}')
    assert built.returncode == 0, built.stderr[-3000:]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(('ASCEND', 'TORCH_DEVICE', 'HCCL', 'RANK'))}

    def python(script, folder):
        (folder / 'script.py').write_text(script, encoding='utf-8')
        env = clean | {'PYTHONPATH': str(site), 'ASCEND_HOME_PATH': str(site), 'OMP_NUM_THREADS': '1', 'STAND_IN_CARDS': '2'}
        done = subprocess.run([sys.executable, 'script.py'], capture_output=True, text=True, cwd=folder, env=env, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
    return python


SPLIT = """
from hybridlab.core.device import load_torch, pick_device
from hybridlab.core.launch import run
torch = load_torch()
print(pick_device().type, pick_device().backend)
w = torch.randn(3, 3, device='npu', requires_grad=True)
(torch.ones(2, 3, device='npu') @ w).relu().sum().backward()
print(w.grad.device.type)

def refused(call):
    try: call()
    except RuntimeError as error: return str(error)
    return 'accepted'

print(refused(lambda: w + torch.ones(3)))

def rank():
    import torch.distributed as dist
    x, everyone = torch.full((4,), dist.get_rank() + 1.0, device='npu'), [None, None]
    dist.all_reduce(x)
    dist.all_gather_object(everyone, dist.get_rank())
    return x.tolist(), everyone, refused(lambda: dist.all_reduce(torch.ones(1))), refused(lambda: dist.all_reduce(x.double()))

print(run(rank, world_size=2)[1])
"""


def test_the_stand_in_keeps_devices_apart(python, tmp_path):
    lines = python(SPLIT, tmp_path).splitlines()
    assert lines[:2] == ['npu hccl', 'npu'] and 'npu:0 and cpu' in lines[2]
    assert lines[3] == str(([3.0] * 4, [0, 1], 'No backend type associated with device type cpu', 'hccl: cannot reduce torch.float64'))


MEASURE = """
def small_measure(device_type, budget_s): # `measure` with the shapes for a CPU, which is what computes here
    from hybridlab.plan import calibrate

    clock = calibrate.rank_clock(device_type, 2)
    return [Probe(kind, size, calibrate._middle_seconds(call, clock, budget_s)) for family in calibrate.FAMILIES for kind, size, call in family(device_type, 1)]
"""


def test_the_page_for_a_node_runs_on_it(python, tmp_path):
    "Every cell of guides/ascend_node but those that need the real torch_npu, with small shapes: collectives, all-to-all, pipeline, probe, fused operators, calibration."
    cells = json.loads((ROOT / 'nbs' / 'guides' / 'ascend_node.ipynb').read_text(encoding='utf-8'))['cells']
    code = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']
    script = '\n\n'.join(source for source in code if not source.startswith('#| npu'))
    for shown, used in (("small = device.type == 'cpu'", 'small = True'), ('run(measure, ', 'run(small_measure, '), ('node = {', f'{MEASURE}\nnode = {{')):
        assert script.count(shown) == 1, shown
        script = script.replace(shown, used)
    python(script, tmp_path)
    node = json.loads((tmp_path / 'ascend_node.json').read_text(encoding='utf-8'))
    items = node['items']
    assert node['device']['type'] == 'npu' and node['ranks'] == 2 and len(items) == 11
    broken = {name: item.get('error', item) for name, item in items.items() if item['passed'] is False}
    assert not broken, f'{list(broken)} fail on a device of their own: ' + json.dumps(broken, indent=1)[:4000]
    assert all('instead' not in item['did'] for item in items.values()), 'the page says that it did something else on an NPU'
