"""What an executable depends on: program, options, target, environment. Everything that names a key starts here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, Self

from torchtpu_cache_core.canonical.files import PLAIN, Noted
from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.key import SCHEME, Component, key_of

if TYPE_CHECKING:
    from torchtpu_cache_core.canonical.environment import Environment
    from torchtpu_cache_core.identity import Signature
    from torchtpu_cache_core.names import Key

FORMAT_PJRT: Final = "pjrt"
"""Raw bytes of PJRT_Executable_Serialize."""

FORMAT_JAXLIB: Final = "pjrt-ifrt"
"""jaxlib's `LoadedExecutable.serialize()`: PJRT bytes in a wrapping of its own. Never under one key with raw ones."""

FORMAT_JAX: Final = "jax-cache"
"""What JAX gives to its persistent cache: compile seconds and `FORMAT_JAXLIB`, compressed by JAX."""

COMPRESSED_FORMATS: Final = frozenset({FORMAT_JAX})
"""Formats whose bytes come compressed, so that compressing them again only costs time."""

_REQUIRED_PARTS: Final = ("platform", "platform_version", "compiler")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is compiled for, described without opening a device.

    Args:
        name: what a person calls it (`cpu`, `v5e:2x2`); not part of the key.
        parts: sorted (name, value) pairs, each one a component `target.<name>` of the key.
        position_independent: it is proved for this compiler and target that executables do not depend on which
            physical devices they run on, so that a device assignment may be reduced to its logical order.
        unidentified: why the target has no identity, so that a request for it bypasses the cache; else empty.
    """

    name: str
    parts: tuple[tuple[str, str], ...]
    position_independent: bool = False
    unidentified: str = ""

    @classmethod
    def of(cls, name: str, parts: Mapping[str, str], *, position_independent: bool = False) -> Self:
        """A target from its parts.

        Raises:
            Bypass: platform, platform version or compiler identity is unknown. A key with that part left out could
                meet the key of another compiler, so there is none.
        """
        for required in _REQUIRED_PARTS:
            if not parts.get(required):
                raise Bypass("target_unknown", f"the {required.replace('_', ' ')} of {name} could not be found")
        return cls(name=name, parts=tuple(sorted(parts.items())), position_independent=position_independent)

    @classmethod
    def without_identity(cls, name: str, reason: str) -> Self:
        """A target that can be compiled for, and for which nothing may be cached."""
        return cls(name=name, parts=(), unidentified=reason)

    def part(self, name: str) -> str:
        """The value of one part; KeyError if the target has none of that name."""
        return dict(self.parts)[name]

    @property
    def platform(self) -> str:
        return self.part("platform")

    @property
    def compiler(self) -> str:
        """SHA-256 of the compiler's file."""
        return self.part("compiler")

    def components(self) -> list[Component]:
        return [Component.of(f"target.{name}", value) for name, value in self.parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything that an executable depends on.

    Args:
        program: the StableHLO module, MLIR bytecode or text.
        options: a serialised CompileOptionsProto, passed to XLA as it is; only the key sees its canonical form.
        target: what is compiled for.
        environment: flags and variables that change the code, as they stood before the compiler initialised.
        executable_format: FORMAT_PJRT or FORMAT_JAXLIB.
    """

    program: bytes = field(repr=False)
    options: bytes
    target: Target
    environment: Environment
    executable_format: str


@dataclass(frozen=True, slots=True)
class ProgramIdentity:
    """What a program is to the key.

    Args:
        form: the name of the canonical form (`portable-1.13.0`, `text`, `raw`), part of the key.
        sha256: of the program in that form.
        size_bytes: of the program in that form.
    """

    form: str
    sha256: str
    size_bytes: int


class ProgramResolver(Protocol):
    """Finds the identity of a program; thread-safe."""

    def resolve(self, program: bytes) -> ProgramIdentity:
        """The identity of `program`.

        Raises:
            Bypass: the program must not be cached (host callbacks, unlisted custom calls, bytes nobody can read).
        """
        ...


class Keyed(Protocol):
    """A request that has its key: all that a node and its tiers need to know of one."""

    @property
    def key(self) -> Key: ...

    @property
    def components(self) -> tuple[Component, ...]:
        """What the key was made of."""
        ...

    @property
    def executable_format(self) -> str: ...

    @property
    def compiler(self) -> str:
        """SHA-256 of the compiler's file, as in the components."""
        ...

    @property
    def program_bytes(self) -> int:
        """About how large the program is: programs of one size cost about the same to compile."""
        ...

    def check_files(self) -> None:
        """Refuses to publish what was compiled while the files that its flags and options name were changed.

        Raises:
            Bypass: one was written or replaced since the key was made.
        """
        ...


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request with its key and the components that the key was made of; a `Keyed`.

    Args:
        files: those that options name, with what `stat` said of each when it was read.
    """

    request: Request
    key: Key
    components: tuple[Component, ...]
    files: tuple[tuple[str, Signature], ...] = field(default=(), compare=False, repr=False)

    @property
    def executable_format(self) -> str:
        return self.request.executable_format

    @property
    def compiler(self) -> str:
        return self.request.target.compiler

    @property
    def program_bytes(self) -> int:
        return len(self.request.program)

    def check_files(self) -> None:
        """Refuses to publish what was compiled while the files that its flags and options name were changed.

        Raises:
            Bypass: one was written or replaced since the key was made.
        """
        request = self.request
        request.environment.check_files()
        if not any(map(_may_name_a_file, self.components)):
            return
        from torchtpu_cache_core.canonical.options import options_components

        noted: Noted = {}
        independent = request.target.position_independent
        options = options_components(request.options, position_independent=independent, noted=noted)
        if not set(options) <= set(self.components) or tuple(sorted(noted.items())) != self.files:
            raise Bypass("environment_changed", "a file that an option names changed during the compile")


def _may_name_a_file(component: Component) -> bool:
    if not component.name.startswith("options.") or component.name == "options.build_options":
        return False
    return component.text is None or PLAIN.fullmatch(component.text) is None


def resolve(request: Request, resolver: ProgramResolver) -> ResolvedRequest:
    """The key of a request.

    Raises:
        Bypass: the request must not be cached.
        InvalidRequest: its options are no CompileOptionsProto.
    """
    if request.target.unidentified:
        raise Bypass("target_unknown", request.target.unidentified)
    # Late: JAX's programs bring a key of their own, and so need no tables of options.
    from torchtpu_cache_core.canonical.options import options_components

    program = resolver.resolve(request.program)
    noted: Noted = {}
    independent = request.target.position_independent
    options = options_components(request.options, position_independent=independent, noted=noted)
    components = (
        Component.of("scheme", SCHEME),
        Component.of("executable_format", request.executable_format),
        Component.of("program.form", program.form),
        Component.digested("program", program.sha256, program.size_bytes),
        *options,
        *request.target.components(),
        *request.environment.components(),
    )
    return ResolvedRequest(request, key_of(components), components, tuple(sorted(noted.items())))
