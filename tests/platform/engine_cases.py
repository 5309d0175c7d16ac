"""What a rank does with a real vLLM engine on the CPU; used by test_vllm_adapter.py."""
from pathlib import Path
from typing import Any

import torch


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 300, (n, ), generator=generator).tolist() for n in (5, 9, 17)]


def _transformers_tokens(model: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy continuation of 12 tokens and its log-probabilities."""
    tokens, logprobs = [], []
    for prompt in prompts:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(12):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            scores = model(torch.tensor([ids])).logits[0, len(prompt) - 1:-1].log_softmax(-1)
        tokens.append(ids[len(prompt):])
        logprobs.append(scores.gather(-1, torch.tensor(tokens[-1])[:, None])[:, 0])
    return tokens, logprobs


def reload_weights(folder: Path, updates: int, patched: bool = True) -> list[tuple[int, float]]:
    """(prompts with equal greedy tokens, largest log-probability difference) at the start and after each in-place update of all weights."""
    from transformers import AutoModelForCausalLM

    from swift_megatron_grpo.cpu import vllm_plugin
    if patched:
        vllm_plugin.register()
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from swift.rlhf_trainers.utils import patch_vllm_moe_model_weight_loader
    engine = LLM(model=str(folder), dtype='float32', enforce_eager=True, max_model_len=256, max_num_seqs=8, disable_log_stats=True)
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    out = []
    for step in range(updates + 1):
        if step:
            generator = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
            from tests.platform.layouts import by_checkpoint_name
            patch_vllm_moe_model_weight_loader(model)
            model.load_weights(iter(by_checkpoint_name(reference, dict(reference.state_dict())).items()))
            process_weights_after_loading(model, engine.llm_engine.model_config, torch.device('cpu'))
            engine.llm_engine.reset_prefix_cache()
        answers = engine.generate([{'prompt_token_ids': prompt} for prompt in _prompts()], sampling, use_tqdm=False)
        tokens, logprobs = _transformers_tokens(reference, _prompts())
        equal, worst = 0, 0.
        for answer, ids, scores in zip(answers, tokens, logprobs, strict=True):
            mine = list(answer.outputs[0].token_ids)
            equal += mine == ids
            said = torch.tensor([entry[token].logprob for entry, token in zip(answer.outputs[0].logprobs, mine, strict=True)])
            worst = max(worst, (said - scores).abs().max().item())
        out.append((equal, worst))
    return out


def communicate() -> tuple[list[float], list[int], list[float], bool, str]:
    """Over vLLM's own handshake: a broadcast in bf16 and uint8 from rank 1, one into a strided tensor, a sum; then what is not there."""
    import os

    import torch.distributed as dist

    from swift_megatron_grpo.cpu import vllm_plugin
    vllm_plugin.register()
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    rank = dist.get_rank()
    group = StatelessProcessGroup.create(host='127.0.0.1', port=int(os.environ['MASTER_PORT']), rank=rank, world_size=2)
    communicator = PyNcclCommunicator(group, device='cuda:0')
    halves = torch.full((3, ), 1.5 + rank, dtype=torch.bfloat16)
    raw = torch.arange(4, dtype=torch.uint8) + 100 * rank
    strided = torch.zeros(2, 3)[:, 1] if rank == 0 else torch.tensor([[0., 7., 0.], [0., 8., 0.]])[:, 1]
    for tensor in (halves, raw, strided):
        communicator.broadcast(tensor, src=1, stream=None)
    group.barrier()
    summed = communicator.all_reduce(torch.tensor([1. + rank]))
    lacking = 'none'
    try:
        communicator.all_gather(torch.ones(1), torch.ones(1))
    except AttributeError as error:
        lacking = str(error)
    return halves.tolist(), raw.tolist(), strided.tolist() + summed.tolist(), communicator.disabled, lacking


def adapter_bytes() -> tuple[bool, bool]:
    """Whether vLLM's LoRA weights share memory with the tensors they came from, and whether these changed when vLLM scaled its own."""
    from swift_megatron_grpo.cpu import vllm_plugin
    vllm_plugin.register()
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    name = 'base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight'
    tensors = {name.format('A'): torch.ones(8, 4), name.format('B'): torch.ones(6, 8)}
    before = {key: value.clone() for key, value in tensors.items()}
    helper = PEFTHelper.from_dict({'r': 8, 'lora_alpha': 32, 'target_modules': ['q_proj'], 'bias': 'none'})
    model = LoRAModel.from_lora_tensors(1, tensors, helper, device='cpu')
    layer, = model.loras.values()
    shared = layer.lora_b.data_ptr() == tensors[name.format('B')].data_ptr()
    layer.optimize()
    return shared, all(torch.equal(before[key], tensors[key]) for key in tensors) and layer.lora_b.max().item() == 4.


def server_devices() -> int:
    """Devices that `swift rollout` counts."""
    import swift.arguments.deploy_args as deploy_args

    from swift_megatron_grpo.cpu import vllm_plugin
    vllm_plugin.after_deploy_args(deploy_args)  # where the package is installed, the implicit door has called it already
    return deploy_args.get_device_count()
