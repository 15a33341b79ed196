"""Puts the adapter into JAX, and takes it out again.

JAX has no registry for caches. What is replaced here are functions of its private modules, which had these names and
parameters in every release from 0.4.30 to 0.12.0.1. Where one is missing, nothing is replaced.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from torchtpu_cache import __version__, api
from torchtpu_cache.counters import Counters
from torchtpu_cache.jax.adapter import Adapter, Function, Release
from torchtpu_cache_core.canonical.environment import Environment
from torchtpu_cache_core.config import Mode
from torchtpu_cache_core.errors import Bypass, CacheError, CompilerMissing
from torchtpu_cache_core.perprocess import PerProcess

_log = logging.getLogger(__name__)

_COMPILER: Final = "jax._src.compiler"
_CACHE: Final = "jax._src.compilation_cache"

NEEDED: Final = (
    (_COMPILER, "compile_or_get_cached", ("backend", "computation", "devices", "compile_options", "host_callbacks")),
    (_COMPILER, "_cache_write", ("cache_key", "compile_time_secs", "module_name", "backend", "executable")),
    (_CACHE, "_get_cache", ("backend",)),
    (_CACHE, "get_executable_and_time", ("cache_key", "compile_options", "backend")),
    (_CACHE, "put_executable_and_time", ("cache_key", "module_name", "executable", "backend", "compile_time")),
    (_CACHE, "reset_cache", ()),
)
"""Module, function, and the parameters that are named here: all that is used of JAX beside its flags."""

_CACHE_IS_ON: Final = "jax_enable_compilation_cache"
_CLIENT_OPTIONS: Final = "jax_pjrt_client_create_options"

FLAGS: Final[dict[str, Any]] = {
    _CACHE_IS_ON: True,
    # Otherwise the options of a program, and so its key, hold the path of JAX's own cache, where one is set.
    "jax_persistent_cache_enable_xla_caches": "none",
    # JAX would not hand over what is smaller.
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
"""Flags that are set while the adapter is in; what a release does not have is left out."""


class NotTaken(CacheError):
    """This release of JAX lacks something that the adapter stands on."""


class _Plug(NamedTuple):
    """What was replaced: (module, name, ours, theirs), and the flags as they were."""

    adapter: Adapter
    functions: list[tuple[Any, str, Function, Function]]
    flags: dict[str, Any]


_lock = PerProcess(threading.RLock)  # guards _plugged; held while JAX is changed
_plugged: _Plug | None = None
_warned = False
_speaks_at_exit = False
_was_enabled = False  # in this process or the one that it was forked from


def enable() -> bool:
    """As `torchtpu_cache.jax.enable` says."""
    try:
        return _enable(_import_jax())
    except CompilerMissing:
        raise
    except NotTaken as error:
        _warn_once(f"{error}; JAX goes on without torchtpu-cache")
    except Exception:
        _log.exception("JAX goes on without torchtpu-cache")
    return False


def _enable(jax: Any) -> bool:
    global _plugged, _speaks_at_exit, _was_enabled
    with _lock.get():
        if _plugged is not None:
            return True
        if not _speaks_at_exit:  # before there is an assembly, so that its uploads are awaited before this runs
            atexit.register(_say_at_exit, os.getpid())
        _speaks_at_exit = True
        if api.default_assembly().config.mode is Mode.OFF:
            _log.info("the mode is off: JAX is left as it is")
            return False
        needed = _needed(jax)
        has_compiled = not _was_enabled and _has_compiled()
        _plugged = _put_in(jax, needed)
        _was_enabled = True
    if has_compiled:
        _log.warning(
            "JAX compiled programs before torchtpu_cache.jax.enable(), without the cache;"
            " call it before the first computation"
        )
    return True


def _warn_once(message: str) -> None:
    global _warned
    if not _warned:
        _log.warning("%s", message)
    _warned = True


def disable() -> None:
    """As `torchtpu_cache.jax.disable` says."""
    global _plugged
    with _lock.get():
        if _plugged is not None:
            _take_out(_import_jax(), _plugged)
            _plugged = None


def stats() -> dict[str, Any]:
    """As `torchtpu_cache.jax.stats` says."""
    if not _was_enabled:
        return {**Counters().snapshot(), "storing": 0, "spooled": 0}
    assembly = api.default_assembly()
    spooled = 0 if assembly.spool is None else assembly.spool.stats().entries
    return {**assembly.node.counters.snapshot(), "storing": assembly.node.storing, "spooled": spooled}


def _import_jax() -> Any:
    try:
        return importlib.import_module("jax")
    except ModuleNotFoundError as error:
        if error.name != "jax":
            raise
        raise CompilerMissing("jax is not installed here; run: pip install 'torchtpu-cache[jax]'") from None


def _needed(jax: Any) -> dict[str, tuple[Any, Function, inspect.Signature]]:
    """Module, function and signature by name.

    Raises:
        NotTaken: one is not there, or does not take what it should.
    """
    found = {}
    for module_name, name, parameters in NEEDED:
        try:
            module = importlib.import_module(module_name)
            function = getattr(module, name)
            signature = inspect.signature(function)
        except (ImportError, AttributeError, TypeError, ValueError):
            raise NotTaken(f"jax {jax.__version__} has no {module_name}.{name}") from None
        missing = [parameter for parameter in parameters if parameter not in signature.parameters]
        if missing:
            raise NotTaken(f"{module_name}.{name} of jax {jax.__version__} takes no {missing[0]}")
        found[name] = (module, function, signature)
    return found


def _put_in(jax: Any, needed: dict[str, tuple[Any, Function, inspect.Signature]]) -> _Plug:
    settings = jax.config.values
    has_own_cache = bool(settings.get(_CACHE_IS_ON, True))
    adapter = Adapter(_surroundings(settings), _release(jax), jax.config, has_own_cache=has_own_cache)
    put = needed["put_executable_and_time"][1]
    makers: dict[str, Callable[[Function, inspect.Signature], Function]] = {
        "compile_or_get_cached": adapter.compile_or_get_cached,
        "_get_cache": adapter.get_cache,
        "get_executable_and_time": adapter.get_executable_and_time,
        "_cache_write": lambda original, names: adapter.cache_write(original, names, put),
    }
    plug = _Plug(adapter, [], {})
    try:
        for name, value in FLAGS.items():
            if name in settings:
                plug.flags[name] = settings[name]
                jax.config.update(name, value)
        for name, make in makers.items():
            module, theirs, signature = needed[name]
            ours = make(theirs, signature)
            setattr(module, name, ours)
            plug.functions.append((module, name, ours, theirs))
        needed["reset_cache"][1]()  # JAX remembers whether it used its cache
    except BaseException:
        _take_out(jax, plug)
        raise
    return plug


def _take_out(jax: Any, plug: _Plug) -> None:
    for module, name, ours, theirs in reversed(plug.functions):
        if getattr(module, name, None) is ours:  # else somebody else has replaced ours, and may still call it
            setattr(module, name, theirs)
    plug.adapter.close()
    for name, value in plug.flags.items():
        jax.config.update(name, value)


def _has_compiled() -> bool:
    """Whether JAX has compiled anything in this process; False where a release (0.4.30) cannot tell."""
    # Set when JAX first compiles, cache or none, and otherwise of no concern here: a release may drop it.
    return bool(getattr(importlib.import_module(_CACHE), "_cache_checked", False))


def _release(jax: Any) -> Release:
    import jaxlib.version

    cache = importlib.import_module(_CACHE)
    if getattr(cache, "zstd", None) is not None:
        compressor = "zstd"  # of the standard library, which JAX's key calls zlib
    else:
        compressor = "zlib" if getattr(cache, "zstandard", None) is None else "zstandard"
    producer = f"torchtpu-cache {__version__}, jax {jax.__version__}, jaxlib {jaxlib.version.__version__}"
    return Release(version=jax.__version__, compressor=compressor, producer=producer)


def _surroundings(settings: Mapping[str, Any]) -> Environment:
    """The environment that the compiler sees, and what JAX tells a plugin when it makes the client."""
    told = settings.get(_CLIENT_OPTIONS)
    try:
        environment = Environment.snapshot(
            os.environ, sys.argv, plugin_options={} if told is None else {_CLIENT_OPTIONS: told}
        )
        # Looked at without JAX's lock, which it may hold while it looks for plugins.
        if getattr(importlib.import_module("jax._src.xla_bridge"), "_backends", True):
            # XLA read its flags some time ago. They are these only if nobody has changed any since the start.
            environment.check_unchanged(_environ_at_start())
        return environment
    except Bypass as bypass:
        return Environment.without_identity(os.environ, bypass)


def _environ_at_start() -> dict[str, str]:
    pairs = (item.partition(b"=") for item in Path("/proc/self/environ").read_bytes().split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _say_at_exit(pid: int) -> None:
    if _was_enabled and pid == os.getpid():
        _log.info("%s", _summary(stats()))


def _summary(totals: Mapping[str, Any]) -> str:
    """The figures of a job in one line; those before the semicolon are all that was asked for."""

    def listed(name: str) -> str:
        return ", ".join(f"{label} {count}" for label, count in totals[name].items()) or "none"

    return (
        f"JAX asked for {totals['requests']} programs: hits: {listed('hits')}, missed: {totals['missed']},"
        f" bypassed: {listed('bypassed')}; compiled {totals['compiled']} in {totals['compile_seconds']:.1f} s,"
        f" about {totals['seconds_saved']:.1f} s saved; published: {listed('published')},"
        f" not published: {listed('not_published')}, waiting for the remote: {totals['spooled']}"
    )
