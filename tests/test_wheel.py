"""Source distribution and wheel: what is in them, what they ask for, and that the wheel works in an empty environment without torch and without the checkout."""
import ast
import json
import os
import re
import subprocess
import sys
import tarfile
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_imports import DEV_ONLY, MODULES, TORCH_FREE_MODULES

ROOT = Path(__file__).resolve().parents[1]


def run(*command, **options):
    "Run a command; its whole output becomes the failure message."
    __tracebackhide__ = True
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert done.returncode == 0, f'{" ".join(map(str, command))} exited with {done.returncode}:\n{done.stdout}'
    return done.stdout


# ---- build and install ---------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def settings():
    parser = ConfigParser(delimiters='=')
    parser.read(ROOT / 'settings.ini', encoding='utf-8')
    return parser['DEFAULT']


@pytest.fixture(scope='module')
def source(copy_checkout, tmp_path_factory):
    return copy_checkout(tmp_path_factory.mktemp('source'))


@pytest.fixture(scope='module')
def built(source, tmp_path_factory):
    "The source distribution, the wheel that is built from it, and what the wheel must hold."
    expected, out = package_files(source), tmp_path_factory.mktemp('dist') # listed before the build, which leaves files of its own
    run(sys.executable, '-m', 'build', '--no-isolation', '--outdir', out, source)
    [sdist], [wheel] = out.glob('*.tar.gz'), out.glob('*.whl')
    return sdist, wheel, expected


def package_files(root):
    "Every file the wheel must hold: the package as it is, and data/ as hybridlab/data/."
    files = {path.relative_to(root).as_posix() for path in (root / 'hybridlab').rglob('*') if path.is_file()}
    return files | {f'hybridlab/{path.relative_to(root).as_posix()}' for path in (root / 'data').rglob('*') if path.is_file()}


def needed(requirements):
    "Distributions that requirements ask for, and those that these ask for, by name. Extras are not followed."
    found, waiting = {}, [Requirement(line) for line in requirements]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name not in found and (one.marker is None or one.marker.evaluate({'extra': ''})):
            found[name] = metadata.distribution(one.name)
            waiting += map(Requirement, found[name].requires or ())
    return found


@pytest.fixture(scope='module')
def clean(built, settings, tmp_path_factory):
    "Python of an empty environment with the wheel and what it declares, linked from the packages here: no torch, no notebook tools, no network."
    folder = tmp_path_factory.mktemp('clean')
    run(sys.executable, '-m', 'venv', '--without-pip', folder)
    python = next(path for path in (folder / 'bin' / 'python', folder / 'Scripts' / 'python.exe') if path.exists())
    site = Path(run(python, '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))').strip())
    for distribution in needed(settings['requirements'].split()).values():
        for top in {file.parts[0] for file in distribution.files} - {'..', '__pycache__'}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    run(sys.executable, '-m', 'pip', '--python', python, 'install', '--quiet', '--no-deps', '--no-index', '--no-compile', built[1])
    return python


