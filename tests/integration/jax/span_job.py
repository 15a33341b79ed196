"""One of two processes of a job: `span_job.py <port> <rank>`. A program of its own, and one over both."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import torchtpu_cache.jax

PORT, RANK = sys.argv[1], int(sys.argv[2])

jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, RANK)
torchtpu_cache.jax.enable()

own = jax.jit(lambda x: jnp.sort(jnp.tanh(x) * 2))(np.arange(64, dtype=np.float32))
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
shared = jax.make_array_from_callback((4,), sharding, lambda index: np.arange(4, dtype=np.float32)[index])
total = jax.jit(lambda x: jnp.cumsum(x).sum(), out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))(shared)

report = {
    "own": np.asarray(own).tobytes().hex(),
    "total": float(np.asarray(total.addressable_data(0))),
    "stats": torchtpu_cache.jax.stats(),
}
jax.distributed.shutdown()
print(json.dumps(report))
