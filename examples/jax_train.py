"""A transformer that learns to copy, in JAX alone: nothing in this file knows of a cache.

    python examples/jax_train.py
    TORCHTPU_CACHE_JAX=1 python examples/jax_train.py

The second command shares what it compiles with every other job and machine of the fleet. Run it twice, and the second
run compiles nothing; what it prints of the losses is equal to the last bit.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 64
SEQUENCE = 32
WIDTH = 64
HEADS = 4
BATCH = 8


@functools.partial(jax.jit, static_argnums=1)
def initialise(seed, layers):
    """Weights by name; those of the layers are stacked."""

    def weights(key, *shape):
        return jax.random.normal(key, shape, jnp.float32) * shape[-2] ** -0.5

    keys = jax.random.split(jax.random.PRNGKey(seed), 6)
    return {
        "embedding": weights(keys[0], VOCABULARY, WIDTH),
        "position": weights(keys[1], SEQUENCE, WIDTH),
        "attention": weights(keys[2], layers, WIDTH, 3 * WIDTH),
        "output": weights(keys[3], layers, WIDTH, WIDTH),
        "up": weights(keys[4], layers, WIDTH, 4 * WIDTH),
        "down": weights(keys[5], layers, 4 * WIDTH, WIDTH),
    }


def normalised(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def attention(x, layer):
    batch, length, _ = x.shape
    query, key, value = jnp.split(x @ layer["attention"], 3, axis=-1)
    query, key, value = (each.reshape(batch, length, HEADS, WIDTH // HEADS) for each in (query, key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (WIDTH // HEADS) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
    return mixed.reshape(batch, length, WIDTH) @ layer["output"]


def loss_of(weights, tokens):
    """Cross entropy of the next token."""
    x = weights["embedding"][tokens[:, :-1]] + weights["position"][: tokens.shape[1] - 1]
    layers = {name: weights[name] for name in ("attention", "output", "up", "down")}
    for number in range(layers["up"].shape[0]):
        layer = {name: stacked[number] for name, stacked in layers.items()}
        x = x + attention(normalised(x), layer)
        x = x + jax.nn.gelu(normalised(x) @ layer["up"]) @ layer["down"]
    chances = jax.nn.log_softmax(normalised(x) @ weights["embedding"].T)
    return -jnp.take_along_axis(chances, tokens[:, 1:, None], axis=-1).mean()


@jax.jit
def train_step(weights, moments, tokens):
    """One step of gradient descent with momentum."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, tokens)
    moments = jax.tree_util.tree_map(lambda moment, gradient: 0.9 * moment + gradient, moments, gradients)
    weights = jax.tree_util.tree_map(lambda weight, moment: weight - 0.05 * moment, weights, moments)
    return loss, weights, moments


def batches(seed):
    """Half of each sequence is chance, the other half repeats it."""
    chance = np.random.default_rng(seed)
    while True:
        half = chance.integers(0, VOCABULARY, (BATCH, SEQUENCE // 2), dtype=np.int32)
        yield np.concatenate([half, half], axis=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    started = time.perf_counter()
    weights = initialise(arguments.seed, arguments.layers)
    moments = {name: np.zeros(weight.shape, np.float32) for name, weight in weights.items()}
    for step, tokens in enumerate(itertools.islice(batches(arguments.seed), arguments.steps)):
        loss, weights, moments = train_step(weights, moments, tokens)
        loss = float(loss)
        if step == 0:
            print(f"first step after {time.perf_counter() - started:.2f} s on {jax.default_backend()}")
        print(f"step {step} loss {loss!r}")


if __name__ == "__main__":
    main()
