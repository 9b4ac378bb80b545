"""What several test files share: a clean copy of the checkout, the documentation site, a Chromium. No test writes into the checkout itself."""
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--no-proxy-server', '--no-first-run', '--disable-extensions', '--disable-sync',
         '--disable-background-networking', '--disable-component-update', '--disable-default-apps', '--disable-domain-reliability']

signal.signal(signal.SIGINT, signal.default_int_handler) # a shell starts background jobs with it ignored, which all children would inherit


def checkout_files():
    "Paths of all files that are committed or could be (untracked and not ignored), relative to the root."
    listing = subprocess.run(['git', '-c', 'safe.directory=*', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'],
                             cwd=ROOT, capture_output=True, text=True)
    assert listing.returncode == 0, f'These tests need a git checkout: {listing.stderr.strip()}'
    names = sorted(set(filter(None, listing.stdout.split('\0'))))
    return [name for name in names if (ROOT / name).is_symlink() or (ROOT / name).is_file()]


@pytest.fixture(scope='session')
def copy_checkout():
    "Function that copies the checkout, links kept as links, into a new folder."
    def copy(folder):
        for name in checkout_files():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        return folder
    return copy


@pytest.fixture
def repo_copy(copy_checkout, tmp_path):
    "Copy of the checkout for one test to change as it likes."
    return copy_checkout(tmp_path / 'repo')


@pytest.fixture(scope='session')
def docs(tmp_path_factory):
    "Folder of the documentation site, built once for all files."
    from hybridlab.site import build_docs

    return build_docs(ROOT, tmp_path_factory.mktemp('docs') / 'site')


@pytest.fixture(scope='module') # playwright allows one at a time, and its event loop would stop those of other files
def browser():
    "A Chromium without a proxy or calls home."
    if CHROMIUM is None:
        pytest.skip('needs chromium on the PATH')
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()
