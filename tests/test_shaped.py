"""The emulated cluster: real rates and counters, and nothing left whatever ends it."""
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import cloudpickle
import pytest

from hybridlab.comm import shaped
from hybridlab.comm.shaped import ShapedCluster, can_shape, place, remove_stale, wire_bytes
from hybridlab.core.launch import RankError

cloudpickle.register_pickle_by_value(sys.modules[__name__]) # ranks need not import this file and pytest
reason = can_shape()
needs_links = pytest.mark.skipif(bool(reason), reason=f'no shaped links here: {reason}')


def namespaces(pid=None):
    "Names of the namespaces made by a process, this one by default."
    return [match[0] for match in shaped._ours() if match['pid'] == str(pid or os.getpid())]


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert bool(reason) or namespaces() == []


def seat():
    "(namespace, its interfaces) of a rank."
    import socket

    return os.readlink('/proc/thread-self/ns/net'), sorted(name for _, name in socket.if_nameindex())


def sum_and_bytes(nbytes):
    "(sum, bytes sent, bytes received) of an all-reduce on a rank."
    import torch
    import torch.distributed as dist

    x = torch.ones(nbytes // 4)
    before = wire_bytes()
    dist.barrier() # nobody sends before all have read
    dist.all_reduce(x)
    dist.barrier()
    return x[-1].item(), *(now - then for now, then in zip(wire_bytes(), before))


def message_seconds(nbytes):
    "Time of a message from rank 0 to rank 1, as the receiver sees it."
    import torch
    import torch.distributed as dist

    x = torch.zeros(nbytes, dtype=torch.uint8)
    dist.barrier()
    started = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(x, 1)
    if dist.get_rank() == 1:
        dist.recv(x, 0)
    return time.perf_counter() - started


# ---- placement -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('servers, ranks, placement, expected', [
    (3, 2, 'packed', [0, 0, 1, 1, 2, 2]), (3, 2, 'spread', [0, 1, 2, 0, 1, 2]), (1, 3, 'spread', [0, 0, 0]), (4, 1, 'packed', [0, 1, 2, 3]),
])
def test_place(servers, ranks, placement, expected):
    assert place(servers, ranks, placement) == expected


