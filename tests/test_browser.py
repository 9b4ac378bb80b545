"""JupyterLab driven through a real Chromium: whole notebooks run without an error, and every widget of the library answers to its first control."""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import nbformat
import pytest

from conftest import CHROMIUM, ROOT
from hybridlab.pages import directives, explorer
from hybridlab.site import list_notebooks, repair_index_link

COLD_START_MS = 180_000 # a first start on a busy machine with two cores
TOKEN = 'hybridlab-browser-test'
pytestmark = pytest.mark.browser


def list_widgets():
    "(module, name) of every `explore_…()` that a notebook shows by itself, in reading order."
    defined, shown = {}, []
    for path in list_notebooks(ROOT):
        own, default = {}, ''
        for cell in json.loads(path.read_text('utf-8'))['cells']:
            words, name = directives(cell), explorer(cell)
            default = words.get('default_exp', default)
            if 'export' in words:
                own |= dict.fromkeys(re.findall(r'(?m)^def (explore_\w+)', ''.join(cell['source'])), f'hybridlab.{words["export"] or default}')
            shown += [(own, name)] if name else []
        defined |= own
    return list(dict.fromkeys(((defined | own)[name], name) for own, name in shown))


WIDGETS = list_widgets()
DOCTOR = 'hybridlab.doctor.diagnose', 'explore_doctor' # a file upload


@pytest.fixture(scope='session')
def checkout(copy_checkout, tmp_path_factory):
    "A fresh copy of the checkout, so that JupyterLab saves nothing into this one."
    copy = copy_checkout(tmp_path_factory.mktemp('lab') / 'hybridlab')
    repair_index_link(copy)
    return copy


@pytest.fixture(scope='session')
def lab(checkout, tmp_path_factory):
    "Address of a JupyterLab over the copy, with settings of its own; ended with all its kernels."
    if CHROMIUM is None:
        pytest.skip('needs chromium on the PATH')
    home = tmp_path_factory.mktemp('jupyter')
    for name, values in (('notebook-extension/tracker', {'windowingMode': 'none'}), # all cells in the page, also those off the screen
                         ('apputils-extension/notification', {'fetchNews': 'false', 'checkForUpdates': False})):
        path = home / 'settings' / '@jupyterlab' / f'{name}.jupyterlab-settings'
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'IPYTHONDIR': str(home / 'ipython'),
           **{f'JUPYTER_{kind}_DIR': str(home / kind.lower()) for kind in ('CONFIG', 'DATA', 'RUNTIME')},
           'JUPYTERLAB_SETTINGS_DIR': str(home / 'settings'), 'JUPYTERLAB_WORKSPACES_DIR': str(home / 'workspaces')}
    log = (home / 'lab.log').open('w')
    process = subprocess.Popen(
        [sys.executable, '-m', 'jupyterlab', '--no-browser', '--allow-root', '--ip=127.0.0.1', f'--port={port}', '--ServerApp.port_retries=0',
         f'--IdentityProvider.token={TOKEN}', f'--ServerApp.root_dir={checkout}'],
        cwd=checkout, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for(f'http://127.0.0.1:{port}/api?token={TOKEN}', process, home / 'lab.log')
        yield f'http://127.0.0.1:{port}'
    finally:
        end(process)
        log.close()


def wait_for(address, process, log):
    "Returns when the server answers; fails with its log when it has ended."
    deadline, opener = time.monotonic() + COLD_START_MS / 1000, build_opener(ProxyHandler({}))
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            return opener.open(address, timeout=5)
        except (URLError, TimeoutError):
            time.sleep(0.3)
    pytest.fail(f'JupyterLab did not answer within {COLD_START_MS / 1000:.0f} s:\n{log.read_text()}')


def end(process):
    "Asks the server to shut its kernels down and waits; then ends whatever is left of its process group."
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait(timeout=30)


@contextmanager
def opened(browser, lab, name):
    "The page of a notebook of the copy, its kernel idle; afterwards the kernel is shut down."
    page = browser.new_page(viewport={'width': 1400, 'height': 1000})
    page.set_default_timeout(COLD_START_MS)
    page.goto(f'{lab}/lab/tree/{name}?token={TOKEN}&reset')
    try:
        page.wait_for_selector('.jp-Notebook .jp-Cell')
        page.wait_for_selector('.jp-Toolbar-kernelName:has-text("Python 3")') # until then "idle" means only that no kernel is busy
        page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status=idle]')
        yield page
    finally:
        page.evaluate('''async ([lab, token, name]) => {
            const headers = {Authorization: `token ${token}`};
            const sessions = await (await fetch(`${lab}/api/sessions`, {headers})).json();
            for (const one of sessions) if (one.path === name) await fetch(`${lab}/api/sessions/${one.id}`, {method: 'DELETE', headers});
        }''', [lab, TOKEN, name])
        page.close()


def run_all(page):
    "Run > Run All Cells, then waits until every cell has its number and the kernel is idle."
    page.click('li.lm-MenuBar-item:has-text("Run")')
    page.click('li.lm-Menu-item[data-command="runmenu:run-all"]')
    page.wait_for_function('''() => {
        const prompts = [...document.querySelectorAll('.jp-Notebook .jp-CodeCell .jp-InputPrompt')].map(one => one.textContent);
        const idle = document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status === 'idle';
        return idle && prompts.length && prompts.every(text => !text.includes('*')) && prompts.some(text => /\\d/.test(text));
    }''')


