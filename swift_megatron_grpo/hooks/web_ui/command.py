"""From the page's values to a `swift rlhf --backend megatron` command (import tier 0: standard library only).

ms-swift builds its own command by making an `RLHFArguments` object, which checks the arguments of the other trainer, and appends
`--ignore_args_error True`, with which a mistyped argument is a line in a log. Here the words are collected as ms-swift collects them, and
`args.resolve` judges them, as it does in the process that the command starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

from swift_megatron_grpo.args.values import FALSE
from swift_megatron_grpo.errors import UserError
from swift_megatron_grpo.hooks import command_line
from swift_megatron_grpo.hooks.web_ui import fields

_WORKER_OUTPUT = ('output_dir', 'logging_dir', 'add_version')
_NUMBER = re.compile(r'[-+]?[0-9]+|[-+]?(?:\d*\.*\d+)')
_TRUE, _FALSE = ('true', 'True'), ('false', 'False')  # ms-swift reads no other spelling of the page's texts as a truth value


@dataclasses.dataclass(kw_only=True, slots=True)
class Job:
    """A run as the page describes it, before it has a folder of its own."""

    words: list[str]
    """What follows `swift rlhf`, without output_dir and logging_dir."""
    environ: dict[str, str]
    """The variables that the page adds to its own process's."""
    model: str
    output: str
    """The folder in which the run gets a folder of its own."""
    versioned: bool
    logging: str
    """'' : `runs` in the run's folder."""
    server: tuple[str, str] | None
    """Host and port of the rollout server; None where none is used."""
    notes: list[str]
    """What the page itself changed; keys of `plan_view.NOTES`."""

    @property
    def key(self) -> str:
        """Two jobs of one key are the same command in the same environment."""
        text = json.dumps([self.words, self.environ, self.output, self.versioned, self.logging], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def argv(self) -> list[str]:
        """The complete arguments, with the run's folder not yet chosen: what a plan is made of."""
        return [*self.words, *_output_words(self.output, self.logging or os.path.join(self.output, 'runs'))]


def asked_backend(values: Mapping[str, Any]) -> str:
    """The backend that the page asks for: that of "Other params" where it names one, else the section's. '' and 'transformers' are ms-swift."""
    try:
        more = more_words(values.get('more_params'))
    except UserError:
        more = str(values.get('more_params')).split()  # ms-swift takes such a text too; where it is ours, `collect` refuses it
    return command_line.asked_backend(more) or str(values.get(fields.BACKEND.element) or '')


def more_words(text: Any) -> list[str]:
    """ "Other params" as words: a JSON object, or `--name value ...` as a shell reads it. Raises UserError for neither."""
    if not text or not str(text).strip():
        return []
    text = str(text).strip()
    if text.startswith('{'):
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f'Other params begins with {{ and is not valid JSON: {error}.') from None
        from swift_megatron_grpo.args.argv import config_argv

        return config_argv(config)
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f'Other params {text!r} cannot be read: {error}. Give --name value pairs, or a JSON object.') from None


def collect(
    values: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    is_list: Callable[[str], bool],
    drop_useless: Callable[[dict[str, Any]], None],
    device_variable: str,
) -> Job:
    """The job that the page describes.

    Args:
        values: element name to value, as the page sends them.
        defaults: `swift rlhf`'s own, by name; an argument that has its default is not written, as in ms-swift's command.
        is_list: whether an element's text is several words.
        drop_useless: ms-swift's own filter of arguments that belong to another tuner, optimizer or vLLM mode than is chosen.
        device_variable: CUDA_VISIBLE_DEVICES or its like; '' where there are no accelerators.

    Raises UserError where the page's values cannot be words of a command; what they mean is for the plan to judge.
    """
    given = {name: value for name, raw in values.items() if name in defaults and _is_given(value := _read(raw), defaults[name])}
    for name in (*_WORKER_OUTPUT, 'more_params', 'envs', 'train_stage'):
        given.pop(name, None)
    drop_useless(given)
    if values.get('use_muon') in (True, *_TRUE):
        given['optimizer'] = 'muon'
    given.pop('use_muon', None)
    notes: list[str] = []
    section = _section(values)
    _engine(given, values)
    if 'global_batch_size' in section and _read(values.get('gradient_accumulation_steps')) == 1:
        # The slider's lowest value, which the page writes into every command, says nothing beside a size that was typed.
        given.pop('gradient_accumulation_steps', None)
        notes.append('accumulation')
    _checkpoint_as_model(given)
    more = more_words(values.get('more_params'))
    words = ['--rlhf_type', 'grpo', '--backend', 'megatron']
    for name, value in given.items():
        words += [f'--{name}', *_words(value, is_list(name))]
    for name, text in section.items():
        words += [f'--{name}', *(text.split() if name == 'recompute_modules' else [text])]
    asked = {name: command_line.last_value(more, name) for name in _WORKER_OUTPUT}
    for name in _WORKER_OUTPUT:
        more = command_line.without(more, name)
    model = str(given.get('model') or '')
    is_server = given.get('vllm_mode') == 'server'
    return Job(
        words=[*words, *more],
        environ=_environment(values, device_variable),
        model=model,
        output=_folder(asked['output_dir'] or values.get('output_dir') or os.path.join('output', os.path.basename(model.rstrip('/')))),
        versioned=(asked['add_version'] or 'true').lower() not in FALSE,
        logging=_folder(asked['logging_dir']) if asked['logging_dir'] else '',
        server=(str(given.get('vllm_server_host', '127.0.0.1')), str(given.get('vllm_server_port', 8000))) if is_server else None,
        notes=notes,
    )


