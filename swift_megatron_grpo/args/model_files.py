"""Where a model's config.json lies, without loading anything (import tier 0)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def is_path(name: str) -> bool:
    """Whether a model name can only be a path: it begins as one, or has more parts than organisation/name."""
    return name.startswith(('/', './', '../', '~', '.\\\\')) or name.count('/') > 1 or name in ('.', '..')


def find_config(name: str, environ: Mapping[str, str]) -> Path | None:
    """The config.json of a local folder, or of a model that the Hugging Face or ModelScope cache holds; None where there is none."""
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        config = folder / 'config.json'
        return config if config.is_file() else None
    if name.count('/') != 1:
        return None
    home = Path(environ.get('HOME') or os.path.expanduser('~'))
    hub = Path(environ.get('HF_HUB_CACHE') or Path(environ.get('HF_HOME') or home / '.cache' / 'huggingface') / 'hub')
    candidates = sorted((hub / f'models--{name.replace("/", "--")}' / 'snapshots').glob('*/config.json'))
    modelscope = Path(environ.get('MODELSCOPE_CACHE') or home / '.cache' / 'modelscope')
    for root in (modelscope / 'hub' / 'models', modelscope / 'models', modelscope / 'hub'):
        candidates.append(root / name.replace('.', '___') / 'config.json')
        candidates.append(root / name / 'config.json')
    return next((path for path in candidates if path.is_file()), None)


def read_config(path: Path) -> dict[str, Any] | None:
    """The configuration, or None where it is no JSON object."""
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a configuration (multimodal models nest it)."""
    for key in ('text_config', 'llm_config', 'language_config'):
        if isinstance(config.get(key), dict):
            return {**config, **config[key]}
    thinker = config.get('thinker_config')
    return text_config(thinker) if isinstance(thinker, dict) else config
