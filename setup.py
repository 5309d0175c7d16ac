"""Everything but one file is in setup.cfg. The file is the .pth that lets the ordinary `swift` command find us: it must lie beside the
package, at the root of the wheel, in normal and in editable installs, and be listed in RECORD so that pip removes it.
"""

import base64
import hashlib
import shutil
import zipfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

PTH = Path(__file__).with_name('swift_megatron_grpo_autoload.pth')


class BuildPyWithPth(build_py):
    """Copies the .pth to the root of a normal wheel."""

    def run(self):
        super().run()
        if not self.editable_mode:
            shutil.copy(PTH, Path(self.build_lib) / PTH.name)


class EditableWheelWithPth(editable_wheel):
    """Adds the .pth to the wheel that an editable install is made of; setuptools puts nothing there but its own."""

    def run(self):
        super().run()
        for wheel in Path(self.dist_dir).glob('swift_megatron_grpo-*.whl'):
            add_to_wheel(wheel, PTH)


def add_to_wheel(wheel: Path, file: Path) -> None:
    """Append a file to a wheel's root and to its RECORD."""
    with zipfile.ZipFile(wheel) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    content = file.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b'=').decode()
    line = f'{file.name},sha256={digest},{len(content)}\n'
    with zipfile.ZipFile(wheel, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(file.name, content)
        for info, data in entries:
            if info.filename == file.name:
                continue
            if info.filename.endswith('.dist-info/RECORD') and file.name.encode() not in data:
                data = line.encode() + data
            archive.writestr(info, data)


setup(cmdclass={'build_py': BuildPyWithPth, 'editable_wheel': EditableWheelWithPth})