def start_command(job: Job, swift: str, now: time.struct_time) -> tuple[list[str], str, str]:
    """(command, output_dir, logging_dir) of a run that starts now, in a folder of its own."""
    output = os.path.join(job.output, _next_version(job.output, now)) if job.versioned else job.output
    logging = job.logging or os.path.join(output, 'runs')
    return [swift, 'rlhf', *job.words, *_output_words(output, logging)], output, logging


def shell_line(job: Job, command: list[str], log_file: str) -> str:
    """The command as the page shows it and saves it: what a person would type."""
    variables = ' '.join(f'{name}={shlex.quote(value)}' for name, value in job.environ.items())
    return f'{variables} nohup swift {shlex.join(command[1:])} > {shlex.quote(log_file)} 2>&1 &'.lstrip()


def _output_words(output: str, logging: str) -> list[str]:
    # Every worker carries its output_dir on its command line: the page finds its processes by it.
    return ['--add_version', 'False', '--output_dir', output, '--logging_dir', logging]


def _folder(path: Any) -> str:
    return os.path.abspath(os.path.expanduser(str(path)))


def _next_version(folder: str, now: time.struct_time) -> str:
    """The name that ms-swift gives a run's folder: v<one more than the last>-<time>."""
    there = os.listdir(folder) if os.path.isdir(folder) else []
    numbers = [int(found[1]) for found in (re.match(r'v(\d+)-', name) for name in there) if found]
    return f'v{max(numbers, default=-1) + 1}-{time.strftime("%Y%m%d-%H%M%S", now)}'


def _read(value: Any) -> Any:
    """Text of numbers and truth values as such, so that they can be compared with defaults."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text in (*_TRUE, *_FALSE):
        return text in _TRUE
    if _NUMBER.fullmatch(text):
        return int(text) if re.fullmatch(r'[-+]?[0-9]+', text) else float(text)
    return text


def _is_given(value: Any, default: Any) -> bool:
    """Whether a value says something: it is not empty, and not the default. An unchecked box is the default where that is no value."""
    if value is None or (not value and value != 0) or (value is False and default is None):
        return False
    return _read(default) != value


def _words(value: Any, is_list: bool) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return str(value).split() if is_list else [str(value)]


def _section(values: Mapping[str, Any]) -> dict[str, str]:
    """The section's own arguments. Controls that mirror one of ms-swift's come with ms-swift's."""
    result: dict[str, str] = {}
    for control in fields.CONTROLS:
        value = values.get(control.element)
        if not control.argument or control.mirrors or control is fields.BACKEND:
            continue
        if control.kind == 'check':
            if value in (True, *_TRUE):
                result[control.argument] = 'true'
        elif value not in (None, '') and str(value).strip() and str(value).strip() != control.value:
            result[control.argument] = str(value).strip()
    return result


def _engine(given: dict[str, Any], values: Mapping[str, Any]) -> None:
    """The page fills in vLLM's settings whether or not vLLM is chosen, and takes no mode for colocate; --vllm_mode alone would ask for vLLM."""
    if values.get('use_vllm') in (True, *_TRUE):
        given['use_vllm'] = True
        given.setdefault('vllm_mode', 'colocate')
        return
    for name in [name for name in given if name.startswith('vllm_') or name == 'sleep_level']:
        given.pop(name)
    given['use_vllm'] = False


def _checkpoint_as_model(given: dict[str, Any]) -> None:
    """A checkpoint of Megatron training that is chosen as the model is gone on from, with the model that it was made of."""
    folder = str(given.get('model') or '')
    saved_arguments = os.path.join(folder, 'args.json')
    if not folder or not os.path.isfile(saved_arguments) or not os.path.isfile(os.path.join(folder, 'latest_checkpointed_iteration.txt')):
        return
    try:
        with open(saved_arguments, encoding='utf-8') as file:
            saved = json.load(file)
    except (OSError, ValueError) as error:
        raise UserError(f'{saved_arguments} cannot be read: {error}.') from None
    given['resume_from_checkpoint'] = folder
    if saved.get('no_save_optim'):
        given['resume_only_model'] = True
    given['model'] = saved.get('model') or saved.get('model_dir') or folder
    for name in ('model_type', 'template'):
        if saved.get(name):
            given[name] = saved[name]


def _environment(values: Mapping[str, Any], device_variable: str) -> dict[str, str]:
    """Devices, number of processes, and the page's own line of variables, which wins."""
    chosen = values.get('gpu_id') or []
    devices = [str(device) for device in ([chosen] if isinstance(chosen, str) else chosen) if device]
    if 'cpu' in devices and len(devices) > 1:
        raise UserError(f'Choose GPUs or cpu, not both: {", ".join(devices)} are chosen.')
    environ: dict[str, str] = {}
    processes = str(values.get(fields.NUM_PROCESSES.element) or '').strip()
    if not processes and values.get('use_ddp') in (True, *_TRUE):
        processes = str(values.get('ddp_num') or '').strip()
    if not processes and len(devices) > 1:
        processes = str(len(devices))
    if processes:
        environ['NPROC_PER_NODE'] = processes
    if devices and devices != ['cpu'] and device_variable:
        environ[device_variable] = ','.join(devices)
    try:
        variables = shlex.split(str(values.get('envs') or ''))
    except ValueError as error:
        raise UserError(f'The environment variables {values.get("envs")!r} cannot be read: {error}. Give NAME=value pairs.') from None
    for word in variables:
        name, equals, value = word.partition('=')
        if not equals or not name.isidentifier():
            raise UserError(f'{word!r} among the environment variables is not of the form NAME=value.')
        environ[name] = value
    return environ