def outputs(place, mime):
    return place.locator(f'.jp-OutputArea-output[data-mime-type="{mime}"]').all_text_contents()


# ---- a widget ------------------------------------------------------------------------------------------------------------

CONTROLS = '.noUi-handle, select, input[type=checkbox]'


def view(cell):
    "The bytes of the picture and the words around it, those of a refusal among them."
    return cell.evaluate('''async cell => {
        const image = cell.querySelector('.widget-image');
        const bytes = new Uint8Array(await (await fetch(image.src)).arrayBuffer());
        return [bytes.join(), [...cell.querySelectorAll('.widget-html-content')].map(one => one.textContent).join('\\n')];
    }''')


def moves(page, control):
    "Ways to give a control another value, one after the other; one small step may not show in the picture, a move to the end does."
    if control.evaluate('one => one.tagName') == 'SELECT':
        count, chosen = control.evaluate('one => [one.options.length, one.selectedIndex]')
        for index in range(count):
            if index != chosen:
                control.select_option(index=index)
                yield
    elif control.get_attribute('type') == 'checkbox':
        control.click()
        yield
    else:
        for key in ('ArrowRight', 'End', 'Home'):
            control.focus()
            page.keyboard.press(key)
            yield


def answers(page, cell, control, patience_s=10):
    "Whether some value of a control gives a picture of other bytes, or words."
    before = view(cell)
    for _ in moves(page, control):
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            page.wait_for_timeout(50)
            if view(cell) != before:
                return True
    return False


# ---- whole notebooks -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', ['index.ipynb', 'nbs/comm/00_chunking.ipynb', 'nbs/comm/01_quantization.ipynb'])
def test_runs_without_errors_and_its_sliders_move_the_picture(browser, lab, name):
    with opened(browser, lab, name) as page:
        run_all(page)
        assert outputs(page, 'application/vnd.jupyter.error') == []
        assert outputs(page, 'application/vnd.jupyter.stderr') == []

        cell = page.locator('.jp-CodeCell', has=page.locator('.widget-image')).last
        cell.locator('.widget-image').scroll_into_view_if_needed()
        assert any(answers(page, cell, control) for control in cell.locator(CONTROLS).all()), 'no control changes the picture'
        assert outputs(page, 'application/vnd.jupyter.error') == []


# ---- every widget, in one session ----------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def gallery(browser, lab, checkout):
    "Page of a notebook with one cell per widget, all of them run."
    cells = [nbformat.v4.new_code_cell(f'from {module} import {name}\n{name}()', metadata={'tags': ['raises-exception']}) # the cells below run all the same
             for module, name in [*WIDGETS, DOCTOR]]
    kernel = {'kernelspec': {'name': 'python3', 'display_name': 'Python 3 (ipykernel)', 'language': 'python'}} # or JupyterLab asks which
    nbformat.write(nbformat.v4.new_notebook(metadata=kernel, cells=cells), checkout / 'gallery.ipynb')
    with opened(browser, lab, 'gallery.ipynb') as page:
        run_all(page)
        yield page


@pytest.mark.parametrize('module, name', WIDGETS, ids=[f'{module.removeprefix("hybridlab.")}.{name}' for module, name in WIDGETS])
def test_every_widget_answers_to_its_first_control(gallery, module, name):
    cell = gallery.locator('.jp-CodeCell').nth(WIDGETS.index((module, name)))
    cell.scroll_into_view_if_needed()
    assert outputs(cell, 'application/vnd.jupyter.error') == [] and outputs(cell, 'application/vnd.jupyter.stderr') == []
    picture = cell.locator('.widget-image')
    assert picture.evaluate('one => one.complete && one.naturalWidth > 100')
    assert answers(gallery, cell, cell.locator(CONTROLS).first), 'the first control changes neither the picture nor the words'
    assert outputs(cell, 'application/vnd.jupyter.error') == []


def test_files_given_to_the_doctor_are_diagnosed(gallery):
    cell = gallery.locator('.jp-CodeCell').nth(len(WIDGETS))
    cell.scroll_into_view_if_needed()
    before = view(cell)
    with gallery.expect_file_chooser() as chooser:
        cell.locator('button.jupyter-button').click()
    chooser.value.set_files([{'name': 'launch.sh', 'mimeType': 'text/x-sh', 'buffer': b'export HCCL_EXEC_TIMOUT=600\n'},
                             {'name': 'rank table.json', 'mimeType': 'application/json', 'buffer': b'{"version": "1.0", "server_list": ['}])
    words = cell.locator('.widget-html-content', has_text='HCCL_EXEC_TIMEOUT')
    words.wait_for()
    assert 'cannot be read as JSON' in words.text_content()
    assert view(cell)[0] != before[0]
    assert outputs(cell, 'application/vnd.jupyter.error') == [] and outputs(cell, 'application/vnd.jupyter.stderr') == []
