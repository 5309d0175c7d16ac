"""Where the platform switches itself on, what it changes, what it leaves alone, and what it refuses."""
import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import pytest

from swift_megatron_grpo.cpu import limits
from swift_megatron_grpo.cpu.patches import ENGINE, PLATFORM
from swift_megatron_grpo.errors import UserError
from tests.rank_pool import REPOSITORY


def in_a_fresh_interpreter(code):
    """Run `code`, which prints one JSON value last; returns (value, standard error)."""
    done = subprocess.run([sys.executable, '-c', textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False,
                          env=dict(os.environ, PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS='1'), cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_importing_the_package_changes_nothing_in_torch_and_activation_does():
    value, log = in_a_fresh_interpreter('''
        import json, logging, sys, torch
        logging.basicConfig(level=logging.INFO)
        names = ['empty', 'tensor', 'arange']
        before = [getattr(torch, n) for n in names] + [torch.Tensor.to, torch.Tensor.type, torch.nn.Module.cuda, torch.cuda.current_device]
        import swift_megatron_grpo, swift_megatron_grpo.cpu as cpu, swift_megatron_grpo.args
        from swift_megatron_grpo.cpu import limits, patches
        now = [getattr(torch, n) for n in names] + [torch.Tensor.to, torch.Tensor.type, torch.nn.Module.cuda, torch.cuda.current_device]
        untouched = all(a is b for a, b in zip(before, now)) and patches.PLATFORM.applied == [] and 'transformer_engine' not in sys.modules
        inactive = cpu.is_active()
        first = cpu.activate()
        wrapped = torch.empty
        second = cpu.activate()
        print(json.dumps([untouched, inactive, first, second, torch.empty is wrapped, cpu.is_active(), len(patches.PLATFORM.applied)]))
    ''')
    # Two of them let image models do without torchvision, where it is not installed.
    assert value == [True, False, True, True, True, True, 15 if importlib.util.find_spec('torchvision') is None else 13]
    assert log.count('CPU platform: ') == 1


def test_activation_after_megatron_is_refused():
    value, _ = in_a_fresh_interpreter('''
        import json, sys, types
        sys.modules['megatron.core'] = types.ModuleType('megatron.core')
        from swift_megatron_grpo import cpu
        try:
            cpu.activate()
        except RuntimeError as error:
            print(json.dumps(str(error)))
    ''')
    assert value == 'the CPU platform must be activated before megatron.core is imported (first statement of a worker process)'


@pytest.mark.parametrize('accelerator, engine, expected', [(False, False, True), (True, False, False), (False, True, False),
                                                           (True, True, False)])
def test_it_is_needed_only_without_accelerator_and_without_transformer_engine(accelerator, engine, expected, monkeypatch):
    from swift_megatron_grpo import cpu
    monkeypatch.setattr(cpu, 'has_accelerator', lambda: accelerator)
    monkeypatch.setattr(cpu.importlib.util, 'find_spec', lambda name: object() if engine else None)
    assert cpu.is_needed() is expected
    if not expected:
        assert cpu.activate() is False
        assert not cpu.is_active()


def test_the_vllm_adapter_does_nothing_where_there_is_an_accelerator(monkeypatch):
    from swift_megatron_grpo import cpu
    from swift_megatron_grpo.cpu import vllm_plugin
    monkeypatch.setattr(cpu, 'has_accelerator', lambda: True)
    vllm_plugin.register()
    vllm_plugin.after_deploy_args(sys)
    assert ENGINE.applied == []


@pytest.mark.parametrize('accelerator, engine', [(True, False), (False, True)])
def test_a_rollout_server_is_left_as_it_is_where_the_cpu_platform_is_not_needed(monkeypatch, accelerator, engine):
    from swift_megatron_grpo import cpu
    from swift_megatron_grpo.hooks import patches
    for name in cpu.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu, 'has_accelerator', lambda: accelerator)
    monkeypatch.setattr(cpu.importlib.util, 'find_spec', lambda name: object() if engine else None)
    patches.after_deploy_args(sys)
    patches.after_rollout(sys)
    assert ENGINE.applied == [] and not any(name in os.environ for name in cpu.ENVIRONMENT)


def test_a_rollout_server_on_a_cpu_is_told_how_vllm_is_used_and_nothing_else():
    value, _ = in_a_fresh_interpreter('''
        import json, os
        for name in [name for name in os.environ if name.startswith('VLLM_')]:
            del os.environ[name]
        import swift.arguments.deploy_args as module
        before = dict(os.environ)
        from swift_megatron_grpo.hooks import patches
        patches.after_rollout(module)
        print(json.dumps([module.get_device_count() >= 8, sorted(set(os.environ) - set(before)), os.environ['VLLM_PLUGINS']]))
    ''')
    assert value == [True, ['VLLM_CPU_KVCACHE_SPACE', 'VLLM_ENABLE_V1_MULTIPROCESSING', 'VLLM_PLUGINS'], 'swift_megatron_grpo_cpu']


def test_what_the_user_has_set_stays():
    value, _ = in_a_fresh_interpreter('''
        import json, os
        os.environ['VLLM_CPU_KVCACHE_SPACE'] = '4'
        os.environ.pop('VLLM_PLUGINS', None)
        from swift_megatron_grpo import cpu
        cpu.activate()
        print(json.dumps([os.environ['VLLM_CPU_KVCACHE_SPACE'], os.environ['VLLM_PLUGINS']]))
    ''')
    assert value == ['4', 'swift_megatron_grpo_cpu']


@pytest.mark.parametrize('world, resolvable, expected', [('1', True, None), ('1', False, 'lo'), ('4', False, None)])
def test_gloo_listens_on_the_loopback_where_the_hosts_name_does_not_resolve(world, resolvable, expected, monkeypatch):
    from swift_megatron_grpo import cpu

    def resolve(host, port):
        if not resolvable:
            raise OSError('Name or service not known')

    monkeypatch.setattr(cpu.socket, 'getaddrinfo', resolve)
    monkeypatch.setattr(cpu.socket, 'if_nameindex', lambda: [(1, 'lo'), (2, 'eth0')])
    monkeypatch.setenv('WORLD_SIZE', world)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '1')
    monkeypatch.delenv('GLOO_SOCKET_IFNAME', raising=False)
    cpu._let_gloo_find_this_host()
    assert os.environ.get('GLOO_SOCKET_IFNAME') == expected
    monkeypatch.delenv('GLOO_SOCKET_IFNAME', raising=False)


