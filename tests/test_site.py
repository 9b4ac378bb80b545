"""Contracts of hybridlab.site and hybridlab.pages: link repair, running notebooks, README, sidebar, reference entries."""
import json
import shutil
from functools import cached_property
from pathlib import Path

import pytest

from hybridlab import pages, site

ROOT = site.find_checkout()
WIDGET = 'application/vnd.jupyter.widget-view+json'


def notebook(*sources):
    "A notebook as text: a source that starts with # and a space is Markdown, any other is code."
    cells = [{'id': f'cell-{n}', 'cell_type': 'markdown' if source.startswith('# ') else 'code', 'metadata': {}, 'source': source}
             for n, source in enumerate(sources)]
    for cell in cells:
        cell |= {} if cell['cell_type'] == 'markdown' else {'outputs': [], 'execution_count': None}
    return json.dumps({'nbformat': 4, 'nbformat_minor': 5, 'metadata': {}, 'cells': cells})


def outputs(path, cell):
    return json.loads(path.read_text('utf-8'))['cells'][cell]['outputs']


@pytest.fixture
def toy(tmp_path):
    "A checkout of settings and a front page."
    (tmp_path / 'nbs').mkdir()
    shutil.copy(ROOT / 'settings.ini', tmp_path)
    (tmp_path / 'index.ipynb').write_text(notebook('# Toy\n\n> A front page.', '6 * 7'))
    (tmp_path / 'nbs' / 'index.ipynb').symlink_to('../index.ipynb')
    return tmp_path


# --- find_checkout

def test_checkout_is_found_from_any_folder_inside(toy):
    assert site.find_checkout(toy / 'nbs') == toy.resolve()


def test_checkout_is_found_from_the_editable_install(tmp_path):
    assert (site.find_checkout(tmp_path) / 'nbs').is_dir()


def test_no_checkout_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(site, 'files', lambda package: tmp_path)
    with pytest.raises(FileNotFoundError, match='not in the wheel: clone the repository'):
        site.find_checkout(tmp_path)


# --- repair_index_link

def test_a_good_link_is_left_alone(toy):
    assert site.repair_index_link(toy) is None


@pytest.mark.parametrize('text', ['../index.ipynb', None], ids=['text file', 'missing'])
def test_a_lost_link_is_made_again(toy, text):
    link = toy / 'nbs' / 'index.ipynb'
    link.unlink()
    if text:
        link.write_text(text)
    assert 'now links to' in site.repair_index_link(toy)
    assert link.is_symlink() and link.read_text() == (toy / 'index.ipynb').read_text()


def test_where_links_are_refused_the_copy_follows_the_front_page(toy, monkeypatch):
    def refuse(*args):
        raise OSError('symbolic link privilege not held')

    monkeypatch.setattr(Path, 'symlink_to', refuse)
    link = toy / 'nbs' / 'index.ipynb'
    link.unlink()
    assert 'copy' in site.repair_index_link(toy)
    assert not link.is_symlink() and site.repair_index_link(toy) is None
    shutil.os.utime(link, (1, 1))
    (toy / 'index.ipynb').write_text(notebook('# Toy', '1'))
    site.repair_index_link(toy)
    assert link.read_text() == (toy / 'index.ipynb').read_text()


def test_a_change_made_in_the_copy_is_not_lost(toy):
    link = toy / 'nbs' / 'index.ipynb'
    link.unlink()
    link.write_text(notebook('# Toy', '"an edit made in the wrong file"'))
    shutil.os.utime(toy / 'index.ipynb', (1, 1))
    with pytest.raises(ValueError, match='changed copy'):
        site.repair_index_link(toy)
    assert 'wrong file' in link.read_text()


# --- list_notebooks, write_sidebar

