"""The wheel: what is in it, what it asks for, and that it works from an empty folder without the checkout. Needs no network."""
import os
import subprocess
import sys
import sysconfig
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def run(*command, **options):
    "Run a command; its whole output becomes the failure message."
    __tracebackhide__ = True
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert done.returncode == 0, f'{" ".join(map(str, command))} exited with {done.returncode}:\n{done.stdout}'
    return done.stdout


@pytest.fixture(scope='module')
def settings():
    parser = ConfigParser(delimiters='=')
    parser.read(ROOT / 'settings.ini', encoding='utf-8')
    return parser['DEFAULT']


@pytest.fixture(scope='module')
def source(copy_checkout, tmp_path_factory):
    return copy_checkout(tmp_path_factory.mktemp('source'))


@pytest.fixture(scope='module')
def wheel(source, tmp_path_factory):
    expected = package_files(source)  # listed before the build, which leaves files of its own
    out = tmp_path_factory.mktemp('dist')
    run(sys.executable, '-m', 'build', '--wheel', '--no-isolation', '--outdir', out, source)
    wheels = list(out.glob('*.whl'))
    assert len(wheels) == 1, wheels
    return wheels[0], expected


@pytest.fixture(scope='module')
def installed(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp('target')
    run(sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-index', '--no-compile', '--target', target, wheel[0])
    return target


@pytest.fixture(scope='module')
def package(installed):
    [found] = metadata.distributions(path=[str(installed)])
    return found


def package_files(root):
    "Every file the wheel must hold: the package as it is, and data/ as hybridlab/data/."
    files = {path.relative_to(root).as_posix() for path in (root / 'hybridlab').rglob('*') if path.is_file()}
    return files | {f'hybridlab/{path.relative_to(root).as_posix()}' for path in (root / 'data').rglob('*') if path.is_file()}


def outside(installed, tmp_path, *arguments):
    "Run Python with the scratch folder and the third-party packages only: -S keeps the editable install out."
    __tracebackhide__ = True
    packages = {sysconfig.get_path('purelib'), sysconfig.get_path('platlib')}
    env = os.environ | {'PYTHONPATH': os.pathsep.join([str(installed), *packages])}
    return run(sys.executable, '-S', *arguments, cwd=tmp_path, env=env)


def test_holds_the_package_and_nothing_else(wheel):
    path, expected = wheel
    held = {name for name in ZipFile(path).namelist() if '.dist-info/' not in name and not name.endswith('/')}
    assert not expected - held, f'not in the wheel (see packages and package_data in setup.py): {sorted(expected - held)}'
    assert not held - expected, f'does not belong in the wheel: {sorted(held - expected)}'
    strays = [name for name in held if name.endswith('.ipynb') or name.startswith(('tests/', 'nbs/'))]
    assert not strays, f'does not belong in the wheel: {strays}'


def test_carries_the_licence(wheel):
    assert any(name.endswith('LICENSE') for name in ZipFile(wheel[0]).namelist()), 'LICENSE is missing from the wheel'


def test_metadata_is_that_of_settings_ini(package, settings):
    assert package.metadata['Name'] == settings['lib_name']
    assert package.version == settings['version']
    assert package.metadata['Requires-Python'] == f'>={settings["min_python"]}'
    assert 'Apache-2.0' in (package.metadata['License-Expression'], package.metadata['License'])
    assert package.metadata['Summary'] == settings['description']


def test_offers_the_extras(package):
    assert set(package.metadata.get_all('Provides-Extra')) == {'torch', 'npu', 'lab', 'dev'}


def test_base_install_stays_light(package):
    base = {Requirement(line).name for line in package.requires if 'extra ==' not in line}
    heavy = base & {'torch', 'torch-npu', 'torch_npu', 'nbdev', 'fastcore', 'execnb', 'ghapi', 'jupyterlab'}
    assert not heavy, f'belongs in an extra of settings.ini, not in requirements: {sorted(heavy)}'


def test_imports_from_the_wheel(installed, tmp_path, settings):
    code = 'import hybridlab, hybridlab.data as d; print(hybridlab.__file__, d.__file__, hybridlab.__version__, sep="\\n")'
    module, data, version = outside(installed, tmp_path, '-c', code).split('\n')[:3]
    assert Path(module) == installed / 'hybridlab' / '__init__.py', 'the test imported another copy'
    assert Path(data) == installed / 'hybridlab' / 'data' / '__init__.py', 'the test imported another copy'
    assert version == settings['version']


def test_reads_every_data_file(installed, source, tmp_path):
    code = ('from importlib.resources import files\n'
            'print(*sorted(f"{f.name} {len(f.read_bytes())}" for f in files("hybridlab.data").iterdir() if f.is_file()), sep="\\n")')
    expected = sorted(f'{path.name} {path.stat().st_size}' for path in (source / 'data').iterdir() if path.is_file())
    assert outside(installed, tmp_path, '-c', code).splitlines() == expected


def test_runs_as_a_module(installed, tmp_path, settings):
    assert settings['version'] in outside(installed, tmp_path, '-m', 'hybridlab', '--version')


def test_console_script_runs(installed, tmp_path, settings):
    script = next((path for folder in ('bin', 'Scripts') for path in (installed / folder).glob('hybridlab*')), None)
    assert script, 'no hybridlab command was installed (console_scripts in settings.ini)'
    assert settings['version'] in outside(installed, tmp_path, script, '--version')
