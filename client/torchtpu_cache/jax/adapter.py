"""Answers what JAX asks of its persistent cache from the node, one program at a time in each thread.

JAX's own code goes on serialising, compressing and loading; only where the bytes come from and go to is ours. A
program that must not be cached goes the way that it would go without us. No fault of ours reaches JAX.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torchtpu_cache.api import default_assembly
from torchtpu_cache.jax.program import check_module, check_options, keyed
from torchtpu_cache.jax.target import Targets
from torchtpu_cache.sparing import SparingLog
from torchtpu_cache_core.canonical.allowlist import AllowList
from torchtpu_cache_core.errors import Bypass, LoadError

if TYPE_CHECKING:
    from torchtpu_cache.assembly import Assembly
    from torchtpu_cache.jax.program import JaxProgram
    from torchtpu_cache_core.canonical.environment import Environment

_log = logging.getLogger(__name__)

Function = Callable[..., Any]

_MISS: Final = (None, None)
_PROFILE_GUIDED: Final = ("jax_enable_pgle", "jax_compilation_cache_expect_pgle")


# Plain classes and tuples below: a frozen dataclass takes most of a millisecond to make, and a job waits for each.


class _Call:
    """A program on its way through JAX's compile call; also what JAX takes for its cache on that way.

    Args:
        given: the compile call's arguments by name.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.program: JaxProgram | None = None  # None before JAX asks, and for what bypasses
        self.bypassed = False
        self.waits = False  # it was not found or bypasses, and is not compiled yet
        self.offered: bytes | None = None  # what `get` gives to JAX while it loads
        self.taken: bytes | None = None  # what JAX gave to `put`

    def get(self, key: str) -> bytes | None:
        return self.offered

    def put(self, key: str, value: bytes) -> None:
        self.taken = value


class _Contained:
    """A block that ends at a fault of ours, which is logged; no exception but an interrupt leaves it."""

    def __init__(self, failure: str) -> None:
        self.failure = failure

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        _log.error(self.failure, exc_info=error)
        return True


class _Local(threading.local):
    call: _Call | None = None


class Release(NamedTuple):
    """What this process's JAX is: its version, how it compresses, and for people its name with jaxlib's."""

    version: str
    compressor: str
    producer: str


