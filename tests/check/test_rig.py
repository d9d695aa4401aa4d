"""What a report says of the machine."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch

from torpor.check.rig import processor_name, this_rig
from torpor.check.version import torpor_version


def test_this_machine_has_threads_and_memory() -> None:
    rig = this_rig()
    assert rig.torch == torch.__version__
    assert rig.torch_threads == torch.get_num_threads()
    assert 1 <= rig.usable_cpus <= rig.logical_cpus
    assert rig.memory_bytes > 2**28
    assert rig.to_dict()["torpor"] == torpor_version()


def test_the_version_has_three_numbers() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", torpor_version())


def test_the_processor_is_named_as_linux_names_it(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Wheel of Ada\n")
    assert processor_name(cpuinfo) == "Wheel of Ada"


def test_a_processor_without_a_name_has_its_machine_type(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert processor_name(cpuinfo) == platform.machine()
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 48.00\n")
    assert processor_name(cpuinfo) == platform.machine()