def test_every_notebook_of_the_project_is_listed_once():
    listed = site.list_notebooks(ROOT)
    present = [path for path in (ROOT / 'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in path.parts and path.name[0] not in '_.']
    assert sorted(listed) == sorted(present)


def test_reading_order(toy):
    for name in ('core/00_a', 'spec/00_b', 'comm/01_c', 'comm/00_d', 'cli', 'site', 'bench', 'guides/e', '_draft', 'core/.ipynb_checkpoints/00_a'):
        path = toy / 'nbs' / f'{name}.ipynb'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{}')
    names = [path.relative_to(toy / 'nbs').with_suffix('').as_posix() for path in site.list_notebooks(toy)]
    assert names == ['index', 'core/00_a', 'spec/00_b', 'comm/00_d', 'comm/01_c', 'bench', 'site', 'cli', 'guides/e']


def test_no_two_pages_share_an_address():
    addresses = [pages.page_address(path, ROOT) for path in site.list_notebooks(ROOT)]
    assert len(set(addresses)) == len(addresses)


def test_committed_sidebar_is_in_step(tmp_path):
    for path in site.list_notebooks(ROOT):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    assert site.write_sidebar(tmp_path).read_text() == (ROOT / 'nbs' / 'sidebar.yml').read_text(), 'run hybridlab.site.write_sidebar'


# --- run_notebooks

def test_front_page_runs_in_nbs_and_stays_where_it_is(toy):
    (toy / 'index.ipynb').write_text(notebook('# Toy', 'import os; os.path.basename(os.getcwd())', 'os.environ["OMP_NUM_THREADS"]'))
    site.run_notebooks(toy)
    assert (toy / 'nbs' / 'index.ipynb').is_symlink() and not (toy / 'index.ipynb').is_symlink()
    assert [outputs(toy / 'index.ipynb', n)[0]['data']['text/plain'] for n in (1, 2)] == [["'nbs'"], ["'1'"]]


def test_stored_outputs_are_clean_and_skipped_cells_keep_theirs(toy):
    path = toy / 'nbs' / 'widgets.ipynb'
    live = {WIDGET: {'model_id': 'x', 'version_major': 2, 'version_minor': 0}, 'image/png': 'iVBORw0KGgo=', 'text/plain': 'Live()'}
    nb = json.loads(notebook(
        '# Widgets', f'from IPython.display import display\ndisplay({live!r}, raw=True)', 'from tqdm.auto import tqdm\nlist(tqdm(range(3)))',
        'import ipywidgets\nipywidgets.IntSlider(3)', '#| npu\n1 / 0', '#| eval: false\n1 / 0', 'object()'))
    kept = [{'output_type': 'stream', 'name': 'stdout', 'text': ['from an NPU\n']}]
    nb['cells'][4]['outputs'] = kept
    path.write_text(json.dumps(nb))
    site.run_notebooks(toy, [path])
    assert outputs(path, 1) == [{'output_type': 'display_data', 'metadata': {'live': True}, 'data': {'image/png': 'iVBORw0KGgo='}}]
    assert [output['data'] for output in outputs(path, 2)] == [{'text/plain': ['[0, 1, 2]']}]
    assert [output['data'] for output in outputs(path, 3)] == [{'text/plain': ['IntSlider(value=3)']}]
    assert outputs(path, 4) == kept and outputs(path, 5) == []
    assert outputs(path, 6)[0]['data'] == {'text/plain': ['<object>']}
    stored = json.loads(path.read_text())
    assert 'widgets' not in stored['metadata'] and not any(cell.get('execution_count') for cell in stored['cells'])
    assert all(cell['metadata'] == {} for cell in stored['cells'])


def test_nbdev_clean_finds_nothing_left_to_do(toy, monkeypatch):
    from nbdev.clean import nbdev_clean

    site.run_notebooks(toy)
    before = (toy / 'index.ipynb').read_bytes()
    monkeypatch.chdir(toy)
    nbdev_clean.__wrapped__('nbs')
    assert (toy / 'index.ipynb').read_bytes() == before


def test_a_failing_cell_is_named_and_the_file_is_not_touched(toy):
    path = toy / 'nbs' / 'bad.ipynb'
    path.write_text(notebook('# Bad', '1', 'int("seven")'))
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match=r"bad\.ipynb, cell 3: ValueError: invalid literal for int\(\) with base 10: 'seven'$"):
        site.run_notebooks(toy, [path])
    assert path.read_bytes() == before and [item.name for item in (toy / 'nbs').glob('.*')] == []


def test_a_cell_that_takes_too_long_is_named(toy):
    path = toy / 'nbs' / 'slow.ipynb'
    path.write_text(notebook('import time; time.sleep(60)'))
    with pytest.raises(RuntimeError, match=r'slow\.ipynb, cell 1: CellTimeoutError'):
        site.run_notebooks(toy, [path], timeout_s=1)


def test_missing_packages_are_named_with_the_remedy(toy, monkeypatch):
    monkeypatch.setattr(pages, 'find_spec', lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"nbclient, nbdev not installed. Run: pip install 'hybridlab\[dev\]'"):
        site.run_notebooks(toy)


# --- export_readme

def test_readme_is_readable_and_the_same_every_time(toy):
    nb = json.loads(notebook('# Toy\n\n> A front page.', '#| hide\nsecret = 1', '#| eval: false\npicture()', 'table()'))
    nb['cells'][2]['outputs'] = [{'output_type': 'display_data', 'metadata': {}, 'data': {'image/png': 'iVBORw0KGgo=', WIDGET: {}, 'text/plain': 'Live()'}}]
    nb['cells'][3]['outputs'] = [{'output_type': 'execute_result', 'execution_count': None, 'metadata': {}, 'data': {
        'text/html': '<style scoped>b {}</style>\n<table></table>', 'text/plain': 'table'}}]
    (toy / 'index.ipynb').write_text(json.dumps(nb))
    (toy / 'docs_img').mkdir()
    (toy / 'docs_img' / 'index_9_9.png').write_bytes(b'of an older front page')
    text = site.export_readme(toy)
    assert text == (toy / 'README.md').read_text('utf-8') == site.export_readme(toy)
    assert '```python\npicture()\n```' in text and '<table>' in text
    assert not any(word in text for word in ('secret', '#|', '<style', 'Live()'))
    pictures = [path.relative_to(toy).as_posix() for path in (toy / 'docs_img').iterdir()]
    assert len(pictures) == 1 and f']({pictures[0]})' in text


# --- reference entries

class Sample:
    "A class with one of each."
    def __init__(self, size: int = 3): # [B] of a thing
        self.size = size

    def method(self, other: 'int | None' = None) -> 'int': # [s] a time
        "A method."

    @property
    def prop(self) -> float:
        "A property."

    @cached_property
    def cached(self) -> float:
        "A cached property."

    @classmethod
    def build(cls, name: str): # of a file
        "A class method."

    @staticmethod
    def loose(x=Path): # any
        "A static method."


@pytest.mark.parametrize('name, expected', [
    ('method', ['Sample.method(other=None) -> int', r'| <code>other</code> | `int \| None` | `None` |', '| **returns** | `int` |  | [s] a time |']),
    ('prop', ['Sample.prop -> float', 'A property.']),
    ('cached', ['Sample.cached -> float']),
    ('build', ['Sample.build(name)', '| <code>name</code> | `str` |  |']),
    ('loose', ['Sample.loose(x=']),
])
def test_entries_of_methods(name, expected):
    text = pages.api_entry(vars(Sample)[name], f'Sample.{name}').data
    assert all(part in text for part in expected), text
    assert 'self' not in text and 'cls' not in text


def test_entry_of_a_class():
    text = pages.api_entry(Sample).data
    assert text.startswith('### Sample\n') and 'Sample(size=3)' in text and '| <code>size</code> | `int` | `3` | [B] of a thing |' in text


def test_entry_of_compiled_and_wrapped_functions():
    from functools import lru_cache

    from numba import njit

    def twice(x: int): # a number
        "Twice x."
        return 2 * x

    for function in (twice, njit(twice), lru_cache(twice)):
        assert '`int`' in pages.api_entry(function, 'twice').data
