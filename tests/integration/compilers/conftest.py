"""Real compilers, one child each for a module's tests: jaxlib's CPU client, and libtpu by topology."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.compilers import new_compiler
from torchtpu_cache.compilers.base import Compiler


@pytest.fixture(scope="session")
def memo_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memo")


@pytest.fixture(scope="module")
def cpu(memo_dir: Path) -> Iterator[Compiler]:
    with new_compiler("cpu", memo_dir) as compiler:
        yield compiler


@pytest.fixture(scope="module")
def tpu(memo_dir: Path) -> Iterator[Compiler]:
    with new_compiler("tpu", memo_dir) as compiler:
        yield compiler