def devices():
    import torch
    from torch import nn
    made = [torch.empty(2, device='cuda'), torch.zeros(2, device=0), torch.ones(2, device=torch.device('cuda', 1)),
            torch.tensor([1], device='cuda:0'), torch.ones(1).new_zeros(2, device='cuda'), torch.ones(1).cuda(), torch.ones(1).to('cuda'),
            torch.ones(1).to(0), torch.ones(1).to(device='cuda', dtype=torch.float64), nn.Linear(1, 1).cuda().weight,
            nn.Linear(1, 1).to('cuda').weight, torch.cuda.FloatTensor([1.])]
    with torch.device('meta'):
        meta = torch.empty(2)
    scaled = torch.ones(2).to(torch.float64), torch.ones(2).to(torch.ones(1, dtype=torch.float16))
    return ([t.device.type for t in made], meta.device.type, [t.dtype == d for t, d in zip(scaled, (torch.float64, torch.float16))],
            torch.cuda.is_available())


def test_every_cuda_device_is_the_cpu_and_meta_stays_meta(ranks):
    kinds, meta, dtypes, available = ranks.run(devices, world_size=1)[0]
    assert kinds == ['cpu'] * 12
    assert (meta, dtypes, available) == ('meta', [True, True], False)


def type_names():
    import types

    import torch
    asking = types.ModuleType('megatron.core.somewhere')
    exec('def ask(t): return t.type()', asking.__dict__)
    asking.__dict__['__name__'] = 'megatron.core.somewhere'
    x = torch.ones(1)
    return asking.ask(x), asking.ask(x.bfloat16()), x.type(), x.type('torch.DoubleTensor').dtype == torch.float64


def test_only_megatron_is_told_the_cuda_type_name(ranks):
    assert ranks.run(type_names, world_size=1)[0] == ('torch.cuda.FloatTensor', 'torch.cuda.BFloat16Tensor', 'torch.FloatTensor', True)


def random_streams():
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, initialize_rng_tracker
    torch.manual_seed(5)
    expected = torch.rand(1).item()
    torch.manual_seed(5)
    torch.cuda.manual_seed_all(99)
    kept = torch.rand(1).item() == expected
    initialize_rng_tracker(force_reset=True)
    tracker = get_cuda_rng_tracker()
    tracker.add('stream', 5)
    torch.manual_seed(8)
    after = torch.get_rng_state()
    with tracker.fork('stream'):
        inside = torch.rand(1).item()
    return kept, inside == expected, torch.equal(torch.get_rng_state(), after)


def test_megatrons_own_random_tracker_works(ranks):
    assert ranks.run(random_streams, world_size=1) == [(True, True, True)]


