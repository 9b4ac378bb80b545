"""Device choice against stand-ins for torch_npu: one that fails as the real wheel does without CANN, one that works."""
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

BROKEN = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n"

# Registers what the real module registers: a device 'npu' and a backend 'hccl', here an alias over gloo.
WORKING = textwrap.dedent('''
    import types
    import torch
    import torch.distributed as dist

    def _autoload():
        """Named by the entry point; importing this module has done the work."""

    torch.utils.rename_privateuse1_backend('npu')
    npu = types.ModuleType('torch.npu')
    npu.is_available = lambda: True
    npu.device_count = lambda: 2
    npu.get_device_name = lambda index=0: 'Ascend910B3'
    npu.current = None
    npu.set_device = lambda index: setattr(npu, 'current', index)
    npu.current_device = lambda: npu.current
    torch._register_device_module('npu', npu)
    make = lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout)
    dist.Backend.register_backend('hccl', make, devices=['cpu'])
''')


def install(folder: Path, source: str) -> None:
    "A torch_npu distribution with the entry point that makes `import torch` load it."
    (folder / 'torch_npu').mkdir()
    (folder / 'torch_npu/__init__.py').write_text(source)
    info = folder / 'torch_npu-2.13.0.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text('Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n')
    (info / 'entry_points.txt').write_text('[torch.backends]\ntorch_npu = torch_npu:_autoload\n')


def python(code: str, folder: Path, **env: str) -> subprocess.CompletedProcess:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(('ASCEND', 'TORCH_DEVICE'))}
    return subprocess.run([sys.executable, '-c', textwrap.dedent(code)], capture_output=True, text=True, timeout=120,
                          env={**clean, 'PYTHONPATH': str(folder), **env})


@pytest.fixture
def broken(tmp_path):
    install(tmp_path, BROKEN)
    return tmp_path


@pytest.fixture
def working(tmp_path):
    install(tmp_path, WORKING)
    return tmp_path


def test_the_broken_stub_fails_as_the_real_wheel_does(broken):
    result = python('import torch', broken)
    assert result.returncode == 1
    assert 'Failed to load the backend extension: torch_npu' in result.stderr and 'libhccl.so' in result.stderr


@pytest.mark.parametrize('env, reason', [({}, 'CANN is not'), ({'ASCEND_HOME_PATH': '/opt/ascend'}, 'libhccl.so')])
def test_a_broken_torch_npu_leaves_the_cpu_with_a_reason(broken, env, reason):
    result = python('''
        import os
        from hybridlab.core.device import device_report, pick_device
        device = pick_device()
        print(device.type, device.backend, device.reason)
        assert 'TORCH_DEVICE_BACKEND_AUTOLOAD' not in os.environ
        import torch
        assert torch.ones(2).sum() == 2
        assert len(device_report()) >= 5
    ''', broken, **env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith('cpu gloo') and reason in result.stdout


def test_ranks_run_beside_a_broken_torch_npu(broken):
    result = python('''
        from hybridlab.core.launch import run
        def rank():
            import torch.distributed as dist
            return dist.get_rank()
        print(run(rank, world_size=2))
    ''', broken)
    assert result.stdout.strip() == '[0, 1]', result.stderr


def test_a_working_npu_is_chosen_first(working):
    result = python('from hybridlab.core.device import pick_device; print(pick_device())', working, ASCEND_HOME_PATH='/opt/ascend')
    assert "type='npu', backend='hccl', name='Ascend910B3', count=2, reason='first choice'" in result.stdout, result.stderr


def test_ranks_on_npu_take_hccl_and_their_own_device(working):
    result = python('''
        from hybridlab.core.launch import run
        def rank():
            import torch
            import torch.distributed as dist
            x = torch.ones(1)
            dist.all_reduce(x)
            return dist.get_backend(), torch.npu.current_device(), x.item()
        print(run(rank, world_size=2))
        try:
            run(rank, world_size=3)
        except ValueError as error:
            print(error)
    ''', working, ASCEND_HOME_PATH='/opt/ascend')
    assert "[('hccl', 0, 2.0), ('hccl', 1, 2.0)]" in result.stdout, result.stdout + result.stderr
    assert 'world_size=3 but 2 npu visible' in result.stdout
