"""What a program of JAX is to the cache: its key, and whether it may be cached at all.

JAX names a program by a digest of its own over module, options, topology and flags. That string is one component
here; what it does not tell stands beside it: the compiler by its file, the CPU, the environment, the release of JAX
and how it compresses.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from torchtpu_cache_core.canonical.allowlist import HOST_TRANSFER
from torchtpu_cache_core.canonical.files import names_a_file
from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.key import SCHEME, Component, key_of
from torchtpu_cache_core.request import FORMAT_JAX

if TYPE_CHECKING:
    from torchtpu_cache_core.canonical.allowlist import AllowList
    from torchtpu_cache_core.canonical.environment import Environment
    from torchtpu_cache_core.names import Key
    from torchtpu_cache_core.request import Target

_BYTES_PER_OPERATION: Final = 40
"""Of stripped bytecode: about what a module of the size measures elsewhere."""


class JaxProgram:
    """A program of JAX with its key; a `request.Keyed`."""

    executable_format = FORMAT_JAX

    def __init__(
        self, key: Key, components: tuple[Component, ...], *, compiler: str, operations: int, environment: Environment
    ) -> None:
        self.key = key
        self.components = components
        self.compiler = compiler
        self._operations = operations
        self._environment = environment

    @property
    def program_bytes(self) -> int:
        return self._operations * _BYTES_PER_OPERATION

    def check_files(self) -> None:
        self._environment.check_unchanged(os.environ)
        self._environment.check_files()


def keyed(
    jax_key: str, *, jax_version: str, compressor: str, target: Target, environment: Environment, operations: int
) -> JaxProgram:
    """The program that JAX names `jax_key`.

    Raises:
        Bypass: the environment has no identity.
    """
    components = (
        Component.of("scheme", SCHEME),
        Component.of("executable_format", FORMAT_JAX),
        Component.of("jax.key", jax_key),
        Component.of("jax.version", jax_version),
        Component.of("jax.compressor", compressor),
        *target.components(),
        *environment.components(),
    )
    return JaxProgram(
        key_of(components),
        components,
        compiler=target.compiler,
        operations=operations,
        environment=environment,
    )


def check_module(module: Any, allow_list: AllowList) -> int:
    """Looks at every operation of a live module; gives how many there are.

    Raises:
        Bypass: it calls back into Python, or holds a custom call that is not on the list.
    """
    calls: set[str] = set()
    operations = 0
    waiting = [module.operation]
    while waiting:
        for region in waiting.pop().regions:
            for block in region:
                for view in block:
                    operations += 1
                    operation = view.operation
                    name = operation.name
                    if name == "stablehlo.custom_call" or name == "mhlo.custom_call":
                        calls.add(_target(operation))
                    elif name == "stablehlo.send" or name == "stablehlo.recv":
                        calls.add(HOST_TRANSFER)
                    if len(operation.regions):
                        waiting.append(operation)
    allow_list.check(calls)
    return operations


def _target(operation: Any) -> str:
    attributes = operation.attributes
    # A call without a readable name is on no list.
    return str(attributes["call_target_name"]).strip('"') if "call_target_name" in attributes else ""


def check_options(options: Any) -> None:
    """Looks at the options that a user gave to this program alone.

    Raises:
        Bypass: one names a file. JAX's key has its name, and not what is in it.
    """
    for name, value in options.env_option_overrides:
        if isinstance(value, str) and names_a_file(name, value):
            raise Bypass("option_names_a_file", f"the option {name} names a file")
