"""What makes ms-swift's LLM GRPO tab know this package's backend (import tier 0 until the page is built)."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from swift_megatron_grpo.args import Plan
from swift_megatron_grpo.args.argv import split
from swift_megatron_grpo.errors import UserError
from swift_megatron_grpo.hooks import doors
from swift_megatron_grpo.hooks.web_ui import command, fields, plan_view, tasks
from swift_megatron_grpo.hooks.web_ui.section import section_class, values_of
from swift_megatron_grpo.passport import Passport, PatchRegistry

REGISTRY = PatchRegistry('web_ui')
_VERSIONS = 'ms-swift>=4.6,<4.7'
_GRPO = 'swift.ui.llm_grpo.llm_grpo'
_RUNTIME = 'swift.ui.llm_train.runtime'
START_S = 120.0
"""How long the page may take for its first answer."""


def _module(name: str) -> Any:
    return sys.modules[name]


# -- the section and its command -----------------------------------------------------------------------------------------------------------


@REGISTRY.patch(
    Passport(
        name='megatron-section',
        target='swift.ui.llm_grpo.llm_grpo:LLMGRPO.sub_ui, swift.ui.llm_grpo.llm_grpo:LLMGRPO.arguments, '
        'swift.ui.llm_grpo.hyper:GRPOHyper.do_build_ui',
        breaks='the tab has no settings for Megatron',
        reference='swift/ui/llm_grpo/llm_grpo.py, LLMGRPO.do_build_ui (ms-swift 4.6.0): the parts of the page are named one by one',
        versions=_VERSIONS,
        remove_when='ms-swift builds what `sub_ui` lists, or has a registry of sections',
    )
)
def _section() -> None:
    module = _module(_GRPO)
    grpo, hyper = module.LLMGRPO, module.GRPOHyper
    section = section_class(module.BaseUI, functools.partial(_show_plan, grpo))
    grpo.sub_ui = [*grpo.sub_ui, section]
    grpo.arguments = {**grpo.arguments, **fields.arguments()}  # the dictionary is LLMTrain's
    original = hyper.do_build_ui.__func__

    def do_build_ui(cls: Any, base_tab: Any) -> None:
        original(cls, base_tab)
        section.build_ui(base_tab)

    hyper.do_build_ui = classmethod(do_build_ui)


@REGISTRY.patch(
    Passport(
        name='megatron-command',
        target='swift.ui.llm_grpo.llm_grpo:LLMGRPO.train, swift.ui.llm_grpo.llm_grpo:LLMGRPO.train_local',
        breaks='the page checks the arguments of the transformers trainer (of DPO, in fact), leaves out what it does not know, and adds '
        '--ignore_args_error True, with which `--backend megatron` and mistyped names are lines in a log',
        reference='swift/ui/llm_train/llm_train.py, LLMTrain.train (ms-swift 4.6.0)',
        versions=_VERSIONS,
        remove_when='ms-swift lets a plugin add a backend to the page',
    )
)
def _command() -> None:
    grpo = _module(_GRPO).LLMGRPO
    train, train_local = grpo.train.__func__, grpo.train_local.__func__

    def ours(cls: Any, args: tuple[Any, ...]) -> bool:
        return command.asked_backend(values_of(cls.valid_element_keys(), args)) not in ('', 'transformers')

    def train_here(cls: Any, *args: Any) -> Any:
        return _train(cls, values_of(cls.valid_element_keys(), args)) if ours(cls, args) else train(cls, *args)

    def train_local_here(cls: Any, *args: Any) -> Any:
        if ours(cls, args) and not _was_shown(cls, values_of(cls.valid_element_keys(), args)):
            import gradio as gr

            gr.Warning(plan_view.word('look', cls.lang))
            return [gr.skip()] * 5
        return train_local(cls, *args)

    grpo.train = classmethod(train_here)
    grpo.train_local = classmethod(train_local_here)


@REGISTRY.patch(
    Passport(
        name='record-names-the-backend',
        target='swift.ui.llm_grpo.llm_grpo:LLMGRPO.update_all_settings',
        breaks='a train record of the transformers backend that is loaded while the section says megatron would be trained on Megatron',
        reference='swift/ui/base.py, BaseUI.update_all_settings (ms-swift 4.6.0): what a record does not hold stays as it is',
        versions=_VERSIONS,
        remove_when='train records hold every element of the page',
    )
)
def _record() -> None:
    grpo = _module(_GRPO).LLMGRPO
    original = grpo.update_all_settings.__func__

    def update_all_settings(cls: Any, model: str, train_record: str, base_tab: Any) -> Any:
        updates = original(cls, model, train_record, base_tab)
        keys = list(base_tab.valid_elements())
        if train_record and fields.BACKEND.element not in cls.load_cache(model, train_record):
            import gradio as gr

            updates[keys.index(fields.BACKEND.element)] = gr.update(value='transformers')
        return updates

    grpo.update_all_settings = classmethod(update_all_settings)


def _job(cls: Any, values: Mapping[str, Any]) -> command.Job:
    from transformers.utils import is_torch_cuda_available, is_torch_npu_available

    def drop_useless(given: dict[str, Any]) -> None:
        cls.remove_useless_args(given, cls.prepare_sub_to_filter())

    elements = cls.valid_elements()
    variable = 'ASCEND_RT_VISIBLE_DEVICES' if is_torch_npu_available() else 'CUDA_VISIBLE_DEVICES' if is_torch_cuda_available() else ''
    return command.collect(
        values,
        defaults=cls.default_dict,
        is_list=lambda name: bool(getattr(elements.get(name), 'is_list', False)),
        drop_useless=drop_useless,
        device_variable=variable,
    )


def _plan(job: command.Job, *, dry_run: bool) -> Plan:
    """What the started process will make of the job; a dry run has the estimate of memory too."""
    environ = {**os.environ, **job.environ}
    return doors.resolve_ours([*job.argv, *(['--dry_run', 'true'] if dry_run else [])], environ)


def _show_plan(cls: Any, *args: Any) -> tuple[str, str]:
    """The plan of the page's values as HTML, and the key of its command."""
    values = values_of(cls.valid_element_keys(), args)
    try:
        if command.asked_backend(values) in ('', 'transformers'):
            return '', ''
        job = _job(cls, values)
        return plan_view.html(_plan(job, dry_run=True), job.notes, cls.lang), job.key
    except UserError as error:
        return plan_view.refusal(str(error), cls.lang), ''


