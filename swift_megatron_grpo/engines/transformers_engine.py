"""`--use_vllm false`: answers are sampled by transformers, one model copy a rank (import tier 2). For small models and for debugging."""
from __future__ import annotations

import copy
import dataclasses
import torch
from collections.abc import Callable, Iterable, Sequence
from swift.infer_engine import RequestConfig, TransformersEngine
from swift.infer_engine.protocol import ChatCompletionResponse, ChatCompletionResponseChoice, ChatMessage, InferRequest, RolloutOutput
from swift.template import Template
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from typing import Any

from ..errors import RunError
from .base import Bucket, EngineGroup, RolloutEngine, Sampling
from .checksums import Checksum
from .encoding import Encoded, encode_once


# Families whose attention transformers cannot hand to torch's scaled_dot_product_attention (attention sinks).
_WITHOUT_SDPA = ('gpt_oss', )


class _Ends(StoppingCriteria):  # type: ignore[misc]
    """Notes after how many sampled tokens each row of a batch ended; from there on transformers fills it up with pad tokens.

    Args:
        stops: what ends a row besides end tokens and the length limit (ms-swift's stop words).
        end_ids: end tokens. They count as sampled.
    """

    def __init__(self, stops: StoppingCriteriaList, end_ids: Sequence[int]):
        self.stops = stops
        self.end_ids = end_ids
        self.num_sampled = 0
        self.lengths_B: torch.Tensor | None = None  # 0: has not ended

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.num_sampled += 1
        ended = torch.isin(input_ids[:, -1], torch.tensor(self.end_ids, dtype=input_ids.dtype, device=input_ids.device))
        for stop in self.stops:
            ended = ended | stop(input_ids, scores, **kwargs)
        if self.lengths_B is None:
            self.lengths_B = torch.zeros(len(input_ids), dtype=torch.long, device=input_ids.device)
        self.lengths_B = torch.where((self.lengths_B == 0) & ended, self.num_sampled, self.lengths_B)
        return ended

    def lengths(self) -> list[int]:
        """Sampled tokens of each row, its end token included; 0 where the length limit came first."""
        return [] if self.lengths_B is None else self.lengths_B.tolist()


class _Penalty(LogitsProcessor):  # type: ignore[misc]
    """repetition_penalty (Keskar et al. 2019) on what a row holds; transformers' own also counts the padding that longer neighbours bring.

    Args:
        prompt_mask_BT: 1 at the tokens of prompts; None: the prompts are embeddings, and only sampled tokens count.
    """

    def __init__(self, penalty: float, prompt_mask_BT: torch.Tensor | None):
        self.penalty = penalty
        self.prompt_mask_BT = prompt_mask_BT

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_there = torch.ones_like(input_ids)
        if self.prompt_mask_BT is not None:
            is_there[:, :self.prompt_mask_BT.shape[1]] = self.prompt_mask_BT
        seen = torch.zeros_like(scores).scatter_add(1, input_ids, is_there.to(scores.dtype)) > 0
        return torch.where(seen, torch.where(scores < 0, scores * self.penalty, scores / self.penalty), scores)


