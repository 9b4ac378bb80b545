"""What the exported library imports, in which direction, and that every public name is explained. Read from the source where possible."""
import ast
import builtins
import dis
import importlib
import io
import json
import re
import subprocess
import sys
import tokenize
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = ['core', 'spec', 'comm', 'pipeline', 'moe', 'plan', 'doctor', 'bench', 'bench_allreduce', 'bench_moe', 'bench_network', 'bench_paths', 'bench_plan', 'bench_schedule', 'sliders', 'pages', 'site', 'cli', '__main__']
TORCH_FREE = ['core.*', 'spec.*', 'comm.chunking', 'pipeline.bubble', 'pipeline.schedule', 'pipeline.balance', 'moe.routing', 'moe.dispatch', 'plan.*', 'doctor.*', 'cli']
DEV_ONLY = ['nbdev', 'fastcore', 'execnb', 'ghapi']  # in the dev extra: nothing that is installed may need them to import
DEVICE_MODULE = 'core.device'


def module_name(path):
    "Dotted name without the leading package, e.g. 'core.findings'; '' for the package itself."
    parts = path.relative_to(ROOT / 'hybridlab').with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


FILES = {module_name(path): path for path in sorted((ROOT / 'hybridlab').rglob('*.py')) if path.name != '_modidx.py'}
MODULES = [name for name, path in FILES.items() if path.name != '__init__.py']
each_module = pytest.mark.parametrize('module', MODULES)


def syntax(module):
    return ast.parse(FILES[module].read_text(encoding='utf-8'))


# ---- direction -----------------------------------------------------------------------------------------------------------

def place(module):
    "Where a module stands: its package, then the number of its notebook (01 < 01a < 02), which the exported file names."
    header = re.search(r'File to edit: \S*?(\d+[a-z]*)_\w+\.ipynb', FILES[module].read_text(encoding='utf-8'))
    return ORDER.index(module.split('.')[0]), header[1] if header else ''


def absolute(node, module):
    "Full dotted name behind a from-import, which nbdev writes in relative form."
    package = ['hybridlab', *filter(None, module.split('.'))]
    if FILES[module].name != '__init__.py':
        package.pop()
    base = package[:len(package) - node.level + 1] if node.level else []
    return '.'.join(base + (node.module or '').split('.')).strip('.')


def own_imports(module):
    "Line and name of every module of ours that a module imports, wherever in the file."
    for node in ast.walk(syntax(module)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module)
            names = [f'{base}.{alias.name}' if f'{base}.{alias.name}'.removeprefix('hybridlab.') in FILES else base for alias in node.names]
        for name in names:
            ours = name.removeprefix('hybridlab.')
            if name.startswith('hybridlab.') and ours.split('.')[0] not in ('data', '_modidx'):
                yield node.lineno, ours


@each_module
def test_imports_run_one_way(module):
    assert module.split('.')[0] in ORDER, f'{module}: unknown package; give it a place in DESIGN and in ORDER of this test'
    unknown = [f'line {line}: {target}' for line, target in own_imports(module) if target not in FILES]
    assert not unknown, f'{module} imports what is not there: {unknown}'
    back = [f'{module} -> {target} (line {line})' for line, target in own_imports(module)
            if target != module and place(target) >= place(module)]
    assert not back, f'Arrows that run back: {back}. The order is {", ".join(ORDER)}, then the notebook number; move what is shared to the earlier one.'


# ---- names ---------------------------------------------------------------------------------------------------------------

def globals_used(code):
    "Names that a compiled module reads from its own globals, in its functions and classes too."
    inner = [one for one in code.co_consts if hasattr(one, 'co_code')]
    return {one.argval for one in dis.get_instructions(code) if one.opname == 'LOAD_GLOBAL'}.union(*map(globals_used, inner))


@each_module
def test_every_name_is_there(module):
    "A cell may use what only a cell that is not exported imports: the notebook runs, the library does not."
    used = globals_used(compile(FILES[module].read_text(encoding='utf-8'), module, 'exec'))
    missing = sorted(name for name in used - {*vars(importlib.import_module(f'hybridlab.{module}'))} if not hasattr(builtins, name))
    assert not missing, f'{module} uses {missing}; import it in a cell with #| export'


# ---- what importing does -------------------------------------------------------------------------------------------------

