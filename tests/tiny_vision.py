"""Tiny random image models with their processors, and real PNG images (import tier 1, and transformers when called).

The vocabulary is small, so the image token has another number than in published models, where ms-swift's templates have it written down:
`PLUGIN_LINES` belong at the head of a test's external plug-in.
"""
import json
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.tiny_models import _spread, tokenizer

SPECIAL_TOKENS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|vision_start|>', '<|vision_end|>', '<|vision_pad|>', '<|image_pad|>',
                  '<|video_pad|>')
IMAGE_TOKEN, VIDEO_TOKEN = 6, 7
PLUGIN_LINES = f'''
from swift.template.templates.qwen import Qwen2VLTemplate
Qwen2VLTemplate.image_token_id, Qwen2VLTemplate.video_token_id = {IMAGE_TOKEN}, {VIDEO_TOKEN}
'''
CHAT_TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
                 "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
                 "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
_TEXT: dict[str, Any] = {
    'vocab_size': 320, 'hidden_size': 64, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'num_key_value_heads': 2, 'intermediate_size': 96,
    'max_position_embeddings': 2048, 'initializer_range': 0.1, 'eos_token_id': 2, 'pad_token_id': 0, 'bos_token_id': None, 'dtype': 'float32',
}
_VISION: dict[str, Any] = {'depth': 2, 'num_heads': 2, 'spatial_merge_size': 2, 'temporal_patch_size': 2, 'in_channels': 3, 'dtype': 'float32'}
_INTERNVL_TOKENS = (*SPECIAL_TOKENS[:3], '<img>', '</img>', '<|vision_pad|>', '<IMG_CONTEXT>', '<video>')
_IDS = {'image_token_id': IMAGE_TOKEN, 'video_token_id': VIDEO_TOKEN, 'vision_start_token_id': 3, 'vision_end_token_id': 4}
# kind -> (configuration class, model class, text configuration, vision configuration, patch size)
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], int]] = {
    'qwen2_vl': ('Qwen2VLConfig', 'Qwen2VLForConditionalGeneration',
                 {'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000., 'mrope_section': [4, 6, 6]}},
                 {'embed_dim': 32, 'hidden_size': 64, 'patch_size': 14, 'mlp_ratio': 2}, 14),
    'qwen2_5_vl': ('Qwen2_5_VLConfig', 'Qwen2_5_VLForConditionalGeneration',
                   {'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000., 'mrope_section': [4, 6, 6]}},
                   {'hidden_size': 32, 'intermediate_size': 64, 'patch_size': 14, 'window_size': 56, 'fullatt_block_indexes': [1],
                    'out_hidden_size': 64}, 14),
    'qwen3_vl': ('Qwen3VLConfig', 'Qwen3VLForConditionalGeneration',
                 {'head_dim': 32, 'num_hidden_layers': 4,
                  'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000., 'mrope_section': [6, 5, 5], 'mrope_interleaved': True}},
                 {'hidden_size': 32, 'intermediate_size': 64, 'patch_size': 16, 'out_hidden_size': 64, 'num_position_embeddings': 64,
                  'deepstack_visual_indexes': [0, 1]}, 16),
    'internvl_hf': ('InternVLConfig', 'InternVLForConditionalGeneration',
                    {'model_type': 'qwen3', 'head_dim': 32, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.}},
                    {'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'image_size': [56, 56],
                     'patch_size': [14, 14]}, 14),
}
MODEL_TYPES = {'internvl_hf': 'internvl'}  # ms-swift's, where it is not the name
# InternVL cuts an image into tiles of one size, which all have as many tokens.
TILE, TOKENS_OF_TILE = 56, 4


def build(kind: str, directory: Path, *, seed: int = 0, **text_changes: Any) -> Path:
    """Write a random model of `kind`, its tokenizer and its image processor into `directory`; returns it. The same seed gives the same bytes."""
    import transformers
    config_class, model_class, text, vision, patch = KINDS[kind]
    of_qwen = kind != 'internvl_hf'
    sizes = _IDS if of_qwen else {'image_token_id': IMAGE_TOKEN, 'image_seq_length': TOKENS_OF_TILE, 'downsample_ratio': 0.5}
    config = getattr(transformers, config_class)(
        text_config={**_TEXT, **text, **text_changes}, vision_config={**_VISION, **vision} if of_qwen else {**vision, 'dtype': 'float32'},
        tie_word_embeddings=text_changes.get('tie_word_embeddings', False), dtype='float32', **sizes)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config).float()
        _spread(model, _TEXT['initializer_range'])
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
        model.save_pretrained(directory)
    (_save_qwen_processor if of_qwen else _save_internvl_processor)(directory, patch)
    return Path(directory)


def _save_qwen_processor(directory: Path, patch: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    words = tokenizer(special_tokens=SPECIAL_TOKENS)
    words.chat_template = CHAT_TEMPLATE
    words.save_pretrained(directory)
    size = {'shortest_edge': 4 * patch * patch, 'longest_edge': 64 * 4 * patch * patch}
    Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(directory)


def _save_internvl_processor(directory: Path, patch: int) -> None:
    from transformers import PreTrainedTokenizerFast
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(special_tokens=_INTERNVL_TOKENS).backend_tokenizer, eos_token='<|im_end|>', pad_token='<|endoftext|>',
        extra_special_tokens={'start_image_token': '<img>', 'end_image_token': '</img>', 'context_image_token': '<IMG_CONTEXT>',
                              'video_token': '<video>'})
    words.chat_template = CHAT_TEMPLATE.replace('<|vision_start|><|image_pad|><|vision_end|>', '<IMG_CONTEXT>\n')
    words.save_pretrained(directory)
    GotOcr2ImageProcessorPil(size={'height': TILE, 'width': TILE}, crop_to_patches=True, max_patches=4).save_pretrained(directory)
    (Path(directory) / 'processor_config.json').write_text(json.dumps({'processor_class': 'InternVLProcessor', 'image_seq_length': TOKENS_OF_TILE}))


def write_images(folder: Path, sizes: list[tuple[int, int]]) -> list[str]:
    """PNG files of these (width, height), each with a pattern of its own; returns their paths."""
    from PIL import Image, ImageDraw
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, size in enumerate(sizes):
        image = Image.new('RGB', size, (37 * number % 256, 90 + 11 * number % 160, 200 - 23 * number % 200))
        ImageDraw.Draw(image).rectangle((3 + number, 5, 20 + 2 * number, 31), fill=(255 - 19 * number, 17 * number % 256, 40))
        path = folder / f'{number}.png'
        image.save(path)
        paths.append(str(path))
    return paths