class Adapter:
    """Stands in for functions of JAX; each method of that purpose takes the original first.

    Args:
        environment: as it was when JAX's compiler was set up.
        release: of this process's JAX.
        settings: JAX's configuration object.
        has_own_cache: whether JAX's cache was on before the adapter turned it on.
    """

    def __init__(self, environment: Environment, release: Release, settings: Any, *, has_own_cache: bool) -> None:
        self._environment = environment
        self._release = release
        self._settings = settings
        self._has_own_cache = has_own_cache
        self._local = _Local()
        self._sparing = SparingLog(_log)
        self._parts: tuple[Assembly, Targets, AllowList] | None = None
        self._closed = False

    def close(self) -> None:
        """From now on JAX's functions do what they did, also where somebody else has kept ours."""
        self._closed = True

    # ---- instead of JAX's functions --------------------------------------------------------------------------

    def compile_or_get_cached(self, original: Function, names: inspect.Signature) -> Function:
        """Knows, from here to the end of the call, which program this thread is about."""

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._closed:
                return original(*args, **kwargs)
            before = self._local.call
            call = self._local.call = _Call(names.bind(*args, **kwargs).arguments)
            try:
                return original(*args, **kwargs)
            except BaseException:  # an interrupt ends a compile as well
                if call.waits:
                    with _Contained("a failed compile could not be counted"):
                        default_assembly().node.counters.compile_failed()
                raise
            finally:
                self._local.call = before

        return wrapper

    def get_cache(self, original: Function, _names: inspect.Signature) -> Function:
        """Where JAX reads and writes: for a program of ours, this call's bytes; else its own cache, if that was on."""

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = self._local.call
            if call is not None and call.program is not None:
                return call
            return original(*args, **kwargs) if self._has_own_cache or self._closed else None

        return wrapper

    def get_executable_and_time(self, original: Function, names: inspect.Signature) -> Function:
        """Gives what the tiers have as far as JAX can load it, and a miss otherwise."""

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = self._local.call
            if call is None:
                return original(*args, **kwargs)
            answer = self._answer(call, lambda: original(*args, **kwargs), names.bind(*args, **kwargs).arguments)
            return original(*args, **kwargs) if answer is None else answer

        return wrapper

    def cache_write(self, original: Function, names: inspect.Signature, put: Function) -> Function:
        """Publishes what JAX compiled, whichever process of a job this is and however quick it was."""

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = self._local.call
            if call is None:
                return original(*args, **kwargs)
            call.waits = False
            with _Contained("what JAX compiled could not be counted or stored"):
                given = names.bind(*args, **kwargs).arguments
                if call.program is not None:
                    self._compiled(call, call.program, given, put)
                elif call.bypassed:
                    default_assembly().node.counters.compiled(float(given["compile_time_secs"]))
            return None if call.program is not None else original(*args, **kwargs)

        return wrapper

    # ---- one program -----------------------------------------------------------------------------------------

    def _answer(self, call: _Call, load_offered: Callable[[], Any], given: dict[str, Any]) -> Any:
        """An executable and its compile seconds, or a miss; None for a program that goes JAX's own way."""
        with _Contained("a look-up for JAX failed"):
            self._judge(call, given["cache_key"])
            return None if call.program is None else self._found(call, call.program, load_offered)
        self._bypass(call, "internal")
        return None

    def _judge(self, call: _Call, jax_key: str) -> None:
        """Decides whether the program may be cached, and under which key."""
        try:
            call.program = self._program(call.given, jax_key)
        except Bypass as bypass:
            topic = f"bypass.{bypass.reason}"
            if bypass.reason == "environment_changed":
                hint = "set flags before torchtpu_cache.jax.enable(), and enable before the first computation"
                self._sparing.warning(topic, "programs are compiled without the cache: %s; %s", bypass, hint)
            else:
                _log.info("%s is compiled without the cache: %s", jax_key, bypass)
            self._bypass(call, bypass.reason)

    def _bypass(self, call: _Call, reason: str) -> None:
        call.program, call.bypassed, call.waits = None, True, True
        with _Contained("a bypass could not be counted"):
            counters = default_assembly().node.counters
            counters.request()
            counters.bypass(reason)

    def _program(self, given: dict[str, Any], jax_key: str) -> JaxProgram:
        if given["host_callbacks"]:
            raise Bypass("host_callback", "the program calls back into Python")
        devices, backend = given["devices"], given["backend"]
        if {device.process_index for device in devices.flat} != {backend.process_index()}:
            raise Bypass("spans_processes", "the program runs on devices of several processes")
        if any(getattr(self._settings, name, False) for name in _PROFILE_GUIDED):
            raise Bypass("profile_guided", "JAX's key does not tell one profile from another")
        self._environment.check_unchanged(os.environ)
        _, targets, allow_list = self._tools()
        operations = check_module(given["computation"], allow_list)
        check_options(given["compile_options"])
        return keyed(
            jax_key,
            jax_version=self._release.version,
            compressor=self._release.compressor,
            target=targets.describe(backend, devices),
            environment=self._environment,
            operations=operations,
        )

    def _tools(self) -> tuple[Assembly, Targets, AllowList]:
        """What belongs to this process's assembly; a forked child has another."""
        assembly = default_assembly()
        parts = self._parts
        if parts is None or parts[0] is not assembly:
            allow_list = AllowList.of(assembly.config.custom_call_targets)
            parts = self._parts = (assembly, Targets(assembly.identities), allow_list)
        return parts

    def _found(self, call: _Call, program: JaxProgram, load_offered: Callable[[], Any]) -> Any:
        wanted = {device.id for device in call.given["devices"].flat}

        def load(executable: bytes | memoryview) -> Any:
            call.offered = bytes(executable)
            try:
                loaded = load_offered()
            except MemoryError:
                raise
            except Exception as error:
                from torchtpu_cache.compilers.messages import blames_executable, shorten

                message = f"JAX could not load it: {type(error).__name__}: {shorten(str(error))}"
                raise LoadError(message, blames_entry=blames_executable(error)) from error
            finally:
                call.offered = None
            if loaded[0] is None:
                raise LoadError("JAX did not load it", blames_entry=False)
            if {device.id for device in loaded[0].local_devices()} != wanted:
                raise LoadError("the executable is for other devices than the program's")
            return loaded

        found = default_assembly().node.find(program, load=load)
        call.waits = found is None
        return _MISS if found is None else found.loaded

    def _compiled(self, call: _Call, program: JaxProgram, given: dict[str, Any], put: Function) -> None:
        node = default_assembly().node
        seconds = float(given["compile_time_secs"])
        node.compiled(program, seconds)
        if not node.mode.publishes:
            return
        try:
            put(given["cache_key"], given["module_name"], given["executable"], given["backend"], int(seconds))
        except Exception as error:
            from torchtpu_cache.compilers.messages import shorten

            message = "JAX could not serialise a program, so it is not stored: %s: %s"
            self._sparing.warning("serialise", message, type(error).__name__, shorten(str(error)))
        packed, call.taken = call.taken, None
        if packed is None:
            node.counters.not_published("unserialisable")
            return
        from torchtpu_cache.compilers.base import ROAD_CLIENT, Compiled

        node.publish(
            program,
            Compiled(
                executable=packed,
                compile_seconds=seconds,
                producer=self._release.producer,
                road=ROAD_CLIENT,
                compiler_sha256=program.compiler,
            ),
        )
