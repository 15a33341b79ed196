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
    for every program, and where they change later, programs are compiled without the cache. What JAX has compiled
    before is not in the cache; one warning says so, where the release of JAX can tell (after 0.4.30).

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
    """What this process's cache counted since it was first enabled, also after `disable`; zeros before.

    Programs are counted in three ways. What was asked for: `requests` = all `hits` + `missed` + all `bypassed`, but
    for what is being looked up in this moment. What was compiled: `missed` + all `bypassed` = `compiled` +
    `compile_failures`, but for what is being compiled, and for what is bypassed and in JAX's own cache. And what
    becomes of it, below. Where a key has labels, its value is a count for each that occurred.

    - `requests`: programs that JAX asked for.
    - `hits`: by tier (`memory`, `disk`, `remote`), loaded by JAX.
    - `missed`: looked up, and had nowhere; under the mode `record` all that are not bypassed.
    - `bypassed`: by reason, compiled without the cache.
    - `compiled`, `compile_failures`: programs that XLA made, and those that it refused.
    - `compile_seconds`, `seconds_saved`: what compiles took, and what hits spared, less what they took.
    - `tier_misses`: by tier that was asked and had no entry.
    - `failures`: by `tier.kind`; a tier that failed is no miss.
    - `skipped`: by `tier.reason`, tiers that were not asked.
    - `published`: by the remote's answer to an upload (`created`, `same`, `conflict`).
    - `not_published`: by reason, what was compiled and is not shared: `cheap` took less than 10 ms to compile, and
      stays on its machine.
    - `storing`: what was compiled and is not stored on this machine yet, nor on its way to the remote.
    - `spooled`: entries on this machine's disk that wait for the remote now, those of other jobs among them.
    """
    from torchtpu_cache.jax import plug

    return plug.stats()
