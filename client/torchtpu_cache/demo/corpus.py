"""The demo's programs: real StableHLO modules that come with the source tree and with the wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from torchtpu_cache_core.errors import ConfigError

DEFAULT_MODULES: Final = (
    "jax_mlp4_sgd_step",
    "jax_tfm6_adamw_step",
    "torch_flux_1x1_inf",
    "torch_gemma2_fwd",
    "torch_llama2_bwd",
    "torch_llama2_fwd",
    "torch_resnet18_fwd",
    "torchtpu_zoo_0",
)
"""A mix of training and inference, JAX and PyTorch, that takes about a minute and a half for both targets."""


def modules(full: bool) -> list[Path]:
    """The modules to show, eight or all.

    Raises:
        ConfigError: they are not where this package was installed from.
    """
    packaged = Path(__file__).with_name("modules")
    checkout = Path(__file__).resolve().parents[3] / "tests" / "data" / "corpus"
    folder = packaged if packaged.is_dir() else checkout
    found = sorted(folder.glob("*.mlirbc"))
    if not found:
        raise ConfigError("the demo's modules are missing; install torchtpu-cache from its wheel or its source tree")
    return found if full else [path for path in found if path.stem in DEFAULT_MODULES]
