"""The section itself, in ms-swift's page (import tier 0: gradio is imported by the process that shows the page)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from swift_megatron_grpo.hooks.web_ui import fields
from swift_megatron_grpo.hooks.web_ui.fields import Control

_IN_A_ROW = 4
PLAN = fields.PREFIX + 'plan'
FOLLOWS_NOTHING = ('GRPORuntime', 'LLMRollout')
"""ms-swift's parts of the tab whose elements are no settings of a run: a change of theirs does not ask for a new plan."""


def section_class(base_ui: Any, show_plan: Callable[..., tuple[str, str]]) -> Any:
    """The section as a sub-class of ms-swift's `BaseUI`.

    Args:
        base_ui: `swift.ui.base.BaseUI`.
        show_plan: takes the values of all elements of the tab, in the tab's order; returns the plan as HTML and the key of its command
            ('' , '' where the section is switched off).
    """
    import gradio as gr

    class Megatron(base_ui):
        group = 'llm_grpo'
        locale_dict = fields.locale()

        @classmethod
        def do_build_ui(cls, base_tab: Any) -> None:
            with gr.Accordion(elem_id='megatron_param', open=True):
                with gr.Row():
                    _add(fields.BACKEND)
                    _add(fields.NUM_PROCESSES)
                with gr.Column(visible=False, elem_id='megatron_settings') as settings:
                    for name, group in zip(('layout', 'batch', 'recompute', 'engine', 'sync'), fields.GROUPS, strict=True):
                        with gr.Accordion(elem_id=f'megatron_{name}', open=True):
                            for start in range(0, len(group), _IN_A_ROW):
                                with gr.Row():
                                    for control in group[start : start + _IN_A_ROW]:
                                        _add(control)
                    gr.Textbox(elem_id=fields.PLAN_KEY, visible=False)
                    cls.element_dict[PLAN] = gr.HTML(elem_id=PLAN)
            backend = cls.element(fields.BACKEND.element)
            backend.change(lambda value: gr.update(visible=value == 'megatron'), [backend], [settings], show_progress='hidden')

        @classmethod
        def after_build_ui(cls, base_tab: Any) -> None:
            _mirror(cls, base_tab)
            elements = base_tab.valid_elements()
            elsewhere = {name for ui in base_tab.sub_ui if ui.__name__ in FOLLOWS_NOTHING for name in ui.elements()}
            asking = [element for name, element in elements.items() if name not in elsewhere and name != fields.PLAN_KEY]
            outputs = [cls.element(PLAN), cls.element(fields.PLAN_KEY)]
            # One listener of many elements; while it is busy the changes that come in are answered once, with the values of then.
            gr.on(
                [element.change for element in asking],
                show_plan,
                list(elements.values()),
                outputs,
                show_progress='hidden',
                trigger_mode='always_last',
            )
            base_tab.element('submit').click(show_plan, list(elements.values()), outputs, show_progress='hidden')

    def _add(control: Control) -> None:
        common = {'elem_id': control.element, 'scale': 4, 'min_width': 160}
        if control.kind == 'check':
            gr.Checkbox(value=control.value, **common)
        elif control.kind == 'choice':
            gr.Dropdown(choices=list(control.choices), value=control.value, allow_custom_value=control.free, **common)
        else:
            gr.Textbox(value=control.value, lines=1, max_lines=1, **common)

    def _mirror(section: Any, base_tab: Any) -> None:
        """Both places show one setting. The browser copies it: no moment in which a start could read the old value from the server's turn."""
        for control in fields.CONTROLS:
            if not control.mirrors:
                continue
            ours, theirs = section.element(control.element), base_tab.element(control.mirrors)
            ours.input(None, [ours], [theirs], js='value => value', show_progress='hidden')
            theirs.change(None, [theirs], [ours], js='value => value', show_progress='hidden')

    return Megatron


def values_of(keys: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """What the page sent, by element name."""
    assert len(keys) == len(values), (len(keys), len(values))
    return dict(zip(keys, values))
