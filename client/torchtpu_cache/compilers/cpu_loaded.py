"""A CPU executable on devices of this process. jax is needed for `execute` alone, to make arrays and to read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from torchtpu_cache.compilers.base import ArrayShape, Loaded
from torchtpu_cache.compilers.jaxlib_cpu import INSTALL_HINT, initialise_kernels, terse_print_options
from torchtpu_cache_core.errors import CompilerMissing

if TYPE_CHECKING:
    import numpy

_BRACES: Final = re.compile(r"\{[^{}]*\}")


class CpuLoaded(Loaded):
    """Over a jaxlib LoadedExecutable."""

    def __init__(self, xla_client: Any, executable: Any) -> None:
        self._xla_client = xla_client
        self._executable = executable

    @property
    def device_ids(self) -> tuple[int, ...]:
        return tuple(device.id for device in self._executable.local_devices())

    @property
    def device_grid(self) -> tuple[int, int]:
        """Replicas and partitions as compiled in; `local_devices` repeats what the load asked for."""
        # XLA writes them into the first line of a module's text, and leaves them out where they are 1.
        line = self._module().to_string(*terse_print_options()).partition("\n")[0]
        while (flat := _BRACES.sub("", line)) != line:
            line = flat
        replicas, partitions = (re.search(rf"\b{name}=(\d+)", line) for name in ("replica_count", "num_partitions"))
        return int(replicas[1]) if replicas else 1, int(partitions[1]) if partitions else 1

    def parameter_shapes(self) -> tuple[ArrayShape, ...]:
        computation = self._xla_client.XlaComputation(self._module().as_serialized_hlo_module_proto())
        return tuple(
            ArrayShape(tuple(shape.dimensions()), shape.numpy_dtype().name)
            for shape in computation.program_shape().parameter_shapes()
        )

    def execute(self, inputs: Sequence[numpy.ndarray]) -> list[numpy.ndarray]:
        try:
            import jax
            import numpy
        except ImportError:
            raise CompilerMissing(f"running an executable needs jax; run: {INSTALL_HINT}") from None
        shapes = self.parameter_shapes()
        if len(inputs) != len(shapes):
            raise ValueError(f"the executable takes {len(shapes)} arrays, not {len(inputs)}")
        for position, (array, shape) in enumerate(zip(inputs, shapes, strict=True)):
            if (array.shape, array.dtype.name) != (shape.dimensions, shape.dtype):
                raise ValueError(f"input {position} is {array.dtype.name}{list(array.shape)}, not {shape}")
        PartitionSpec: Any = jax.sharding.PartitionSpec
        devices = numpy.array(self._executable.local_devices(), dtype=object)
        everywhere = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, ("device",)), PartitionSpec())
        initialise_kernels()
        # Without 64-bit types jax would narrow arrays on their way in.
        with jax.enable_x64(True):
            placed = [jax.device_put(array, everywhere) for array in inputs]
            results = self._executable.execute_sharded(placed).disassemble_into_single_device_arrays()
            return [numpy.asarray(per_device[0]) for per_device in results]

    def _module(self) -> Any:
        return self._executable.hlo_modules()[0]