class _SamplingEngine(TransformersEngine):
    """ms-swift's engine, for answers that are trained on.

    Log-probabilities are those of the distribution that was sampled from (temperature, penalty, top_k and top_p applied), as vLLM's are, in
    float32, one softmax a step (ms-swift's are of the model's own logits, and it sorts the whole vocabulary for every token).

    A policy can sample the pad token, too. ms-swift drops each token of that number, so that the answer misses tokens its own
    log-probabilities were conditioned on; here a row ends where it ended. One that ends with the last allowed token has ended, too.
    """

    def _prepare_generation_config(self, request_config: RequestConfig) -> Any:
        config = super()._prepare_generation_config(request_config)
        config.output_logits, config.output_scores = False, True
        if config.do_sample and (request_config.top_k or 0) <= 0:
            config.top_k = 0  # None would mean transformers' 50
        return config

    def _infer_full(self, inputs: dict[str, Any], *, generation_config: Any, adapter_request: Any, request_config: Any,
                    template_inputs: Sequence[Any]) -> list[ChatCompletionResponse]:
        prompt_ids_BT = inputs.get('input_ids')  # a template can give embeddings in their place
        kwargs = self.template.prepare_generate_kwargs({'generation_config': generation_config, **inputs}, model=self.model)
        end_ids = generation_config.eos_token_id
        ends = _Ends(kwargs['stopping_criteria'], [] if end_ids is None else [end_ids] if isinstance(end_ids, int) else list(end_ids))
        kwargs['stopping_criteria'] = StoppingCriteriaList([ends])
        if generation_config.repetition_penalty not in (None, 1.0):
            penalty = _Penalty(generation_config.repetition_penalty, None if prompt_ids_BT is None else inputs['attention_mask'])
            kwargs['logits_processor'] = LogitsProcessorList([penalty])
            generation_config.repetition_penalty = 1.0
        output = self.template.generate(self.model, **kwargs)
        sampled_ids = self.template.get_generate_ids(output['sequences'], self._get_num_tokens(inputs))
        logprobs = self._logprobs(output['scores'], sampled_ids)
        responses = []
        for row, length in enumerate(ends.lengths()):
            ids = sampled_ids[row, :length or None].tolist()
            text = self.template.decode_generate_ids(ids, template_inputs=template_inputs[row])
            choice = ChatCompletionResponseChoice(
                index=0,
                message=ChatMessage(role='assistant', content=text, tool_calls=self._get_toolcall(text, template_inputs=template_inputs[row])),
                finish_reason='stop' if length else 'length',
                logprobs={'content': [{'logprob': value} for value in logprobs[row][:len(ids)]]},
                token_ids=ids)
            prompt_ids = None if prompt_ids_BT is None else prompt_ids_BT[row][inputs['attention_mask'][row].bool()].tolist()
            usage = self._update_usage_info(self._get_usage_info(self._get_num_tokens(inputs, batch_idx=row), 0), len(ids))
            responses.append(ChatCompletionResponse(model=self.model_name, choices=[choice], usage=usage, prompt_token_ids=prompt_ids))
        return responses

    def _logprobs(self, scores: Sequence[torch.Tensor], sampled_ids_BS: torch.Tensor) -> list[list[float]]:
        steps = [
            torch.log_softmax(scores_BV.float(), -1).gather(-1, sampled_ids_BS[:, step, None])[:, 0]
            for step, scores_BV in enumerate(scores)
        ]
        return torch.stack(steps, 1).tolist()

    def _batch_encode(self, infer_requests: Sequence[InferRequest], strict: bool) -> Encoded:  # type: ignore[override]
        return encode_once(super()._batch_encode, infer_requests, strict)


class TransformersRolloutEngine(RolloutEngine):
    """Batched generation with a key-value cache.

    Args:
        args: model folder, torch_dtype, ...
        template: the trainer's template; a copy is used.
        group: one engine a rank.
        max_batch_size: rows generated at once.
        device: where the copy of the model lies.
    """

    def __init__(self, args: Any, template: Template, group: EngineGroup, *, max_batch_size: int, device: torch.device):
        self.group = group
        self.device = device
        self.asleep = 0
        self.shapes: list[torch.Size] = []
        rollout_template = copy.copy(template)
        rollout_template.padding_free = False
        rollout_template.sequence_parallel_size = 1
        rollout_template.use_megatron = False
        attention = 'eager' if args.model_type in _WITHOUT_SDPA else 'sdpa'
        model, _ = args.get_model_processor(device_map={'': str(device)}, attn_impl=attention)
        model.requires_grad_(False)
        model.generation_config = _ends_alone(model.generation_config)
        self.engine = _SamplingEngine(model, template=rollout_template, max_batch_size=max_batch_size)
        self.renamings = _renamings(model)

    def load_weights(self, buckets: Iterable[Bucket], version: int) -> int:
        self.version = -1
        tied = getattr(self.engine.model.config, 'tie_word_embeddings', False)
        loader = _StateLoader(self._weights(), self.parameter_name)
        count = 0
        with torch.no_grad():
            for bucket in buckets:
                for name, tensor in bucket:
                    loader.load(name, tensor)
                    count += 1
        missing = {name for name, _ in self.engine.model.named_parameters()} - loader.loaded - ({'lm_head.weight'} if tied else set())
        if missing:
            raise RunError(f'Weight sync left {len(missing)} weights of the rollout model as they were, e.g. {sorted(missing)[:3]}.')
        self.version = version
        return count

    def generate(self, requests: Sequence[Any], sampling: Sampling) -> list[RolloutOutput]:
        if self.version < 0:
            raise RunError('Rollout was asked of an engine that has not received weights yet.')
        if len(set(sampling.limits)) > 1:  # a batch of transformers has one limit
            return self._by_limit(requests, sampling)
        limited = dataclasses.replace(sampling, max_tokens=sampling.limits[0]) if sampling.limits else sampling
        config = limited.request_config(seed=None)  # this engine draws from torch's generator, below
        plain = [InferRequest(messages=copy.deepcopy(r.messages), images=r.images, audios=r.audios, videos=r.videos, tools=r.tools,
                              objects=r.objects, chat_template_kwargs=r.chat_template_kwargs) for r in requests]
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(sampling.seed)
            responses = self.engine.infer(plain, config, use_tqdm=False)
        outputs = []
        for response in responses:
            if isinstance(response, Exception):
                raise RunError(f'The transformers engine could not answer a request: {response}') from response
            outputs.append(RolloutOutput(response=response))
        return outputs

    def _by_limit(self, requests: Sequence[Any], sampling: Sampling) -> list[RolloutOutput]:
        outputs: dict[int, RolloutOutput] = {}
        for limit in sorted(set(sampling.limits)):
            rows = [row for row, own in enumerate(sampling.limits) if own == limit]
            part = dataclasses.replace(sampling, seed=sampling.seed + rows[0], limits=(limit,) * len(rows))
            outputs |= dict(zip(rows, self.generate([requests[row] for row in rows], part), strict=True))
        return [outputs[row] for row in range(len(requests))]

    def checksums(self) -> dict[str, Checksum]:
        return {name: Checksum.of(weight) for name, weight in self._weights().items()}

    def _weights(self) -> dict[str, torch.Tensor]:
        """Parameters, and buffers that checkpoints hold (the correction bias of a router)."""
        model = self.engine.model
        weights: dict[str, torch.Tensor] = dict(model.named_parameters())
        saved = model.state_dict()
        weights.update((name, buffer) for name, buffer in model.named_buffers() if name in saved)
        return weights

    def holder_of(self, name: str) -> str:
        name = self.parameter_name(name)
        return _fused_expert(name) if self._has_fused_experts and '.experts.' in name else name

    def parameter_name(self, name: str) -> str:
        """What the model calls a weight that checkpoints call `name`. Pure.

        Example: transformers 5 has 'model.visual.blocks.0...' where checkpoints of Qwen2-VL have 'visual.blocks.0...'.
        """
        for renaming in self.renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    @property
    def _has_fused_experts(self) -> bool:
        return any(name.endswith('.experts.gate_up_proj') for name, _ in self.engine.model.named_parameters())

    def sleep(self, level: int) -> None:
        if not level or self.asleep:
            return
        self.asleep = level
        model = self.engine.model
        if level == 1:
            model.to('cpu')
            return
        self.version = -1
        for parameter in model.parameters():  # tied ones come once
            self.shapes.append(parameter.shape)
            parameter.data = parameter.data.new_empty(0)

    def wake(self, tags: Sequence[str]) -> None:
        if 'weights' not in tags or not self.asleep:
            return
        model = self.engine.model
        if self.asleep == 1:
            model.to(self.device)
        else:
            for parameter, shape in zip(model.parameters(), self.shapes, strict=True):
                parameter.data = parameter.data.new_zeros(shape)
            self.shapes.clear()
        self.asleep = 0

    def close(self) -> None:
        self.engine.model = self.engine.engine = None


