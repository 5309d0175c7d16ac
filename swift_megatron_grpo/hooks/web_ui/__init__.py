"""The Megatron section of `swift web-ui`'s LLM GRPO tab (import tier 0; gradio and swift.ui are imported by the process that has them).

`fields.py` says what the section shows, `command.py` turns the page's values into the command, `plan_view.py` shows its plan, `tasks.py`
follows and stops a job, `section.py` is the section itself, `patches.py` puts all of it into ms-swift's page.
"""