def _was_shown(cls: Any, values: Mapping[str, Any]) -> bool:
    """Whether the page shows the plan of just these values. Raises for values that make no command, and for a plan with errors."""
    with _shown_errors():
        job = _job(cls, values)
        _refuse(_plan(job, dry_run=False), cls.lang)
    return values.get(fields.PLAN_KEY) == job.key


def _refuse(plan: Plan, lang: str) -> None:
    if plan.errors:
        import gradio as gr

        raise gr.Error(plan_view.error_text(plan.errors, lang), duration=None)


class _shown_errors:
    """A UserError inside is shown by the page."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, UserError):
            import gradio as gr

            raise gr.Error(escape(str(error)), duration=None) from None


def _train(cls: Any, values: Mapping[str, Any]) -> tuple[list[str], dict[str, str], str, str, Any, Mapping[str, Any]]:
    """What ms-swift's `train` returns: command, variables, log file, the command as shown, arguments, the page's other values."""
    with _shown_errors():
        job = _job(cls, values)
        _refuse(_plan(job, dry_run=False), cls.lang)
    started, output, logging = command.start_command(job, _swift(), time.localtime())
    log_file = os.path.join(logging, 'run.log')
    if job.model:
        cls.save_cache(job.model, {name: value for name, value in values.items() if name != fields.PLAN_KEY})
    arguments = SimpleNamespace(
        model=job.model,
        output_dir=output,
        logging_dir=logging,
        vllm_mode='server' if job.server else None,
        vllm_server_host=job.server[0] if job.server else None,
        vllm_server_port=job.server[1] if job.server else None,
    )
    return started, job.environ, log_file, command.shell_line(job, started, log_file), arguments, values


def _swift() -> str:
    """The `swift` of this interpreter: the one that the shell finds first may belong to an environment without this package."""
    beside = Path(sys.executable).with_name('swift')
    return str(beside) if beside.is_file() else 'swift'


# -- the run on the page -------------------------------------------------------------------------------------------------------------------


@REGISTRY.patch(
    Passport(
        name='grpo-runtime-tasks',
        target='swift.ui.llm_train.runtime:Runtime._is_known_task',
        breaks='the GRPO tab refuses the log, the curves and the stop button of live GRPO jobs with "Rejected unknown task"',
        reference='swift/ui/llm_train/runtime.py, class Runtime (ms-swift 4.6.0): wait and kill_task ask Runtime, whose group is llm_train, '
        'and not the tab',
        versions=_VERSIONS,
        remove_when='the check asks the subclass of the tab',
    )
)
def _known_tasks() -> None:
    runtime, grpo_runtime = _module(_RUNTIME).Runtime, _module(_GRPO).GRPORuntime
    original = runtime._is_known_task.__func__

    def is_known_task(cls: Any, task: Any) -> bool:
        return bool(original(cls, task) or (cls is runtime and original(grpo_runtime, task)))

    runtime._is_known_task = classmethod(is_known_task)


@REGISTRY.patch(
    Passport(
        name='arguments-that-args-json-lacks',
        target='swift.ui.llm_train.runtime:Runtime.parse_info_from_cmdline',
        breaks='the curves of a Megatron job stay empty, as its args.json has no logging_dir',
        reference='swift/ui/llm_train/runtime.py, Runtime.parse_info_from_cmdline (ms-swift 4.6.0): each argument of the command line is replaced '
        'by what output_dir/args.json says, also where that says nothing',
        versions=_VERSIONS,
        remove_when='an argument that args.json does not name keeps its value',
    )
)
def _saved_arguments() -> None:
    runtime = _module(_RUNTIME).Runtime
    original = runtime.parse_info_from_cmdline

    def parse_info_from_cmdline(task: str) -> tuple[Any, dict[str, Any]]:
        pid, arguments = original(task)
        words = task.partition(' rlhf ')[2].split()
        if tasks.asks_for_megatron(words):
            typed = {name: ' '.join(values) for name, values in split(words)[0]}
            arguments = {name: typed.get(name) if value is None else value for name, value in arguments.items()}
        return pid, arguments

    runtime.parse_info_from_cmdline = staticmethod(parse_info_from_cmdline)


@REGISTRY.patch(
    Passport(
        name='follow-a-megatron-job',
        target='swift.ui.llm_train.runtime:Runtime.wait',
        breaks='the log stops after 25 s without a line, and following it takes a whole core while a progress bar is drawn',
        reference='swift/ui/llm_train/runtime.py, Runtime.wait (ms-swift 4.6.0)',
        versions=_VERSIONS,
        remove_when='the loop sleeps on an unfinished line and ends with the process',
    )
)
def _follow() -> None:
    runtime = _module(_RUNTIME).Runtime
    original = runtime.wait.__func__

    def wait(cls: Any, logging_dir: str, task: str) -> Iterator[list[Any]]:
        process = tasks.process_of(task)
        folder = cls._validate_logging_dir(logging_dir) if process is not None and logging_dir else None
        if folder is None:
            yield from original(cls, logging_dir, task)
            return
        import gradio as gr

        runtime.log_event[folder] = False
        shown = tasks.follow(
            os.path.join(folder, 'run.log'),
            is_alive=lambda: tasks.process_of(task) is not None,
            is_stopped=lambda: bool(runtime.log_event.get(folder)),
            events=lambda: tasks.event_files(folder),
        )
        for text, has_new_points in shown:
            curves = runtime.plot(task) if has_new_points else [gr.skip()] * len(runtime.get_plot(task))
            yield [gr.update(value=text), *curves]

    runtime.wait = classmethod(wait)


@REGISTRY.patch(
    Passport(
        name='kinder-stop',
        target='swift.ui.llm_grpo.runtime:GRPORuntime.kill_task',
        breaks='the stop button kills a Megatron job at once (`pkill -9 -f <output_dir>`), and what was trained since the last checkpoint is lost',
        reference='swift/ui/llm_train/runtime.py, Runtime.kill_task (ms-swift 4.6.0)',
        versions=_VERSIONS,
        remove_when='the page can ask a job to end',
    )
)
def _kinder_stop() -> None:
    module = _module(_GRPO)
    runtime = module.GRPORuntime
    original = runtime.kill_task
    stopper = tasks.Stopper()

    def kill_task(task: str) -> list[Any]:
        process = tasks.process_of(task)
        if process is None:
            return original(task)
        import gradio as gr

        gr.Info(plan_view.word('stopping', runtime.lang).format(tasks.GRACE_S))
        if not stopper.stop(process):
            gr.Warning(plan_view.word('still_running', runtime.lang))
        return [runtime.refresh_tasks(group='llm_grpo'), gr.skip(), *[gr.skip()] * len(runtime.grpo_plot)]

    runtime.kill_task = staticmethod(kill_task)


# -- the page itself -----------------------------------------------------------------------------------------------------------------------


@REGISTRY.patch(
    Passport(
        name='patience-at-the-start',
        target='gradio.networking:url_ok',
        breaks='on a machine that trains, `swift web-ui` ends at its start with "When localhost is not accessible, a shareable link must be created"',
        reference='gradio/networking.py, url_ok (gradio 5.32.1): the page, which is large here, has 3 s for its first answer, and one try',
        versions='gradio>=5.32.1,<6',
        remove_when='url_ok tries again after a time-out',
    )
)
def _patience() -> None:
    from gradio import networking

    original = networking.url_ok

    def url_ok(url: str) -> bool:
        end = time.monotonic() + START_S
        while not original(url):
            if time.monotonic() > end:
                return False
            time.sleep(0.5)
        return True

    networking.url_ok = url_ok
