"""The documentation site: built once from the checkout, checked page by page, and walked through in a browser."""
import re
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from hybridlab import pages, site

ROOT = site.find_checkout()


def addresses():
    return [pages.page_address(path, ROOT) for path in site.list_notebooks(ROOT)]


# --- without a browser

def test_nothing_is_wrong_with_the_site(docs):
    assert site.check_site(docs) == []


def test_pages_are_english_and_carry_their_titles(docs):
    for path, page in zip(site.list_notebooks(ROOT), addresses()):
        text = (docs / page).read_text('utf-8')
        title = re.search(r'"# ([^"\\]+)', path.read_text('utf-8'))[1]
        assert '<html' in text and 'lang="en"' in text[:500]
        assert f'class="title">{title}</h1>' in text, page


def test_sidebar_holds_every_page_in_reading_order(docs):
    text = (docs / 'core' / 'findings.html').read_text('utf-8')
    links = re.findall(r'<a[^>]*href="([^"]+)"[^>]*class="sidebar-item-text', text)
    assert [link.removeprefix('../') if link.startswith('../') else f'core/{link}' for link in links] == addresses()


def test_names_in_backticks_and_signatures_are_there(docs):
    text = (docs / 'core' / 'findings.html').read_text('utf-8')
    assert re.search(r'href="(findings.html)?#finding"><code>Finding</code>', text)
    assert 'id="severity"' in text and '<code>findings</code>' in text and 'class="api-source"' in text


def test_hidden_cells_and_imports_stay_out(docs):
    for page in addresses():
        assert '#| ' not in re.sub(r'(?s)<pre.*?</pre>|<code.*?</code>', '', (docs / page).read_text('utf-8'))


HARMS = [ # what is done to a page, code of the finding, its words; every harm has a page of its own
    (lambda page: page.unlink(), 'site.page', 'missing'),
    (lambda page: add(page, '<a href="../nowhere.html">x</a>'), 'site.link', 'nowhere.html leads to no file'),
    (lambda page: add(page, '<a href="#nowhere">x</a>'), 'site.link', '#nowhere leads to no anchor'),
    (lambda page: add(page, '<img src="nowhere.png">'), 'site.link', 'nowhere.png leads to no file'),
    (lambda page: add(page, '<p style="background: url(//example.org/x.png)">'), 'site.load', '//example.org/x.png'),
    (lambda page: add(page, '<script>import("https://example.org/x.js")</script>'), 'site.load', 'https://example.org/x.js'),
    (lambda page: add(page, '<p>\\(x\\)</p>'), 'site.formula', '\\('),
    (lambda page: add(page, f'<!--{"x" * site.MOST_BYTES}-->'), 'site.size', 'exceed 1.5 MB'),
]


def add(page, text):
    page.write_text(page.read_text('utf-8').replace('</main>', f'{text}</main>'), 'utf-8')


def test_every_kind_of_damage_is_found(docs, tmp_path):
    copy = shutil.copytree(docs, tmp_path / 'site')
    harmed = dict(zip((address for address in addresses() if address.count('/') == 1 and address != 'core/findings.html'), HARMS))
    for address, (harm, *_) in harmed.items():
        harm(copy / address)
    page = copy / 'core' / 'findings.html'
    page.write_text(page.read_text('utf-8').replace('id="did_you_mean"', ''), 'utf-8')
    (copy / 'extra.css').write_text('@import "https://example.org/x.css";')
    found = site.check_site(copy)
    expected = [(address, code, words) for address, (_, code, words) in harmed.items()]
    for where, code, words in [*expected, ('core/findings.html', 'site.name', 'did_you_mean'), ('extra.css', 'site.load', 'https://example.org/x.css')]:
        assert any((one.where, one.code) == (where, code) and words in one.message for one in found), (where, code, words)
    assert len(harmed) == len(HARMS)


def test_a_link_to_another_site_and_a_price_are_no_damage(docs, tmp_path):
    copy = shutil.copytree(docs, tmp_path / 'site')
    page = copy / 'core' / 'findings.html'
    page.write_text(page.read_text().replace('</main>', '<a href="https://example.org/">x</a> $2 and $3 <code>$x$</code></main>'))
    assert site.check_site(copy) == []


