"""`swift web-ui` as a process, its page in headless Chromium, and a small job to start from it. Nothing here is imported by other tests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swift_megatron_grpo.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
BROWSERS = ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable')
BROWSER_FLAGS = (
    '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update',
    '--disable-sync',
)  # fmt: skip
PATIENCE_MS = 90_000  # two cores that train at the same time
START_S = 400.0
REWARD = '''
from swift.rewards import ORM, orms


class ShareOfDigits(ORM):

    def __call__(self, completions, **kwargs):
        return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


orms['share_of_digits'] = ShareOfDigits
'''


def missing() -> str:
    """Why the page cannot be tested here; '' where it can."""
    for name in ('gradio', 'playwright'):
        if importlib.util.find_spec(name) is None:
            return f'{name} is not installed here; `make test-webui` makes an environment that has it'
    if browser_path() is None:
        return f'no browser: none of {", ".join(BROWSERS)} is on the PATH (Debian: apt-get install chromium fonts-dejavu-core)'
    if not Path(sys.executable).with_name('swift').is_file():
        return 'this environment has no swift command; `make test-webui` makes one that has'
    return ''


def browser_path() -> str | None:
    return next((found for found in map(shutil.which, BROWSERS) if found), None)


@contextlib.contextmanager
def web_ui(folder: Path, lang: str) -> Iterator[str]:
    """The address of a `swift web-ui` that runs in `folder`.

    Its page is not asked for before it says that it runs: gradio looks at its own page with a limit of 3 s and gives up on a busy machine, in
    which case the start is tried again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for attempt in (1, 2, 3):
        port = free_port()
        log = folder / f'web-ui-{attempt}.log'
        ours = {'WEBUI_SERVER': '127.0.0.1', 'WEBUI_PORT': str(port), 'SWIFT_UI_LANG': lang, 'BROWSER': '/bin/true', 'GRADIO_ANALYTICS_ENABLED': 'False'}
        offline = {'HF_HUB_OFFLINE': '1', 'USE_HF': '1', 'MODELSCOPE_OFFLINE': '1', 'TOKENIZERS_PARALLELISM': 'false', 'OMP_NUM_THREADS': '1'}
        caches = {'MODELSCOPE_CACHE': str(folder / 'cache')}  # train records are kept there
        path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
        with log.open('w') as file:
            process = subprocess.Popen(
                [Path(sys.executable).with_name('swift'), 'web-ui'],
                cwd=folder,
                env={**os.environ, **ours, **offline, **caches, 'PATH': path},
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        try:
            if _runs(process, log):
                yield f'http://127.0.0.1:{port}'
                return
        finally:
            _end(process)
    raise AssertionError(f'swift web-ui did not start; the end of {log}:\n{log.read_text()[-3000:]}')


def _runs(process: subprocess.Popen, log: Path) -> bool:
    begun = time.monotonic()
    while time.monotonic() - begun < START_S and process.poll() is None:
        if 'To create a public link' in log.read_text():
            return True
        time.sleep(1.0)
    return False


def _end(process: subprocess.Popen) -> None:
    """The command and the process that it started (ms-swift's `swift` waits for that one and passes no signal on)."""
    import psutil

    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    except psutil.Error:
        return
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.terminate()
    process.wait(timeout=30)
    _, left = psutil.wait_procs(family[1:], timeout=30)
    for member in left:
        with contextlib.suppress(psutil.Error):
            member.kill()


def small_job(folder: Path) -> dict[str, str]:
    """The demonstration's model, not warmed up, its data, and a reward that is not constant. Paths by name."""
    import torch

    from examples.demo import model as models
    from examples.demo import problems

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    tokenizer = problems.build_tokenizer()
    models.build_model(tokenizer).save_pretrained(folder / 'model')
    tokenizer.save_pretrained(folder / 'model')
    problems.write_dataset(problems.split_problems().train[:64], folder / 'sums.jsonl')
    (folder / 'share_of_digits.py').write_text(REWARD)
    return {'model': str(folder / 'model'), 'dataset': str(folder / 'sums.jsonl'), 'plugin': str(folder / 'share_of_digits.py')}


class GrpoTab:
    """The LLM GRPO tab of a page: elements by ms-swift's names. Other tabs have elements of the same names, so only visible ones count."""

    def __init__(self, browser: Any, address: str) -> None:
        self.page = browser.new_page(viewport={'width': 1400, 'height': 1000})
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.goto(address)
        self.page.get_by_role('tab', name='LLM GRPO').click()
        self.page.locator('#megatron_backend').wait_for()

    def element(self, name: str) -> Any:
        return self.page.locator(f'#{name}:visible')

    def open(self, name: str) -> None:
        """Open an accordion; an open one stays open."""
        button = self.element(name).locator('> button')
        if 'open' not in (button.get_attribute('class') or ''):
            button.click()

    def fill(self, name: str, text: str) -> None:
        self.element(name).locator('textarea, input').first.fill(text)

    def choose(self, name: str, option: str) -> None:
        """An option of a dropdown; typing narrows a long list."""
        self.element(name).locator('input').fill(option)
        self.page.get_by_role('option', name=option, exact=True).click()

    def type_choice(self, name: str, text: str) -> None:
        """A value that a dropdown does not list. In one of several values it becomes one more."""
        box = self.element(name).locator('input')
        box.fill(text)
        box.press('Enter')

    def check(self, name: str, wanted: bool) -> None:
        self.element(name).locator('input[type=checkbox]').set_checked(wanted)

    def is_checked(self, name: str) -> bool:
        return bool(self.element(name).locator('input[type=checkbox]').is_checked())

    def number(self, name: str, value: int) -> None:
        """The number beside a slider."""
        box = self.element(name).locator('input[type=number]')
        box.fill(str(value))
        box.press('Enter')

    def press(self, name: str) -> None:
        self.element(name).click()

    @property
    def plan(self) -> str:
        """The plan as it is shown now; '' while there is none."""
        found = self.page.locator('#megatron_plan .megatron-plan')
        return found.inner_text() if found.count() else ''

    def wait_for_plan(self, *texts: str, absent: tuple[str, ...] = ()) -> str:
        return self.wait_for('plan', lambda: self.plan, *texts, absent=absent)

    def wait_for(self, what: str, read: Any, *texts: str, absent: tuple[str, ...] = (), seconds: float = PATIENCE_MS / 1000) -> str:
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            text = read()
            if text and all(part in text for part in texts) and not any(part in text for part in absent):
                return text
            self.page.wait_for_timeout(250)
        raise AssertionError(f'the {what} never had {texts} without {absent}; at the end:\n{read()}')

    def toast(self) -> str:
        """The text of the message that the page shows now."""
        found = self.page.locator('.toast-body')
        return ' '.join(found.all_inner_texts())

    def value(self, name: str) -> str:
        return self.element(name).locator('textarea, input').first.input_value()

    def curves(self) -> list[str]:
        """The labels of the plots that have a picture."""
        plots = self.page.locator('.block:visible', has=self.page.locator('img[src^="data:image"]'))
        return [text.split('\n')[0] for text in plots.all_inner_texts()]