@pytest.mark.parametrize('arguments, words', [
    ({'servers': 0}, '1 to 254'), ({'servers': 255}, '1 to 254'), ({'ranks_per_server': 0}, '1 rank or more'), ({'bytes_per_s': 0}, '1e3 to 1e11'),
    ({'bytes_per_s': float('nan')}, '1e3 to 1e11'),
])
def test_bad_sizes(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        ShapedCluster(**arguments)


def test_only_inside_its_block():
    cluster = ShapedCluster(2, 1)
    with pytest.raises(RuntimeError, match='inside its block'):
        cluster.run(seat)
    with cluster if not reason else pytest.warns(UserWarning):
        pass
    with pytest.raises(RuntimeError, match='inside its block'):
        cluster.set_rate(0, 1e6)


# ---- shaped --------------------------------------------------------------------------------------------------------------

@needs_links
@pytest.mark.parametrize('placement', ['packed', 'spread'])
def test_ranks_sit_on_their_servers(placement):
    with ShapedCluster(2, 2) as cluster:
        seen = cluster.run(seat, placement=placement)
    first = [seen.index(rank) for rank in seen] # ranks of one server see the same
    assert first == ([0, 0, 2, 2] if placement == 'packed' else [0, 1, 0, 1])
    assert os.readlink('/proc/self/ns/net') not in dict(seen)
    assert all({'lo', shaped.INTERFACE} <= set(names) for _, names in seen)


@needs_links
def test_counters_follow_the_formula():
    with ShapedCluster(2, 2, bytes_per_s=2.5e7) as cluster:
        packed = cluster.run(sum_and_bytes, 1 << 20)
        spread = cluster.run(sum_and_bytes, 1 << 20, placement='spread')
    for ranks, share in ((packed, 1.5), (spread, 3.0)): # c * 2 (p - 1) / p
        assert [total for total, _, _ in ranks] == [4.0] * 4
        for _, sent, received in ranks:
            assert sent == pytest.approx(share * 2**20, rel=0.1) and received == pytest.approx(share * 2**20, rel=0.1)


@needs_links
def test_inside_a_server_is_free_and_not_counted():
    with ShapedCluster(1, 2, bytes_per_s=1e3) as cluster: # 1 MiB would take 17 minutes on the link
        for total, sent, received in cluster.run(sum_and_bytes, 1 << 20, timeout_s=30):
            assert total == 2.0 and sent + received < 10_000


@needs_links
def test_no_message_beats_its_link_and_a_rate_can_change():
    with ShapedCluster(2, 1, bytes_per_s=1e9) as cluster:
        fast = cluster.run(message_seconds, 1 << 20)[1]
        cluster.set_rate(1, 1e6)
        slow = cluster.run(message_seconds, 1 << 20)[1]
        cluster.set_rate(1, 1e9)
        again = cluster.run(message_seconds, 1 << 20)[1]
    assert slow > 0.9 * 2**20 / 1e6 and slow > 5 * max(fast, again)


@needs_links
def test_two_clusters_at_once():
    with ShapedCluster(2, 1) as one, ShapedCluster(3, 1) as other:
        assert len(namespaces()) == 3 + 4
        assert [total for total, _, _ in one.run(sum_and_bytes, 4096)] == [2.0] * 2
        assert [total for total, _, _ in other.run(sum_and_bytes, 4096)] == [3.0] * 3
        assert remove_stale() == [] and len(namespaces()) == 3 + 4


@needs_links
def test_env_arrives():
    with ShapedCluster(1, 1) as cluster:
        assert cluster.run(lambda: (os.environ['SEAT'], os.environ['GLOO_SOCKET_IFNAME']), env={'SEAT': '7'}) == [('7', shaped.INTERFACE)]


# ---- clean-up ------------------------------------------------------------------------------------------------------------

@needs_links
def test_nothing_left_after_a_failing_rank():
    def fails():
        raise LookupError('no shard')

    with pytest.raises(RankError, match='no shard'), ShapedCluster(2, 1) as cluster:
        cluster.run(fails)
    assert namespaces() == []


@needs_links
@pytest.mark.parametrize('error', [KeyboardInterrupt, ZeroDivisionError])
def test_nothing_left_after_an_error_in_the_block(error):
    with pytest.raises(error), ShapedCluster(2, 1):
        assert len(namespaces()) == 3
        raise error
    assert namespaces() == []


@needs_links
def test_nothing_left_after_an_error_while_building(monkeypatch):
    shape, calls = shaped._shape, []

    def fails_late(*arguments):
        calls.append(arguments)
        if len(calls) == 3: # the first is the probe of can_shape
            raise KeyboardInterrupt
        shape(*arguments)

    monkeypatch.setattr(shaped, '_shape', fails_late)
    with pytest.raises(KeyboardInterrupt), ShapedCluster(3, 1):
        pass
    assert len(calls) == 3 and namespaces() == []


@needs_links
def test_a_killed_owner_leaves_a_stale_set_and_only_that_is_removed():
    script = textwrap.dedent('''
        import time
        from hybridlab.comm.shaped import ShapedCluster
        with ShapedCluster(2, 1):
            print('built', flush=True)
            time.sleep(60)
    ''')
    owner = subprocess.Popen([sys.executable, '-c', script], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == 'built\n'
        with ShapedCluster(1, 1):
            assert len(namespaces(owner.pid)) == 3, 'a living neighbour must stay'
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        stale = namespaces(owner.pid)
        assert len(stale) == 3
        with ShapedCluster(1, 1): # entering tidies up
            assert namespaces(owner.pid) == [] and len(namespaces()) == 2
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


@needs_links
def test_foreign_namespaces_and_reused_process_ids():
    foreign, reused = f'hybridlab-test-{os.getpid()}', f'hybridlab-{os.getpid()}-1-0-switch' # our id, another start time
    for name in (foreign, reused):
        subprocess.run(['ip', 'netns', 'add', name], check=True)
    try:
        assert reused in remove_stale()
        there = subprocess.run(['ip', 'netns', 'list'], capture_output=True, text=True, check=True).stdout.split()
        assert foreign in there and reused not in there
    finally:
        subprocess.run(['ip', 'netns', 'delete', foreign], check=True)


# ---- fallback ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('patch, words', [
    (('platform.system', lambda: 'Darwin'), 'need Linux, this is Darwin'), (('os.geteuid', lambda: 1000), 'need root'),
    (('shutil.which', lambda tool: None), 'ip and tc not found: install iproute2'),
])
def test_reasons(monkeypatch, patch, words):
    monkeypatch.setattr('platform.system', lambda: 'Linux')
    monkeypatch.setattr('os.geteuid', lambda: 0)
    monkeypatch.setattr('shutil.which', lambda tool: tool)
    monkeypatch.setattr(*patch)
    assert words in can_shape()


@needs_links
def test_a_kernel_that_refuses(monkeypatch):
    monkeypatch.setattr(shaped, '_shape', lambda *arguments: shaped._do('ip netns delete hybridlab-not-there'))
    assert re.search('the kernel refuses: ip netns delete', can_shape())


def test_fallback_runs_unshaped(monkeypatch):
    monkeypatch.setattr(shaped, 'can_shape', lambda: 'this is a test')
    with pytest.warns(UserWarning, match='links are not shaped and wire bytes not counted: this is a test'), ShapedCluster(2, 1) as cluster:
        cluster.set_rate(0, 1e6)
        assert not cluster.shaped and cluster.run(wire_bytes, placement='spread') == [None, None]