def test_a_folder_with_other_files_is_not_overwritten(tmp_path):
    (tmp_path / 'thesis.txt').write_text('mine')
    with pytest.raises(ValueError, match='no site of ours'):
        site.build_docs(ROOT, tmp_path)
    assert (tmp_path / 'thesis.txt').read_text() == 'mine'


# --- in a browser

class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def visit(browser, docs):
    "Opens a page of the site; at the end of the test no request may have left the machine, and no page may have complained."
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Quiet, directory=str(docs)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here, outside, complaints = f'127.0.0.1:{server.server_port}', [], []
    page = browser.new_page(viewport={'width': 1280, 'height': 900})
    page.on('request', lambda request: urlsplit(request.url).scheme not in ('data', 'blob') and urlsplit(request.url).netloc != here and outside.append(request.url))
    page.on('console', lambda message: message.type == 'error' and complaints.append(message.text))
    page.on('pageerror', lambda error: complaints.append(str(error)))

    def visit(address):
        response = page.goto(f'http://{here}/{address}', wait_until='load')
        assert response.ok, address
        return page

    yield visit
    page.close()
    server.shutdown()
    server.server_close()
    assert outside == [] and complaints == []


@pytest.mark.browser
def test_no_page_needs_the_network(visit):
    for address in addresses():
        page = visit(address)
        assert page.locator('main h1').first.is_visible(), address
        assert page.locator('main math').evaluate_all('all => all.every(one => one.getBoundingClientRect().height > 0)'), address
        assert page.locator('main img').evaluate_all('all => all.every(one => one.naturalWidth > 0)'), address
        wide = page.evaluate('document.documentElement.scrollWidth - document.documentElement.clientWidth')
        assert wide <= 0, f'{address} scrolls sideways by {wide} px'


@pytest.mark.browser
def test_typing_in_the_search_box_gives_hits_that_can_be_read_and_followed(visit):
    page = visit('index.html')
    page.fill('.smalldocs-search input', 'raise_errors')
    hit = page.locator('.search-result').first
    hit.wait_for(timeout=10_000)
    light = page.locator('.search-result-text').first.evaluate('one => getComputedStyle(one).color.match(/\\d+/g).slice(0, 3).every(value => value > 150)')
    assert light, 'grey text on the dark bar'
    hit.click()
    page.wait_for_url('**/core/findings.html*')


def pictured(box):
    "The picture's address and the words of a refusal."
    return box.locator('img').get_attribute('src'), box.locator('.refused').text_content()


def stops(page, handle):
    "What the slider says at each of its stops, from the first to the last, by keys alone."
    handle.focus()
    page.keyboard.press('Home')
    for place in range(int(handle.get_attribute('max')) + 1):
        assert handle.input_value() == str(place)
        yield handle.locator('+ output').text_content()
        page.keyboard.press('ArrowRight')


@pytest.mark.browser
def test_both_sliders_of_every_widget_move_its_picture(visit, docs):
    seen = 0
    for address in addresses():
        if 'class="live-sliders"' not in (docs / address).read_text('utf-8'):
            continue
        page = visit(address)
        for number, box in enumerate(page.locator('.live-sliders').all()):
            place, seen = f'{address}, widget {number}', seen + 1
            handles = box.locator('input[type=range]').all()
            assert len(handles) == 2, place
            assert box.locator('img').evaluate('one => one.naturalWidth > 100'), place
            for handle in handles:
                start, first = handle.input_value(), pictured(box)
                views, labels = [], []
                for label in stops(page, handle):
                    labels.append(label)
                    views.append(pictured(box))
                    assert all(one.strip() for one in (label, views[-1][0])), place
                assert len(set(labels)) == len(labels), f'{place}: {labels}'
                assert len(set(views)) > 1, f'{place}: {handle.get_attribute("aria-label")} changes nothing'
                handle.fill(start)
                assert pictured(box) == first, f'{place}: the picture does not come back'
    assert seen