def python(code, *arguments, cwd):
    done = subprocess.run([sys.executable, '-c', code, *arguments], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_is_light_and_leaves_the_environment(tmp_path):
    code = ('import json, os, sys; env, had = dict(os.environ), set(sys.modules); import hybridlab\n'
            'print(json.dumps([sorted(set(sys.modules) - had), dict(os.environ) == env]))')
    loaded, same = python(code, cwd=tmp_path)
    heavy = sorted({name.split('.')[0] for name in loaded} & {'torch', 'matplotlib', 'numba'})
    assert not heavy, f'import hybridlab loads {heavy}; import them inside the functions that need them'
    assert same, 'import hybridlab changes os.environ; do that in the function that needs it'


BLOCKED = """
import importlib, json, os, sys, traceback
blocked, modules = map(json.loads, sys.argv[1:])

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in blocked:
            raise ModuleNotFoundError(f'No module named {name!r} (blocked by this test)', name=name)

sys.meta_path.insert(0, Blocker())
trouble = {}
for module in modules:
    env = dict(os.environ)
    try: importlib.import_module(f'hybridlab.{module}')
    except BaseException: trouble[module] = traceback.format_exc(limit=-3)
    else:
        if env != dict(os.environ): trouble[module] = 'importing it changes os.environ'
print(json.dumps(trouble))
"""


@pytest.fixture(scope='module')
def import_trouble(tmp_path_factory):
    "What goes wrong when torch and the notebook tools are not there, by module; one process for all of them."
    return python(BLOCKED, json.dumps(['torch', 'torch_npu', *DEV_ONLY]), json.dumps(TORCH_FREE_MODULES), cwd=tmp_path_factory.mktemp('elsewhere'))


TORCH_FREE_MODULES = [module for module in MODULES if any(fnmatch(module, pattern) for pattern in TORCH_FREE)]


@pytest.mark.parametrize('module', TORCH_FREE_MODULES)
def test_imports_without_torch(module, import_trouble):
    assert module not in import_trouble, f'{module} must import without torch and {", ".join(DEV_ONLY)}:\n{import_trouble[module]}'


# ---- explained -----------------------------------------------------------------------------------------------------------

def public_names(tree):
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == '__all__' for target in node.targets):
            return set(ast.literal_eval(node.value))
    return set()


def comments(source):
    return {token.start[0]: token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT}


def without_comment(places, remarks):
    "Names with no comment on their line or just above, read as fastcore's docments do: of several on a line, the last has it."
    lines, missing = [line for _, line in places], []
    for index, (name, line) in enumerate(places):
        last = index + 1 == len(places) or lines[index + 1] != line
        above = line not in remarks and line - 1 in remarks and line - 1 not in lines
        if not (last and (line in remarks or above)):
            missing.append(name)
    return missing


def arguments(function):
    a = function.args
    every = [*a.posonlyargs, *a.args, *filter(None, [a.vararg]), *a.kwonlyargs, *filter(None, [a.kwarg])]
    return [(arg.arg, arg.lineno) for arg in every if arg.arg not in ('self', 'cls')]


def is_overload(function):
    return any(ast.unparse(decorator).endswith('overload') for decorator in function.decorator_list)


def unexplained(source):
    "Public names without docstring, and arguments and fields without comment, as 'name' or 'name: argument'."
    tree, remarks = ast.parse(source), comments(source)
    functions, missing = (ast.FunctionDef, ast.AsyncFunctionDef), []
    for node in tree.body:
        if not isinstance(node, (*functions, ast.ClassDef)) or node.name not in public_names(tree):
            continue
        if isinstance(node, functions) and is_overload(node):
            continue
        if not ast.get_docstring(node):
            missing.append(f'{node.name} (no docstring)')
        members = [(node.name, node)] if isinstance(node, functions) else [
            (f'{node.name}.{item.name}', item) for item in node.body if isinstance(item, functions) and not is_overload(item)
            and (not item.name.startswith('_') or item.name in ('__init__', '__call__'))]
        for name, function in members:
            missing += [f'{name}: {argument}' for argument in without_comment(arguments(function), remarks)]
        if isinstance(node, ast.ClassDef):
            fields = [(item.target.id, item.lineno) for item in node.body if isinstance(item, ast.AnnAssign)]
            missing += [f'{node.name}: {field}' for field in without_comment(fields, remarks) if not field.startswith('_')]
    return missing


@each_module
def test_public_names_are_explained(module):
    missing = [f'{module}.{entry}' for entry in unexplained(FILES[module].read_text(encoding='utf-8'))]
    assert not missing, 'A docstring for each public name, and each argument on a line of its own with a comment (unit, shape, range). Missing:\n' + '\n'.join(missing)


def test_explained_rule():
    source = '''
__all__ = ['f', 'C']
def f(a, b, # only b has it
      # above
      c, *rest, # only rest
      d): "x"
def g(hidden): pass
class C:
    x: int # field
    y: int
    def m(self, z): pass
    def _n(self, w): pass
'''
    assert unexplained(source) == ['f: a', 'f: c', 'f: d', 'C (no docstring)', 'C.m: z', 'C: y']


# ---- device choice -------------------------------------------------------------------------------------------------------

@each_module
def test_only_the_device_module_names_a_vendor(module):
    if module == DEVICE_MODULE:
        return
    nodes = list(ast.walk(syntax(module)))
    found = [f'line {node.lineno}: .cuda()' for node in nodes
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == 'cuda']
    found += [f'line {node.lineno}: {node.value!r}' for node in nodes
              if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r'(\S*[:,])?nccl', node.value)]
    assert not found, f'{module} picks a device or backend itself; ask core.device (pick_device) instead: {found}'
