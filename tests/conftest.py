"""What all tests share: one deterministic hypothesis profile, and the founding paper's two models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from moecost import ModelSpec

settings.register_profile(
    "moecost", derandomize=True, max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("moecost")


@pytest.fixture(scope="session")
def mixtral() -> ModelSpec:
    """Mixtral-8x7B: 32 layers of attention and 8 experts, 2 a token."""
    return ModelSpec.load("mixtral-8x7b")


@pytest.fixture(scope="session")
def blackmamba() -> ModelSpec:
    """BlackMamba-2.8B: 18 Mamba layers and 18 layers of 8 experts."""
    return ModelSpec.load("blackmamba-2.8b")


@pytest.fixture(scope="session")
def tool() -> Callable[[str], ModuleType]:
    """A script of `tools/`, as a module."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / "tools" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """A context in which a disk fills up in the middle of each text file."""

    def write_half(self: Path, text: str, encoding: str) -> None:
        self.write_bytes(text[: len(text) // 2].encode(encoding))
        raise OSError(28, "No space left on device")

    @contextmanager
    def full() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", write_half)
            yield

    return full
