"""The guides: 43 claims whose values and verdicts are computed when the page runs, and the case of 128 NPUs."""
import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

GUIDES = Path(__file__).resolve().parents[1] / 'nbs' / 'guides'
IDS = [f'{article}{number}' for article, last in (('A', 17), ('B', 26)) for number in range(1, last + 1)]


def cells(name, kind='code'):
    "The text of every cell of a kind."
    return [''.join(cell['source']) for cell in json.loads((GUIDES / name).read_text('utf-8'))['cells'] if cell['cell_type'] == kind]


RUN = """
import json, sys
cells, again = json.loads(sys.stdin.read())
page = {'__name__': '__main__'}
for cell in cells:
    exec(cell, page)
rows, verdicts = [row[:6] for row in page['CLAIMS']], {}
for name, (setting, cell) in again.items(): # the same function, other circumstances
    exec(setting, page)
    page['CLAIMS'].clear()
    exec(cell, page)
    verdicts[name] = {row[0]: row[4] for row in page['CLAIMS']}[name]
sys.__stdout__.write('\\n' + json.dumps([rows, verdicts]))
"""

OTHER = { # claim: other circumstances, in which its verdict is another one
    'A17': "published.loc['pipelined', ['share', 'waiting [ms]']] = 0.25, 27",
    'B8': "from dataclasses import replace; server = replace(server, device=replace(server.device, alignment=dict(fp16=16, bf16=16)))",
    'B1': "from dataclasses import replace; model = replace(model, layers=640)",
}


def cell_of(claim):
    "The cell that adds a claim, without the table below it."
    cell = next(cell for cell in cells('claims.ipynb') if f"@claim('{claim}'" in cell)
    return re.sub(r"(?m)^now\(.*\)$", '', cell)


@pytest.fixture(scope='module')
def page():
    "The rows of the claims page after a run in a process of its own, and the verdicts under other circumstances."
    again = {claim: (setting, cell_of(claim)) for claim, setting in OTHER.items()}
    done = subprocess.run([sys.executable, '-c', RUN], input=json.dumps([cells('claims.ipynb'), again]), cwd=GUIDES, text=True,
                          capture_output=True, timeout=300, env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope='module')
def rows(page):
    return {row[0]: dict(zip(('says', 'ours', 'parts', 'verdict', 'page'), row[1:])) for row in page[0]}


# ---- the claims ----------------------------------------------------------------------------------------------------------

def test_every_claim_once(page):
    assert sorted(row[0] for row in page[0]) == sorted(IDS)


@pytest.mark.parametrize('claim', IDS)
def test_claim(claim, rows):
    row = rows[claim]
    assert re.fullmatch(r'holds|holds in this regime|wrong( in \d of \d parts)?|cannot be checked, needs .+', row['verdict']), row
    assert re.search(r'\d', row['ours']) and not re.search(r'\b(nan|inf)%', row['ours']), row
    assert (GUIDES.parent / f'{row["page"]}.ipynb').exists(), f'{claim} names {row["page"]}, which is not there'


def test_every_page_is_linked(rows):
    prose = '\n'.join(cells('claims.ipynb', 'markdown'))
    linked = {os.path.normpath(f'guides/{address}') for address in re.findall(r'\]\(([^)#]+)\.ipynb\)', prose)}
    missing = {row['page'] for row in rows.values()} - linked
    assert not missing, f'no link to {sorted(missing)} on the claims page'


def claim_functions():
    "(id, function) of every claim, as syntax."
    for cell in cells('claims.ipynb'):
        for node in ast.parse(cell).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                yield node.decorator_list[0].args[0].value, node


FUNCTIONS = dict(claim_functions())


@pytest.mark.parametrize('claim', IDS)
def test_nothing_is_typed_in(claim):
    "The value holds computed text, and no part of the verdict is a constant but None."
    [answer] = [node for node in ast.walk(FUNCTIONS[claim]) if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)]
    value, parts = answer.value.elts
    assert any(isinstance(node, (ast.FormattedValue, ast.GeneratorExp)) for node in ast.walk(value))
    if isinstance(parts, ast.Dict):
        assert not [part for part in parts.values if isinstance(part, ast.Constant) and part.value is not None]


def test_verdicts_follow_the_settings(page, rows):
    changed = page[1]
    assert (rows['A17']['verdict'], changed['A17']) == ('wrong', 'holds') # a published share of 25 % would be 3 : 1
    assert (rows['B8']['verdict'], changed['B8']) == ('holds in this regime', 'holds') # a card with 16-bit types only
    assert (rows['B1']['verdict'], changed['B1']) == ('wrong', 'holds') # ten times the layers do weigh 2 TB


@pytest.mark.parametrize('claim, starts', [
    ('A1', 'wrong'), ('A2', 'cannot be checked'), ('A3', 'wrong'), ('A6', 'holds in this regime'), ('A7', 'wrong in 1'), ('A11', 'cannot be checked'), ('A12', 'holds'),
    ('B1', 'wrong'), ('B4', 'holds in this regime'), ('B6', 'holds'), ('B9', 'holds in this regime'), ('B11', 'holds'), ('B13', 'holds in this regime'),
    ('B14', 'wrong in 1'), ('B16', 'wrong'), ('B18', 'holds'), ('B21', 'wrong in 2'), ('B22', 'wrong'), ('B25', 'wrong')])
