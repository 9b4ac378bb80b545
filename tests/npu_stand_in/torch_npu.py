"""A stand-in for torch_npu: the device of device.cpp under the name npu, an hccl that takes its tensors only, and the fused operators by their documentation."""
import contextlib
import os
import types

import torch
import torch.distributed as dist

CARDS = int(os.environ.get('STAND_IN_CARDS', '2'))
REDUCED = {torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32}  # what HCCL adds; no float64


def _autoload():
    "Named by the entry point; importing this module has done the work."


class Event:
    pass


class Stream:
    def record_event(self, event=None):
        return Event()

    def wait_event(self, event):
        assert isinstance(event, Event)


@contextlib.contextmanager
def stream(entered):
    assert isinstance(entered, Stream)
    yield


torch.ops.load_library(os.path.join(os.path.dirname(__file__), 'device.so'))
torch.utils.rename_privateuse1_backend('npu')
npu = types.ModuleType('torch.npu')
vars(npu).update(
    Stream=Stream, Event=Event, stream=stream, current_stream=lambda device=None: Stream(), synchronize=lambda device=None: None, is_available=lambda: True,
    is_initialized=lambda: True, device_count=lambda: CARDS, get_device_name=lambda index=0: 'Ascend910B3', set_device=lambda index: None, current_device=lambda: 0,
    _is_in_bad_fork=lambda: False, manual_seed_all=lambda seed: None, get_rng_state=lambda device=None: torch.get_rng_state(), set_rng_state=lambda state, device=None: None,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16])
torch._register_device_module('npu', npu)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)


# ---- hccl ----------------------------------------------------------------------------------------------------------------

class Done(dist.Work):
    "A transfer whose last part, the copy to the card, runs when it is waited for."

    def __init__(self, work, last):
        super().__init__()
        self.work, self.last = work, last

    def wait(self, timeout=None):
        self.work.wait()
        last, self.last = self.last, lambda: None
        last()
        return True

    def is_completed(self):
        return self.work.is_completed()


def check(*tensors, added=False):
    for tensor in tensors:
        if tensor.device.type != 'npu':
            raise RuntimeError(f'No backend type associated with device type {tensor.device.type}')
        if not tensor.is_contiguous():
            raise RuntimeError('hccl: tensors must be contiguous')
        if added and tensor.dtype not in REDUCED:
            raise RuntimeError(f'hccl: cannot reduce {tensor.dtype}')


def fetch(tensors):
    return [tensor.detach().cpu() for tensor in tensors]


def put(tensors, values):
    for tensor, value in zip(tensors, values):
        tensor.detach().copy_(value)


class ProcessGroupHCCL(dist.ProcessGroup):
    "Tensors of the stand-in, carried by gloo."

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo, self.name = dist.ProcessGroupGloo(store, rank, size, timeout), ''

    def getBackendName(self):
        return 'hccl'

    def _set_group_name(self, name):
        self.name = name

    group_name = property(lambda self: self.name)
    _device_types = property(lambda self: [torch.device('npu')])

    def _at_once(self, work, tensors=(), values=()):
        done = Done(work, lambda: put(tensors, values))
        done.wait()
        return done

    def allreduce(self, tensors, opts):
        check(*tensors, added=True)
        values = fetch(tensors)
        return self._at_once(self.gloo.allreduce(values, opts), tensors, values)

    def broadcast(self, tensors, opts):
        check(*tensors)
        values = fetch(tensors)
        return self._at_once(self.gloo.broadcast(values, opts), tensors, values)

    def allgather(self, outputs, inputs, opts=None):
        check(*inputs, *outputs[0])
        values = [torch.empty_like(tensor, device='cpu') for tensor in outputs[0]]
        return self._at_once(self.gloo.allgather([values], fetch(inputs)), outputs[0], values)

    def all_gather_single(self, output, given, opts=None):
        check(output, given)
        value = torch.empty_like(output, device='cpu')
        return self._at_once(self.gloo._allgather_base(value, *fetch([given])), [output], [value])

    def reduce_scatter_single(self, output, given, opts):
        check(output, given, added=True)
        value = torch.empty_like(output, device='cpu')
        return self._at_once(self.gloo._reduce_scatter_base(value, *fetch([given]), opts), [output], [value])

    def all_to_all_single(self, output, given, receive, send, opts=None):
        check(output, given)
        value = torch.empty_like(output, device='cpu')
        return self._at_once(self.gloo.alltoall_base(value, *fetch([given]), receive, send), [output], [value])

    alltoall_base, _allgather_base, _reduce_scatter_base = all_to_all_single, all_gather_single, reduce_scatter_single

    def barrier(self, opts=None):
        return self._at_once(self.gloo.barrier())

    def send(self, tensors, rank, tag=0):
        check(*tensors)
        values = fetch(tensors)
        return Done(self.gloo.send(values, rank, tag), lambda: values)

    def recv(self, tensors, rank, tag=0):
        check(*tensors)
        values = [torch.empty_like(tensor, device='cpu') for tensor in tensors]
        return Done(self.gloo.recv(values, rank, tag), lambda: put(tensors, values))


dist.Backend.register_backend('hccl', ProcessGroupHCCL, devices=['npu'])


# ---- operators, by torch_npu's own documentation -------------------------------------------------------------------------

def npu_dynamic_quant(x, *, smooth_scales=None, group_index=None, dst_type=None):
    assert x.dtype in (torch.float16, torch.bfloat16) and x.dim() > 1 and x.device.type == 'npu'
    scale = x.float().abs().amax(-1) / 127
    return torch.round(x.float() / scale.clamp(min=1e-30)[..., None]).to(torch.int8), scale


def npu_moe_gating_top_k_softmax(x, finished=None, k=1):
    assert x.device.type == 'npu'
    scores, experts = torch.softmax(x, -1).topk(k, -1)
    return scores, experts.int(), experts.int()


def npu_moe_gating_top_k(x, k, *, bias=None, input_ids=None, tid2eid=None, k_group=1, group_count=1, group_select_mode=0, renorm=0, norm_type=0,
                         out_flag=False, routed_scaling_factor=1.0, eps=1e-20):
    assert x.device.type == 'npu' and (bias is None or bias.dtype == x.dtype)
    scores = torch.sigmoid(x) if norm_type else torch.softmax(x, -1)
    chosen = (scores if bias is None else scores + bias).unflatten(1, (group_count, -1))
    best = chosen.topk(2, 2).values.sum(2) if group_select_mode else chosen.amax(2)
    lost = torch.ones_like(best).scatter_(1, best.topk(k_group, 1).indices, 0.0).bool()
    experts = chosen.masked_fill(lost[:, :, None], float('-inf')).flatten(1).topk(k, 1).indices
    return scores.gather(1, experts), experts.int(), scores
