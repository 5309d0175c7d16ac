"""Local files and folders that a command names (import tier 0)."""

from __future__ import annotations

import ast
import difflib
import os
import re

from . import model_files
from .data_files import broken_rows
from .resume_checks import can_be_resumed
from .schedule import dataset_path, looks_local
from .translation import Translation

_TOKENIZER = re.compile(r'^tokenizer\.|vocab|^merges|^tokenization_|tiktoken|tekken|spiece|sentencepiece|\.model$', re.IGNORECASE)
DATA = ('dataset', 'val_dataset', 'chord_sft_dataset')


def paths(t: Translation) -> None:
    """Local files and folders that are named and are not there."""
    for name in (
        'model',
        'ref_model',
        'teacher_model',
        'mcore_model',
        'mcore_adapter',
        'mcore_ref_model',
        'mcore_ref_adapter',
        'resume_from_checkpoint',
        'replay_rollouts',
    ):
        path = t.effective(name)
        if name in ('mcore_model', 'mcore_adapter') and path == t.effective('resume_from_checkpoint'):
            continue  # said under the name that was given
        if isinstance(path, str) and (
            model_files.is_path(path) or name in ('resume_from_checkpoint', 'replay_rollouts') or name.startswith('mcore')
        ):
            _must_exist(t, name, path)
    for name in ('adapters', 'ref_adapters', 'reward_model', 'external_plugins', *DATA, 'custom_dataset_info'):
        for entry in t.effective(name) or []:
            path = dataset_path(entry)[0] if name.endswith('dataset') else entry
            if name.endswith('dataset'):
                local = looks_local(path) or _misspells_a_file(path)
            else:
                local = model_files.is_path(path) or name in ('external_plugins', 'custom_dataset_info')
            if local:
                _must_exist(t, name, path)
    for name in DATA:
        t.errors += [f'--{name}: {problem}' for problem in broken_rows(t.effective(name) or [])]
    _plugins(t)
    _adapters(t)
    _can_be_written(t, 'output_dir')
    _used_before(t)
    model = t.effective('model')
    if (
        isinstance(model, str)
        and os.path.isdir(os.path.expanduser(model))
        and not os.path.isfile(os.path.join(os.path.expanduser(model), 'config.json'))
    ):
        t.errors.append(f'--model {model} is a folder without config.json; give the folder that holds config.json and the safetensors.')
    if isinstance(model, str):
        _tokenizer(t, model)
    replay = t.effective('replay_rollouts')
    if isinstance(replay, str) and os.path.isdir(replay) and not os.path.isfile(os.path.join(replay, 'generation-000000.jsonl')):
        t.errors.append(f'--replay_rollouts {replay} holds no generation-000000.jsonl; give the folder that --save_rollouts wrote.')
    resume = t.effective('resume_from_checkpoint')
    if isinstance(resume, str) and os.path.isdir(resume):
        can_be_resumed(t, resume)


def _plugins(t: Translation) -> None:
    """Plugin files that Python cannot read."""
    for plugin in t.effective('external_plugins') or []:
        try:
            with open(os.path.expanduser(plugin), 'rb') as file:
                ast.parse(file.read())
        except SyntaxError as error:
            t.errors.append(f'--external_plugins {plugin}, line {error.lineno}: {error.msg}: {(error.text or "").strip()}')
        except (OSError, ValueError, RecursionError, MemoryError):
            continue  # said elsewhere, or for Python to say


def _adapters(t: Translation) -> None:
    """Local folders that are no adapters in PEFT's form."""
    for name in ('adapters', 'ref_adapters', 'reward_adapters'):
        for entry in t.effective(name) or []:
            folder = os.path.expanduser(entry)
            if not os.path.isdir(folder):
                continue
            there = os.listdir(folder)
            if 'adapter_config.json' not in there:
                whole = ' It holds a whole model, which goes to --model (or --ref_model).' if 'config.json' in there else ''
                t.errors.append(f'--{name} {entry} is no adapter: it has no adapter_config.json.{whole}')
            elif not {'adapter_model.safetensors', 'adapter_model.bin'} & set(there):
                t.errors.append(f'--{name} {entry} has adapter_config.json and no weights (adapter_model.safetensors). Give a complete checkpoint.')


def _tokenizer(t: Translation, model: str) -> None:
    """A folder with weights and without what encodes a prompt: transformers makes an empty tokenizer of it."""
    folder = os.path.expanduser(model)
    there = os.listdir(folder) if os.path.isdir(folder) else []
    if any(name.endswith(('.safetensors', '.bin')) for name in there) and not any(_TOKENIZER.search(name) for name in there):
        t.errors.append(
            f'--model {model} has weights and no tokenizer (tokenizer.json, tokenizer.model, vocab.json or their like). Copy the files of the '
            'model that it was made from into the folder.'
        )


def _can_be_written(t: Translation, name: str) -> None:
    """Whether a folder is there and can be written, or could be made. A dry run may be on another machine than the run."""
    path = os.path.abspath(os.path.expanduser(str(t.effective(name))))
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        t.errors.append(f'--{name} {t.effective(name)} cannot be made: {path} is not a folder.')
    elif not os.access(path, os.W_OK) and not t.elsewhere:
        (t.errors if t.asked('dry_run') in (None, 'false') else t.warnings).append(
            f'--{name} {t.effective(name)} cannot be written here: there is no permission to write in {path}.'
        )


def _used_before(t: Translation) -> None:
    """Two runs in one folder: their checkpoints replace each other, and their logs become one file."""
    folder = os.path.expanduser(str(t.effective('output_dir')))
    if t.effective('add_version') or t.effective('resume_from_checkpoint') or not os.path.isdir(folder):
        return
    steps = [int(name.removeprefix('checkpoint-')) for name in os.listdir(folder) if re.fullmatch(r'checkpoint-\d+', name)]
    if steps:
        last = os.path.join(t.effective('output_dir'), f'checkpoint-{max(steps)}')
        t.warnings.append(
            f'{last} is of an earlier run, and with --add_version false this run writes into the same folder: checkpoints of the same step are '
            f'replaced, logs are mixed. To go on from it: --resume_from_checkpoint {last}. Else give another --output_dir.'
        )


def _misspells_a_file(path: str) -> bool:
    """Whether a name without a slash, which no hub has, is close to a file in this folder."""
    if '/' in path or '.' not in path or os.path.exists(path):
        return False
    return bool(difflib.get_close_matches(path, os.listdir('.'), n=1, cutoff=0.8))


def _must_exist(t: Translation, name: str, path: str) -> None:
    full = os.path.expanduser(path)
    if os.path.exists(full):
        return
    folder = os.path.dirname(full) or '.'
    there = os.listdir(folder) if os.path.isdir(folder) else []
    close = difflib.get_close_matches(os.path.basename(full), there, n=1, cutoff=0.6)
    near = (
        f' There is {os.path.join(os.path.dirname(path), close[0])}.'
        if close
        else ''
        if there
        else f' The folder {folder} does not exist either.'
    )
    (t.warnings if t.elsewhere else t.errors).append(f'--{name} {path} does not exist{" here" if t.elsewhere else ""}.{near}')
