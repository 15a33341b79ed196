"""JAX on this cache: what `jax.jit` compiles is looked up in memory, on disk and at the remote first.

    import torchtpu_cache.jax

    torchtpu_cache.jax.enable()

before the first computation, or, without a change to the code, `TORCHTPU_CACHE_JAX=1`. docs/jax.md says what is
cached, what is bypassed, and how entries are keyed.
"""

from __future__ import annotations

from typing import Any

__all__ = ["disable", "enable", "stats"]

# What follows is imported at the first call: JAX imports this package in every job, also where nobody asks for it.


def enable() -> bool:
    """Has JAX ask this cache before it compiles. Enabling twice is harmless.

    To be called before the first computation and after flags are set: what `XLA_FLAGS` and the like say now counts
    for every program, and where they change later, programs are compiled without the cache.

    Returns:
        Whether JAX asks now. False, with one warning, where this release of JAX does not take it, and where the mode
        is off: JAX is then as it was.

    Raises:
        CompilerMissing: jax is not installed here.
    """
    from torchtpu_cache.jax import plug

    return plug.enable()


def disable() -> None:
    """Leaves JAX as it was before `enable`; harmless where it was not enabled."""
    from torchtpu_cache.jax import plug

    plug.disable()


def stats() -> dict[str, Any]:
    """What this process's cache counted: `hits` by tier, `compiled`, `bypassed` by reason, `seconds_saved` and more."""
    from torchtpu_cache.jax import plug

    return plug.stats()
