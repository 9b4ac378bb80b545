"""Notebooks in JupyterLab, driven through a real Chromium: run all cells, see no error, move a slider, see the picture change."""
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import pytest

from hybridlab.site import repair_index_link

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--no-proxy-server', '--no-first-run', '--disable-extensions', '--disable-sync',
         '--disable-background-networking', '--disable-component-update', '--disable-default-apps', '--disable-domain-reliability']
COLD_START_MS = 180_000 # a first start on a busy machine with two cores
TOKEN = 'hybridlab-browser-test'
pytestmark = pytest.mark.browser


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


@pytest.fixture(scope='module') # playwright allows one at a time
def browser(lab):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_notebook(browser, lab):
    "Opens a notebook of the copy and waits until its kernel is idle; shuts the kernel down afterwards."
    page = browser.new_page(viewport={'width': 1400, 'height': 1000})
    page.set_default_timeout(COLD_START_MS)

    def open_notebook(name):
        page.goto(f'{lab}/lab/tree/{name}?token={TOKEN}&reset')
        page.wait_for_selector('.jp-Notebook .jp-Cell')
        page.wait_for_selector('.jp-Toolbar-kernelName:has-text("Python 3")') # until then "idle" means only that no kernel is busy
        page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status=idle]')
        return page

    yield open_notebook
    page.evaluate('''async ([lab, token]) => {
        const headers = {Authorization: `token ${token}`};
        const sessions = await (await fetch(`${lab}/api/sessions`, {headers})).json();
        for (const session of sessions) await fetch(`${lab}/api/sessions/${session.id}`, {method: 'DELETE', headers});
    }''', [lab, TOKEN])
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


def outputs(page, mime):
    return page.locator(f'.jp-OutputArea-output[data-mime-type="{mime}"]').all_text_contents()


def changes(page, picture, before, handle, key):
    "Whether a key on a slider gives another picture; one small step may not show, a move to the end does."
    from playwright.sync_api import TimeoutError

    handle.focus()
    page.keyboard.press(key)
    try:
        page.wait_for_function('([image, before]) => image.src !== before', arg=[picture.element_handle(), before], timeout=10_000)
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize('name', ['index.ipynb', 'nbs/comm/00_chunking.ipynb', 'nbs/comm/01_quantization.ipynb'])
def test_runs_without_errors_and_its_sliders_move_the_picture(open_notebook, name):
    page = open_notebook(name)
    run_all(page)
    assert outputs(page, 'application/vnd.jupyter.error') == []
    assert outputs(page, 'application/vnd.jupyter.stderr') == []

    picture = page.locator('.widget-image').last
    picture.scroll_into_view_if_needed()
    panel = page.locator('.jp-OutputArea-output', has=picture).last
    before = picture.get_attribute('src')
    assert any(changes(page, picture, before, handle, key) for handle in panel.locator('.noUi-handle').all() for key in ('ArrowRight', 'End', 'Home')), \
        'no slider changes the picture'
    assert outputs(page, 'application/vnd.jupyter.error') == []
