"""The house around the library: pins, packaging, make targets, papers."""
import os
import re
import shutil
import subprocess
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ['setup', 'lab', 'test', 'docs', 'nbs']
parser = ConfigParser(delimiters='=')
parser.read(ROOT / 'settings.ini', encoding='utf-8')
SETTINGS = parser['DEFAULT']
EXTRAS = {key.removesuffix('_requirements'): SETTINGS[key].split() for key in SETTINGS if key.endswith('_requirements')}


def text(name):
    path = ROOT / name
    assert path.is_file(), f'{name} is missing'
    return path.read_text(encoding='utf-8')


def make(target):
    "Commands a target would run; nothing is run."
    if not shutil.which('make'):
        pytest.skip('make is not installed')
    done = subprocess.run(['make', '-n', '--no-print-directory', target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f'make {target}: {done.stderr.strip()}'
    return done.stdout.splitlines()


# ---- settings and packaging ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize('pin', ['nbdev>=2.4.14,<3', 'fastcore<2', 'execnb<0.2', 'ghapi<2'])
def test_notebook_tools_are_pinned_in_dev_only(pin):
    assert pin in EXTRAS['dev'], f'dev_requirements in settings.ini must hold {pin}: nbdev 3 has no settings.ini, and unpinned parts of nbdev 2 do not import'
    name = Requirement(pin).name
    elsewhere = [key for key, lines in {'requirements': SETTINGS['requirements'].split(), **EXTRAS}.items()
                 if key != 'dev' and name in {Requirement(line).name for line in lines}]
    assert not elsewhere, f'{name} belongs in dev_requirements only, not in {elsewhere}'


def test_pyproject_keeps_the_spelling_of_nbdev():
    lines = text('pyproject.toml').splitlines()
    for line in [f'name="{SETTINGS["lib_name"]}"', f'requires-python=">={SETTINGS["min_python"]}"']:
        assert line in lines, f'pyproject.toml must hold exactly {line}: nbdev_export writes it so'


def test_versions_agree():
    assert text('hybridlab/__init__.py').strip() == f'__version__ = "{SETTINGS["version"]}"', 'run nbdev_export'
    assert metadata.version('hybridlab') == SETTINGS['version'], 'the installed package is older than settings.ini: run make setup'


def test_installed_requirements_are_those_of_settings_ini():
    held = {str(Requirement(line)) for line in metadata.requires('hybridlab')}
    wanted = {str(Requirement(line)) for line in SETTINGS['requirements'].split()}
    wanted |= {str(Requirement(f'{line}; extra == "{extra}"')) for extra, lines in EXTRAS.items() for line in lines}
    assert held == wanted, f'run make setup; differing: {sorted(held ^ wanted)}'


def test_installed_entry_points():
    own = {(point.group, point.name): point.value for point in metadata.distribution('hybridlab').entry_points}
    assert own == {('console_scripts', 'hybridlab'): 'hybridlab.cli:main', ('nbdev', 'hybridlab'): 'hybridlab._modidx:d'}, 'run make setup'


@pytest.mark.parametrize('group', ['console_scripts', 'nbdev'])
def test_entry_point_loads(group):
    [point] = metadata.entry_points(group=group, name='hybridlab')
    assert point.load()


# ---- make ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('target', TARGETS)
def test_make_target_exists(target):
    make(target)


@pytest.mark.parametrize('target, command', [('lab', 'lab'), ('test', 'test'), ('docs', 'docs'), ('nbs', 'run')])
def test_make_target_ends_in_the_hybridlab_command(target, command):
    assert make(target)[-1].split('/')[-1] == f'hybridlab {command}'


@pytest.mark.parametrize('command', ['make lab', 'make test'])
def test_readme_shows(command):
    assert command in text('README.md'), f'README.md (made from index.ipynb) must show {command}'


@pytest.mark.parametrize('page', ['README.md', 'CONTRIBUTING.md'])
def test_page_names_only_existing_targets(page):
    code = '\n'.join(re.findall(r'```.*?```|`[^`\n]+`', text(page), re.DOTALL))
    for target in sorted(set(re.findall(r'\bmake ([a-z]+)', code))):
        make(target)


# ---- papers and CI -------------------------------------------------------------------------------------------------------

def test_licence():
    assert re.search(r'Apache License\s+Version 2\.0', text('LICENSE')) and SETTINGS['license'] == 'apache2'


def test_changelog_has_this_version():
    assert re.search(rf'^## \[?{re.escape(SETTINGS["version"])}\b', text('CHANGELOG.md'), re.MULTILINE), \
        f'CHANGELOG.md needs a section for {SETTINGS["version"]}'


def test_ci_script_is_executable():
    assert text('.ci/run').startswith('#!'), '.ci/run needs a first line such as #!/bin/sh'
    assert os.access(ROOT / '.ci' / 'run', os.X_OK), 'chmod +x .ci/run'


# ---- sidebar -------------------------------------------------------------------------------------------------------------

def leaves(node):
    "All strings in a YAML tree."
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    return {node} if isinstance(node, str) else set().union(*map(leaves, children))


def test_sidebar_lists_every_notebook():
    listed = {leaf for leaf in leaves(yaml.safe_load(text('nbs/sidebar.yml'))) if leaf.endswith('.ipynb')}
    there = {path.relative_to(ROOT / 'nbs').as_posix() for path in (ROOT / 'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in path.parts}
    assert listed == there, f'run hybridlab docs to write nbs/sidebar.yml; differing: {sorted(listed ^ there)}'