@pytest.fixture(scope='module')
def inside(clean, tmp_path_factory):
    "Runs a program of the clean environment in an empty folder; returns the finished process."
    folder = tmp_path_factory.mktemp('elsewhere')
    env = {key: value for key, value in os.environ.items() if not key.startswith(('PYTHON', 'VIRTUAL_ENV', 'COV_'))} | {'NUMBA_CACHE_DIR': str(folder)}

    def inside(*command, program=clean.name):
        return subprocess.run([str(clean.parent / program), *map(str, command)], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    return inside


@pytest.fixture(scope='module')
def command(inside, clean):
    "The installed hybridlab command; returns its standard output."
    def command(*arguments):
        done = inside(*arguments, program='hybridlab.exe' if clean.suffix else 'hybridlab')
        assert done.returncode == 0 and not done.stderr, f'hybridlab {" ".join(arguments)} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}'
        return done.stdout
    return command


def printed(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- contents ------------------------------------------------------------------------------------------------------------

def test_wheel_holds_the_package_and_nothing_else(built):
    _, wheel, expected = built
    held = {name for name in ZipFile(wheel).namelist() if '.dist-info/' not in name and not name.endswith('/')}
    assert not expected - held, f'not in the wheel (see packages and package_data in setup.py): {sorted(expected - held)}'
    assert not held - expected, f'does not belong in the wheel: {sorted(held - expected)}'
    strays = [name for name in held if name.endswith('.ipynb') or name.startswith(('tests/', 'nbs/'))]
    assert not strays, f'does not belong in the wheel: {strays}'


def test_source_distribution_can_be_built_again(built):
    "The wheel was built from it; what setup.py reads must be in it (MANIFEST.in)."
    names = {name.partition('/')[2] for name in tarfile.open(built[0]).getnames()}
    assert {'settings.ini', 'setup.py', 'pyproject.toml', 'README.md', 'CHANGELOG.md', 'LICENSE'} <= names
    assert {f'data/{path.name}' for path in (ROOT / 'data').glob('*.[tcj]*')} <= names


def test_both_carry_the_licence(built):
    assert any(name.endswith('LICENSE') for name in ZipFile(built[1]).namelist()), 'LICENSE is missing from the wheel'


@pytest.fixture(scope='module')
def package(clean, inside):
    [folder] = ast.literal_eval(printed(inside('-c', 'import hybridlab; print(hybridlab.__path__)')))
    return next(found for found in metadata.distributions(path=[str(Path(folder).parent)]) if found.metadata['Name'] == 'hybridlab')


def test_metadata_is_that_of_settings_ini(package, settings):
    assert package.metadata['Name'] == settings['lib_name']
    assert package.version == settings['version']
    assert package.metadata['Requires-Python'] == f'>={settings["min_python"]}'
    assert 'Apache-2.0' in (package.metadata['License-Expression'], package.metadata['License'])
    assert package.metadata['Summary'] == settings['description']


def test_offers_the_extras(package):
    assert set(package.metadata.get_all('Provides-Extra')) == {'torch', 'npu', 'lab', 'rl', 'dev'}


def test_base_install_stays_light(package):
    base = {canonicalize_name(Requirement(line).name) for line in package.requires if 'extra ==' not in line}
    every = set(needed([line for line in package.requires if 'extra ==' not in line]))
    heavy = every & {'torch', 'torch-npu', 'jupyterlab', *DEV_ONLY}
    assert not heavy, f'belongs in an extra of settings.ini, not in requirements: {sorted(heavy)}'
    assert base <= every


# ---- import --------------------------------------------------------------------------------------------------------------

def test_the_environment_is_clean(inside, clean, settings):
    "The test itself: this is the copy from the wheel, and what must not be there is not there."
    code = ('import hybridlab, hybridlab.data as d, sys; from importlib.util import find_spec\n'
            'print([hybridlab.__file__, d.__file__, hybridlab.__version__, sys.prefix], [name for name in sys.argv[1:] if find_spec(name)])')
    text = printed(inside('-c', code, 'torch', 'torch_npu', 'pytest', 'jupyterlab', *DEV_ONLY))
    (module, data, version, prefix), foreign = map(ast.literal_eval, re.findall(r'\[.*?\]', text))
    assert Path(prefix).resolve() == clean.parent.parent.resolve() and not foreign
    assert Path(module).resolve().is_relative_to(Path(prefix).resolve()) and Path(data).parent == Path(module).parent / 'data', 'another copy was imported'
    assert version == settings['version']


IMPORT = """
import importlib, json, sys, traceback
trouble = {}
for name in sys.argv[1:]:
    try: importlib.import_module(f'hybridlab.{name}')
    except ModuleNotFoundError as error: trouble[name] = ['missing', error.name or str(error)]
    except BaseException: trouble[name] = ['error', traceback.format_exc(limit=-3)]
print(json.dumps(trouble))
"""


@pytest.fixture(scope='module')
def trouble(inside):
    return json.loads(printed(inside('-c', IMPORT, *[name for name in MODULES if name != '__main__'])).splitlines()[-1])


def test_torch_free_modules_import(trouble):
    broken = {name: trouble[name] for name in TORCH_FREE_MODULES if name in trouble}
    assert not broken, f'must import with the declared requirements alone: {broken}'


def test_other_modules_miss_torch_or_an_extra_and_nothing_else(trouble, settings):
    "A module that needs something undeclared would break for a user; one that needs an extra says so by its name."
    extras = {canonicalize_name(Requirement(line).name) for key in settings if key.endswith('_requirements') for line in settings[key].split()}
    packages = {canonicalize_name(top) for name in extras for top in [name, {'scikit-learn': 'sklearn'}.get(name, name)]} | {'torch'}
    wrong = {name: (kind, what) for name, (kind, what) in trouble.items()
             if kind != 'missing' or canonicalize_name(re.split(r'[. ]', what)[0]) not in packages}
    assert not wrong, f'fails in a clean environment: {wrong}'


def test_reads_every_data_file(inside, source):
    code = ('from importlib.resources import files\n'
            'print(*sorted(f"{f.name} {len(f.read_bytes())}" for f in files("hybridlab.data").iterdir() if f.is_file()), sep="\\n")')
    expected = sorted(f'{path.name} {path.stat().st_size}' for path in (source / 'data').iterdir() if path.is_file())
    assert printed(inside('-c', code)).splitlines() == expected


def test_library_reads_its_data(inside):
    code = ('from hybridlab.spec.model import list_models, load_model; from hybridlab.spec.cluster import list_clusters, load_cluster\n'
            'print(len([load_model(name) for name in list_models()]), len([load_cluster(name) for name in list_clusters()]))')
    models, clusters = map(int, printed(inside('-c', code)).split())
    assert models >= 30 and clusters >= 8


# ---- the command ---------------------------------------------------------------------------------------------------------

def test_runs_as_a_module_and_as_a_command(inside, command, settings):
    assert command('--version') == printed(inside('-m', 'hybridlab', '--version')) == f'hybridlab {settings["version"]}\n'


def test_plans(command):
    arguments = ['plan', '--model', 'llama2-7b', '--cluster', 'atlas-800t-a2', '--world', '16', '--limit', 'schedule=1f1b']
    assert re.search(r'^\d[\d,]* strategies in .* fit; refused: .*\ntp \d+ pp \d+ .*1f1b', command(*arguments))
    found = json.loads(command(*arguments, '--json', '--top', '3'))
    assert found


def test_validates(command):
    assert re.search(r'korthikanti-2022\s+fit .*\n\s+held ', command('validate', 'korthikanti-2022'))
    sets = json.loads(command('validate', '--json'))['sets']
    assert {'name', 'half', 'rows', 'mape', 'median', 'p90', 'signed'} == set(sets[0]) and {one['half'] for one in sets} == {'fit', 'held'}


def test_lists_benchmarks_and_names_the_remedy_for_missing_torch(inside, command, clean):
    assert {'allreduce', 'quantization', 'schedule'} <= set(command('bench').split())
    done = inside('-m', 'hybridlab', 'bench', 'quantization')
    assert done.returncode == 2 and "pip install 'hybridlab[torch]'" in done.stderr and 'Traceback' not in done.stderr


LAUNCH = '''\
export HCCL_CONNECT_TIMEOUT=1200
export HCCL_EXEC_TIMOUT=600
torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 3 --pipeline-model-parallel-size 2 \\
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 \\
    --micro-batch-size 1 --global-batch-size 128 --bf16
'''


@pytest.mark.skipif('doctor.diagnose' not in MODULES, reason='this version has no hybridlab doctor')
def test_doctor_reads_a_script(inside, tmp_path):
    (tmp_path / 'launch.sh').write_text(LAUNCH)
    done = inside('-m', 'hybridlab', 'doctor', tmp_path / 'launch.sh', '--json')
    assert done.returncode == 1, f'errors in the script, so exit code 1; got {done.returncode}:\n{done.stdout}\n{done.stderr}'
    found = json.loads(done.stdout)
    assert 'HCCL_EXEC_TIMEOUT' in json.dumps(found) and 'Traceback' not in done.stderr