def _ends_alone(config: GenerationConfig) -> GenerationConfig:
    """Of a model's generation_config.json what ends an answer. Its top_k, penalties and forbidden tokens would change what is sampled, and transformers
    takes them wherever an argument says nothing."""
    return GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)


# The three matrices of an expert, as checkpoints call them.
_EXPERT_PARTS = {'gate_proj': 'gate', 'up_proj': 'up', 'down_proj': 'down', 'w1': 'gate', 'w3': 'up', 'w2': 'down'}


def _renamings(model: Any) -> list[Any]:
    """transformers' renamings of checkpoint names, in the order in which its own loading applies them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming
    return [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]


def _fused_expert(name: str) -> str:
    """Pure. 'model.layers.0.mlp.experts.3.up_proj.weight' -> 'model.layers.0.mlp.experts.gate_up_proj'."""
    prefix, _, rest = name.partition('.experts.')
    number, _, leaf = rest.partition('.')
    if not number.isdigit():
        return name
    return f'{prefix}.experts.' + ('down_proj' if _EXPERT_PARTS.get(leaf.removesuffix('.weight')) == 'down' else 'gate_up_proj')


class _StateLoader:
    """Copies weights by Hugging Face checkpoint names into a transformers model, including fused experts.

    transformers 5 keeps the experts of a mixture in one tensor each (`experts.gate_up_proj`, `experts.down_proj`); checkpoints, and the
    bridge's export, have one tensor an expert.
    """

    def __init__(self, weights: dict[str, torch.Tensor], parameter_name: Callable[[str], str]):
        self.weights = weights
        self.parameter_name = parameter_name
        self.loaded: set[str] = set()

    def load(self, name: str, tensor: torch.Tensor) -> None:
        name = self.parameter_name(name)
        target = self.weights.get(name)
        if target is not None:
            target.copy_(tensor)
            self.loaded.add(name)
            return
        _prefix, _, rest = name.partition('.experts.')
        number, _, leaf = rest.partition('.')
        part = _EXPERT_PARTS.get(leaf.removesuffix('.weight'))
        target = self.weights.get(_fused_expert(name))
        if part is not None and target is not None:
            slot = target[int(number)]
            if part == 'gate':
                slot = slot[:slot.shape[0] // 2]
            elif part == 'up':
                slot = slot[slot.shape[0] // 2:]
            slot.copy_(tensor)
            self.loaded.add(_fused_expert(name))
            return
        if name == 'lm_head.weight':  # tied, and exported all the same
            return
        raise RunError(f'Weight sync: the rollout model has no weight {name!r}.')
