"""Frozen rollouts with images, and the gradient that transformers computes for them. Used by the tests beside it."""
from __future__ import annotations

import json
import random
import torch
from pathlib import Path
from typing import Any

from tests import tiny_vision
from tests.step.training import PLUGIN, arguments

SIZES = [(56, 56), (112, 64), (64, 96), (84, 140)]
# Images of each prompt: one, none, two, one.
PROMPT_IMAGES = ([0], [], [1, 2], [3])
NUM_GENERATIONS = 2
TEMPERATURE = 0.9


def question(prompt: int) -> str:
    return '<image>' * len(PROMPT_IMAGES[prompt]) + f'what is {prompt} + {"1" * (1 + 2 * prompt)}?'


def write_rollouts(folder: Path, images: list[str], *, generations: int = 1) -> Path:
    """4 prompts, 2 rollouts each. Rollouts 1 and 3 hold an image token that the policy sampled, with and without an image in the prompt."""
    rng = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    for generation in range(generations):
        rows: list[dict[str, Any]] = [{'format': 1, 'generation': generation, 'num_generations': NUM_GENERATIONS, 'reward_names': ['Digits'],
                                       'num_rollouts': len(PROMPT_IMAGES) * NUM_GENERATIONS, 'seed': 42}]
        for index in range(len(PROMPT_IMAGES) * NUM_GENERATIONS):
            prompt = index // NUM_GENERATIONS
            tokens = [rng.randrange(8, 300) for _ in range(3 + 4 * index % 13)]
            if index in (1, 3):
                tokens[1] = tiny_vision.IMAGE_TOKEN
            rows.append({
                'index': index, 'prompt_index': prompt, 'dataset_index': prompt, 'response_token_ids': [tokens], 'response_loss_mask': [],
                'rollout_logprobs': [[-5.5 for _ in tokens]], 'finish_reason': 'stop', 'num_prompt_tokens': 20, 'rollout_infos': {}, 'media': {},
                'messages': [{'role': 'user', 'content': question(prompt)}, {'role': 'assistant', 'content': ''}], 'policy_version': 0,
                'rewards': [rng.random()], 'columns': {'images': [images[i] for i in PROMPT_IMAGES[prompt]]} if PROMPT_IMAGES[prompt] else {},
            })
        (folder / f'generation-{generation:06d}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return folder


def image_arguments(work: Path, model: Path, kind: str, rollouts: Path | None = None, **changes: Any) -> list[str]:
    """As `arguments`, for an image model: its template, small images, and a plug-in that knows the tiny vocabulary's image token."""
    work.mkdir(parents=True, exist_ok=True)
    plugin = work / 'tiny_image_tokens.py'
    plugin.write_text(PLUGIN + tiny_vision.PLUGIN_LINES)
    values = {'model_type': tiny_vision.MODEL_TYPES.get(kind, kind), 'template': kind, 'external_plugins': plugin, 'freeze_vit': 'false',
              'freeze_aligner': 'false', 'num_generations': NUM_GENERATIONS, 'global_batch_size': 8, 'micro_batch_size': 8,
              'temperature': TEMPERATURE, 'max_length': 1024, 'system': 'hi', 'vit_gradient_checkpointing': 'false'}
    return arguments(work, model, rollouts, **{**values, **changes})


def reference_gradients(folder: Path, kind: str, rollouts: Path) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """With transformers, one rollout at a time: gradients of the GRPO loss by checkpoint name, and log-probabilities of each rollout.

    On-policy and without a KL term the loss has the gradient of -sum(advantage * logprob) / (length * number of sequences).
    """
    import transformers
    from PIL import Image
    from transformers import AutoTokenizer
    model = getattr(transformers, tiny_vision.KINDS[kind][1]).from_pretrained(folder, dtype=torch.float32, attn_implementation='sdpa').train()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    see = _internvl_images(folder) if kind == 'internvl_hf' else _qwen_images(folder)
    rows = [json.loads(line) for line in (rollouts / 'generation-000000.jsonl').read_text().splitlines()[1:]]
    rewards = torch.tensor([row['rewards'][0] for row in rows]).view(-1, NUM_GENERATIONS)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    logprobs = []
    for row, advantage in zip(rows, advantages):
        images = [Image.open(path).convert('RGB') for path in row['columns'].get('images', [])]
        inputs, placeholder, numbers = see(images) if images else ({}, '', [])
        text = row['messages'][0]['content'].replace('<image>', placeholder)
        prompt = tokenizer.encode(f'<|im_start|>system\nhi<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n')
        counts = iter(numbers)
        prompt = [token for old in prompt for token in ([old] * next(counts) if old == tiny_vision.IMAGE_TOKEN else [old])]
        answer = row['response_token_ids'][0]
        ids = torch.tensor([prompt + answer])
        values = _logprobs_after(model, ids, inputs, len(prompt))
        logprobs.append(values.detach())
        (-(advantage * values.sum()) / len(answer) / len(rows)).backward()
    from transformers.core_model_loading import revert_weight_conversion
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return revert_weight_conversion(model, gradients), logprobs  # by the names of checkpoints


def _qwen_images(folder: Path) -> Any:
    """images -> (inputs of the vision tower, what stands for one in the text, number of tokens of each)."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def see(images: list[Any]) -> tuple[dict[str, Any], str, list[int]]:
        inputs = dict(processor(images=images, return_tensors='pt'))
        return inputs, '<|vision_start|><|image_pad|><|vision_end|>', (inputs['image_grid_thw'].prod(-1) // 4).tolist()

    return see


def _internvl_images(folder: Path) -> Any:
    """As `_qwen_images`."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    processor = GotOcr2ImageProcessorPil.from_pretrained(folder)

    def see(images: list[Any]) -> tuple[dict[str, Any], str, list[int]]:
        inputs = dict(processor(images=images, return_tensors='pt'))
        return inputs, '<img><IMG_CONTEXT></img>\n', [tiles * tiny_vision.TOKENS_OF_TILE for tiles in inputs['num_patches'].tolist()]

    return see


def _logprobs_after(model: Any, ids: torch.Tensor, inputs: dict[str, Any], num_prompt: int) -> torch.Tensor:
    """Log-probabilities of ids[num_prompt:] as a sampler gives them: an image token among them is text, with the embedding of its number."""
    types = ((ids == tiny_vision.IMAGE_TOKEN) & (torch.arange(ids.shape[1]) < num_prompt)).long()
    embeddings = model.get_input_embeddings()(ids)
    extra: dict[str, Any] = {}
    inner = model.model
    if inputs:
        seen = (inner.visual(inputs['pixel_values'], grid_thw=inputs['image_grid_thw']) if hasattr(inner, 'visual') else
                inner.get_image_features(inputs['pixel_values']))
        embeddings = embeddings.masked_scatter((types == 1)[..., None].expand_as(embeddings), seen.pooler_output.flatten(0, -2))
        deep = getattr(seen, 'deepstack_features', None)
        if deep:
            extra = {'visual_pos_masks': types == 1, 'deepstack_visual_embeds': list(deep)}
    if hasattr(inner, 'get_rope_index'):
        extra['position_ids'], _ = inner.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=inputs.get('image_grid_thw'),
                                                        attention_mask=torch.ones_like(ids))
    hidden = inner.language_model(inputs_embeds=embeddings, **extra).last_hidden_state
    logits = model.lm_head(hidden)[0, num_prompt - 1:-1].float() / TEMPERATURE
    return logits.log_softmax(-1).gather(-1, ids[0, num_prompt:, None])[:, 0]
