"""A job with JAX, as a user has it: `job.py` runs programs, and knows nothing of the cache until it reports at its end.

Run by the tests in environments with other releases of JAX, so it imports nothing but JAX, NumPy and, at the end, what
is tested. `python job.py <words>`: each word is a function below.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np


def train(weights, batch):
    def loss(weights):
        hidden = jnp.maximum(batch @ weights[0], 0)
        return jnp.mean((hidden @ weights[1] - batch) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return value, [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)]


def spectrum(matrix):
    return jnp.sort(jnp.abs(jnp.fft.fft(matrix)), axis=1), jnp.linalg.norm(matrix, axis=0)


def rolled(vector):
    def step(carry, x):
        carry = jnp.sin(carry) + x
        return carry, carry * 2

    return jax.lax.scan(step, vector, jnp.stack([vector] * 8))


MATRIX = np.linspace(-1, 1, 64 * 32, dtype=np.float32).reshape(64, 32)
PROGRAMS = [
    (train, ([np.ones((32, 16), np.float32), np.full((16, 32), 0.5, np.float32)], MATRIX)),
    (spectrum, (MATRIX,)),
    (rolled, (MATRIX[0],)),
]


def run(program, arguments):
    """What it gives, bit for bit."""
    return [np.asarray(leaf).tobytes().hex() for leaf in jax.tree_util.tree_leaves(jax.jit(program)(*arguments))]


def programs():
    """Compiles from several threads at once."""
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda each: run(*each), PROGRAMS))


def callback():
    """Two callbacks that give one and the same StableHLO."""
    wanted = np.sin if os.environ.get("MACHINE") == "A" else np.cos
    vector = MATRIX[0]

    def program(x):
        return jax.pure_callback(lambda x: wanted(x).astype(np.float32), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    given = np.asarray(jax.jit(program)(vector))
    np.testing.assert_allclose(given, wanted(vector), rtol=1e-6)
    return wanted.__name__


def enable():
    import torchtpu_cache.jax

    return torchtpu_cache.jax.enable(), torchtpu_cache.jax.enable()


def main(words):
    outputs = {word: globals()[word]() for word in words}
    # By now JAX has asked for what it wanted, with our code or without.
    used = "torchtpu_cache.jax.plug" in sys.modules
    import torchtpu_cache.jax

    report = {"jax": jax.__version__, "used": used, "outputs": outputs, "stats": torchtpu_cache.jax.stats()}
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
