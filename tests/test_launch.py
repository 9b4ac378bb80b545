"""Real ranks: results, failures, hangs and clean-up, also from scripts and when the parent is killed."""
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from hybridlab.core.launch import RankError, RankTimeout, run


def family() -> set[psutil.Process]:
    "Our living descendants, without the fork server and its tracker, which stay until we end."
    children = {child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}
    servers = {child for child in children if child.cmdline() and child.cmdline()[-1].startswith(('from multiprocessing.forkserver', 'from multiprocessing.resource_tracker'))
               and child.parent() == psutil.Process()}
    return children - servers


@pytest.fixture(autouse=True)
def nothing_left():
    before = family()
    yield
    assert family() <= before, 'a rank, or what it started, is still there'


def rank_and_sum(add):
    import torch
    import torch.distributed as dist

    x = torch.tensor([dist.get_rank() + add])
    dist.all_reduce(x)
    return dist.get_rank(), x.item()


@pytest.mark.parametrize('world_size', [1, 2, 5])
def test_values_come_back_by_rank(world_size):
    total = world_size * (world_size - 1) // 2 + world_size
    assert run(rank_and_sum, 1, world_size=world_size) == [(rank, total) for rank in range(world_size)]


def test_a_rank_may_return_long_before_the_others():
    def early():
        import torch
        import torch.distributed as dist

        group = dist.new_group([1, 2])
        if dist.get_rank() == 0:
            return 'early'
        time.sleep(0.5)
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        return x.item()

    assert run(early, world_size=3) == ['early', 2.0, 2.0]


def test_the_first_failure_arrives_with_rank_type_and_line():
    def fails():
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 2:
            raise LookupError('no shard for layer 7')
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError, match='rank 2 of 4 raised LookupError: no shard for layer 7') as caught:
        run(fails, world_size=4)
    assert caught.value.rank == 2 and isinstance(caught.value.__cause__, LookupError)
    assert "raise LookupError('no shard for layer 7')" in str(caught.value)


def test_an_exception_that_cannot_be_pickled_still_arrives():
    def fails():
        class Odd(Exception):
            def __reduce__(self):
                raise TypeError('no pickling')
        raise Odd('odd one')

    with pytest.raises(RankError, match='raised Odd: odd one'):
        run(fails, world_size=2)


def test_a_killed_rank_is_named():
    def dies():
        import torch.distributed as dist

        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankError, match='rank 1 of 3 was ended by SIGKILL'):
        run(dies, world_size=3)


def test_sys_exit_on_a_rank_is_an_error():
    with pytest.raises(RankError, match='raised SystemExit: 3'):
        run(lambda: sys.exit(3), world_size=2)


def test_a_hang_says_who_waits_and_who_is_missing():
    def hangs():
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            time.sleep(600)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        work.wait()

    with pytest.raises(RankTimeout, match='missing: rank 1 at .*time.sleep') as caught:
        run(hangs, world_size=3, timeout_s=2)
    assert (caught.value.waiting, caught.value.missing) == ((0, 2), (1,))


def test_different_collectives_are_shown_side_by_side():
    def differs():
        import torch
        import torch.distributed as dist

        if dist.get_rank():
            dist.barrier()
        else:
            dist.broadcast(torch.ones(1), src=1)
        dist.barrier()

    with pytest.raises(RankTimeout, match='same order') as caught:
        run(differs, world_size=2, timeout_s=2)
    assert 'rank 0 in b' in str(caught.value) and 'rank 1 in b' in str(caught.value)


def test_children_of_a_rank_end_with_it():
    def spawns():
        subprocess.Popen(['sleep', '987654'])
        time.sleep(600)

    with pytest.raises(RankTimeout):
        run(spawns, world_size=2, timeout_s=1)
    assert not [p for p in psutil.process_iter(['cmdline']) if p.info['cmdline'] == ['sleep', '987654']]


def test_printed_lines_carry_their_rank(capsys):
    run(lambda: print('hello'), world_size=2)
    assert sorted(capsys.readouterr().out.split('\n')[:2]) == ['[0] hello', '[1] hello']


def test_environment_reaches_the_ranks_and_only_them(monkeypatch):
    monkeypatch.setenv('FROM_PARENT', 'p')
    read = lambda: (os.environ['FROM_PARENT'], os.environ['ONLY_RANKS'], os.environ['WORLD_SIZE'])
    assert run(read, world_size=2, env={'ONLY_RANKS': 'r'}) == [('p', 'r', '2')] * 2
    assert 'ONLY_RANKS' not in os.environ


SCRIPT = textwrap.dedent('''
    import time
    from hybridlab.core.launch import run
    def work():
        import torch.distributed as dist
        print('started', flush=True)
        time.sleep(600)
    run(work, world_size=2, timeout_s=600, backend='gloo')
''')


@pytest.mark.parametrize('how', [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_a_stopped_script_leaves_no_process(tmp_path, how):
    "The script has no __main__ guard: its functions travel by value, so it needs none."
    (tmp_path / 'script.py').write_text(SCRIPT)
    parent = psutil.Popen([sys.executable, 'script.py'], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert 'started' in parent.stdout.readline()
    family = parent.children(recursive=True)
    parent.send_signal(how)
    _, stderr = parent.communicate(timeout=60)
    gone, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    if how == signal.SIGINT:
        assert stderr.rstrip().endswith('KeyboardInterrupt')