def collectives():
    import torch
    import torch.distributed as dist
    from accelerate.utils import broadcast_object_list, gather_object
    rank = dist.get_rank()
    whole = torch.zeros(5)
    dist.all_gather(list(whole.split([3, 2])), torch.full((3 - rank, ), rank + 1.))
    summed = torch.zeros(3 - rank)
    dist.reduce_scatter(summed, list((torch.arange(5.) * (rank + 1)).split([3, 2])))
    moved = torch.zeros(4 if rank else 2)
    sizes = torch.tensor([1, 2])
    dist.all_to_all_single(moved, torch.arange(3.) + 10 * rank, torch.tensor([2, 2]) if rank else torch.tensor([1, 1]), sizes)
    gathered = gather_object([rank])
    sent = [f'from {rank}']
    broadcast_object_list(sent, from_process=1)
    return whole.tolist(), summed.tolist(), moved.tolist(), gathered, sent


def test_uneven_collectives_and_those_of_accelerate(ranks):
    first, second = ranks.run(collectives, world_size=2)
    assert first[0] == second[0] == [1., 1., 1., 2., 2.]
    assert (first[1], second[1]) == ([0., 3., 6.], [9., 12.])
    assert (first[2], second[2]) == ([0., 10.], [1., 2., 11., 12.])
    assert first[3] == second[3] == [0, 1]
    assert first[4] == second[4] == ['from 1']


def figures():
    import torch
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    end.record()
    free, total = torch.cuda.mem_get_info()
    before = torch.cuda.memory_allocated()
    kept = torch.ones(64, 2**20)
    return start.elapsed_time(end), free, total, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_reserved(), kept.numel()


def test_memory_and_time_figures_are_real(ranks):
    elapsed, free, total, grown, peak, numel = ranks.run(figures, world_size=1)[0]
    assert 0 <= elapsed < 10_000
    assert 0 < free <= total
    assert 0.9 * 4 * numel < grown < 1.5 * 4 * numel
    assert peak > 4 * numel


def transformer_engine_misses():
    import importlib
    found = []
    for name in ('transformer_engine.pytorch.cross_entropy', 'transformer_engine.pytorch.permutation', 'transformer_engine.pytorch.graph'):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            found.append(name)
    import transformer_engine as te
    try:
        with te.pytorch.fp8_autocast(enabled=True):
            pass
    except NotImplementedError as error:
        return len(found), str(error)


def test_what_the_stand_in_lacks_is_missing_and_not_pretended(ranks):
    assert ranks.run(transformer_engine_misses, world_size=1) == [(3, 'CPU platform: no FP8; leave fp8_format out')]


def test_every_argument_that_needs_a_gpu_is_named_in_one_error():
    with pytest.raises(UserError) as caught:
        limits.refuse_unsupported({'fp8_format': 'hybrid', 'tp_comm_overlap': True, 'moe_token_dispatcher_type': 'flex',
                                   'micro_batch_size': 2})
    lines = str(caught.value).splitlines()
    assert [line.split(':')[0].strip() for line in lines[1:-1]] == [
        'fp8_format=hybrid', 'tp_comm_overlap=True', 'moe_token_dispatcher_type=flex'
    ]
    assert 'moe_token_dispatcher_type alltoall' in str(caught.value)


@pytest.mark.parametrize('name', sorted(limits.UNSUPPORTED))
def test_each_unsupported_argument_passes_when_it_is_off(name):
    off = {'moe_token_dispatcher_type': 'alltoall', 'cross_entropy_fusion_impl': 'native', 'ddp_backend': 'gloo', 'cuda_graph_impl': 'none'}
    limits.refuse_unsupported({name: off.get(name, False)})
    limits.refuse_unsupported({name: off.get(name)})
    on = {'moe_token_dispatcher_type': 'flex', 'cross_entropy_fusion_impl': 'te', 'ddp_backend': 'nccl', 'fp8': 'e4m3', 'fp4': 'e2m1'}
    with pytest.raises(UserError, match=f'{name}='):
        limits.refuse_unsupported({name: on.get(name, True)})


def test_importing_the_patches_applies_none_and_each_has_a_passport():
    from swift_megatron_grpo.cpu import device, libraries, vision, vllm_plugin  # noqa: F401
    from swift_megatron_grpo.cpu.te import install  # noqa: F401
    assert sorted(patch.passport.name for patch in PLATFORM) == [
        'accelerate-sees-the-group', 'cuda-runtime', 'cuda-type-names', 'device-factories', 'device-moves', 'expected-warnings',
        'images-without-torchvision', 'integer-splits', 'no-compilation', 'one-random-stream', 'processors-without-videos', 'quiet-random-fork',
        'transformer-engine', 'triton-names', 'uneven-lists'
    ]
    assert len(ENGINE) == 11
    assert PLATFORM.applied == ENGINE.applied == []