def test_verdict(claim, starts, rows):
    assert rows[claim]['verdict'].startswith(starts), rows[claim]


@pytest.mark.parametrize('claim, texts', [
    ('A11', ['89.7', '88.6', '62.3', '19.4', '3.2x']), ('A2', ['47%', '53%']), ('A6', ['1.17x']), ('A17', ['25%', '4.6 : 1']), ('B9', ['15.79%', 'm = 28']), ('B11', ['8.2%']),
    ('B14', ['pp: 16 groups of 4', 'dp: 32 groups of 2']), ('B16', ['1836']), ('B21', ['17.95%', '82.05%', 'ETP 2 or 1'])])
def test_known_numbers(claim, texts, rows):
    "Numbers of the articles' own tables, or worked out by hand."
    assert not [text for text in texts if text not in rows[claim]['ours']], rows[claim]['ours']


# ---- how a verdict is made -----------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def judge():
    import numpy as np

    [cell] = [cell for cell in cells('claims.ipynb') if 'def judge(' in cell]
    names = {'np': np}
    exec(cell, names)
    return names['judge']


@pytest.mark.parametrize('parts, verdict', [
    ({'a': True}, 'holds'), ({'a': False}, 'wrong'), ({'a': [True, True]}, 'holds'), ({'a': [True, False]}, 'holds in this regime'), ({'a': [False, False]}, 'wrong'),
    ({'a': True, 'b': False}, 'wrong in 1 of 2 parts'), ({'a': [True, False], 'b': False}, 'wrong in 1 of 2 parts'), ({'a': True, 'a profile': None}, 'cannot be checked, needs a profile'),
    ({'a': False, 'a profile': None}, 'wrong')])
def test_judge(judge, parts, verdict):
    assert judge(parts) == verdict


# ---- the case of 128 NPUs ------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def case():
    from hybridlab.plan.search import ORDERS, search
    from hybridlab.spec.cluster import load_cluster, with_cards
    from hybridlab.spec.layout import TrainSpec
    from hybridlab.spec.model import load_model

    model, cluster, train = load_model('article-moe-128'), with_cards(load_cluster('atlas-800t-a2'), 128), TrainSpec(4096, 64)
    limits = {'zero': [1], 'order': ORDERS[:1], 'micro_batch': [1, 2], 'recompute': ['none']}
    return model, cluster, train, search(model, cluster, 128, train, limits=limits, exact=16)


def case_layout(**axes):
    from hybridlab.spec.layout import Layout

    return Layout(128, **{'tp': 8, 'pp': 8, 'dp': 2} | axes)


def test_better_plans_beat_the_article(case):
    from hybridlab.plan.search import make_plan

    model, cluster, train, plans = case
    article = make_plan(model, cluster, case_layout(ep=4, etp=2), train)
    same_grid = make_plan(model, cluster, case_layout(ep=8, etp=1, vpp=2), replace(train, schedule='zb-v', micro_batch=2))
    assert article.step.total / plans.best.step.total > 1.5 and article.step.total / same_grid.step.total > 1.4
    assert plans.best.memory.fits and same_grid.memory.fits


def test_reason_is_experts_and_bubble(case):
    from hybridlab.plan.search import make_plan

    model, cluster, train, plans = case
    slow, fast = make_plan(model, cluster, case_layout(ep=4, etp=2), train).step, plans.best.step
    saved = {part: slow.parts[part] - fast.parts[part] for part in slow.parts}
    assert {'ep', 'bubble'} == set(sorted(saved, key=saved.get)[-2:]) and saved['ep'] + saved['bubble'] > 0.5 * (slow.total - fast.total)


@pytest.mark.parametrize('ep, etp, code', [(4, 8, 'layout.expert_grid'), (16, 1, 'layout.experts')])
def test_refused_readings(case, ep, etp, code):
    from hybridlab.spec.layout import check

    model, cluster, train, _ = case
    assert code in [finding.code for finding in check(model, cluster, case_layout(ep=ep, etp=etp), train) if finding.severity == 'error']


@pytest.mark.parametrize('ep, etp, servers', [(4, 4, 2), (4, 2, 1), (4, 1, 1), (8, 1, 1), (2, 8, 2)])
def test_where_experts_stand(case, ep, etp, servers):
    from hybridlab.spec.layout import placement

    assert placement(case_layout(ep=ep, etp=etp), case[1]).set_index('axis').servers['ep'] == servers


def test_utilization_of_1f1b_is_bounded(case):
    "However fast the links: the idle share of 1F1B with 8 stages and 32 micro-batches stays."
    from hybridlab.plan.cost import estimate_step

    model, cluster, train, _ = case
    quick = replace(cluster, links=tuple(replace(link, bytes_per_s=1e15, pair_bytes_per_s=1e15 * (link.pair_bytes_per_s > 0), alpha=0.0) for link in cluster.links))
    step = estimate_step(model, quick, case_layout(ep=4, etp=2), train)
    assert 1 - step.parts['bubble'] / step.total < 0.88 # stages are uneven: embedding and head are on two of them
    work = step.parts['bubble'] / (step.parts['bubble'] + train.microbatches(2) * sum(step.stage_seconds) / 8)
    assert work == pytest.approx(7 / 39, abs=0.01)
