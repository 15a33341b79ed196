"""What a job can do with the interface itself, and what a strange JAX does to it: each function raises where wrong.

Run as `job.py` is; the words are functions below, and what they say at WARNING is in the report.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import types

import jax
import job
from jax._src import compilation_cache, compiler

import torchtpu_cache.jax
from torchtpu_cache import api

SAID = []


class Notes(logging.Handler):
    def emit(self, record):
        SAID.append(record.getMessage())


def counted(name):
    return api.default_assembly().node.counters.snapshot()[name]


def one():
    jax.clear_caches()
    return job.run(*job.PROGRAMS[2])


def functions():
    names = ["compile_or_get_cached", "_cache_write", "_get_cache", "get_executable_and_time"]
    return [getattr(compiler, name, None) or getattr(compilation_cache, name, None) for name in names]


def not_asked():
    """Nobody asked: JAX looked for plugins by now, and found nothing to do."""
    one()
    assert "torchtpu_cache.jax.switch" in sys.modules
    assert "torchtpu_cache.jax.plug" not in sys.modules
    assert torchtpu_cache.jax.stats()["requests"] == 0


def missing():
    """A release without a function that the adapter stands on: one warning, and JAX as it was."""
    flags = dict(jax.config.values)
    before = functions()
    kept = compiler._cache_write
    del compiler._cache_write
    try:
        assert [torchtpu_cache.jax.enable() for _ in range(3)] == [False] * 3
    finally:
        compiler._cache_write = kept
    assert len(SAID) == 1 and "_cache_write" in SAID[0], SAID
    assert functions() == before
    assert dict(jax.config.values) == flags
    one()
    assert torchtpu_cache.jax.stats()["requests"] == 0


def other_parameters():
    """The same for a function that takes something else."""
    kept = compilation_cache._get_cache
    compilation_cache._get_cache = lambda: None
    try:
        assert not torchtpu_cache.jax.enable()
    finally:
        compilation_cache._get_cache = kept


def disabling():
    """After it JAX is what it was, also where somebody has kept one of our functions."""
    flags = dict(jax.config.values)
    before = functions()
    torchtpu_cache.jax.disable()
    assert torchtpu_cache.jax.enable()
    assert torchtpu_cache.jax.enable()
    assert functions() != before
    kept = compiler.compile_or_get_cached
    first = one()
    assert torchtpu_cache.jax.stats()["requests"] == 1
    torchtpu_cache.jax.disable()
    assert torchtpu_cache.jax.stats()["requests"] == 1, "the last figures stay"
    assert functions() == before
    assert dict(jax.config.values) == flags
    compiler.compile_or_get_cached = kept
    try:
        assert one() == first
    finally:
        compiler.compile_or_get_cached = before[0]
    assert counted("requests") == 1
    torchtpu_cache.jax.enable()
    one()
    assert (counted("requests"), counted("compiled")) == (2, 1)
    torchtpu_cache.jax.disable()
    if hasattr(compilation_cache, "_cache_checked"):  # JAX had compiled, see `not_asked`, which is said once
        assert sum("before torchtpu_cache.jax.enable()" in said for said in SAID) == 1, SAID


def compressors():
    """Processes that compress differently never share, whatever JAX's key says of it."""
    zstandard = importlib.import_module("zstandard")
    stdlib = types.SimpleNamespace(
        compress=zstandard.ZstdCompressor().compress, decompress=zstandard.ZstdDecompressor().decompress
    )
    kept = compilation_cache.zstandard, getattr(compilation_cache, "zstd", None)
    seen = []
    # As with the package zstandard, with none, with Python's own that JAX's key calls zlib, and again.
    for package, own in (zstandard, None), (None, None), (None, stdlib), (None, None), (zstandard, None):
        if own is not None and not hasattr(compilation_cache, "zstd"):
            continue
        compilation_cache.zstandard = package
        if hasattr(compilation_cache, "zstd"):
            compilation_cache.zstd = own
        before = counted("compiled")
        torchtpu_cache.jax.enable()
        outputs = one()
        torchtpu_cache.jax.disable()
        seen.append((counted("compiled") - before, outputs))
    compilation_cache.zstandard = kept[0]
    if hasattr(compilation_cache, "zstd"):
        compilation_cache.zstd = kept[1]
    assert len({str(outputs) for _, outputs in seen}) == 1
    assert counted("failures") == {}
    return [count for count, _ in seen]


def no_exception_from_below():
    """A cache that is broken through and through costs JAX nothing but time."""
    import torchtpu_cache.jax.adapter as adapter

    def broken():
        raise RuntimeError("made to fail")

    torchtpu_cache.jax.enable()
    outputs = one()
    adapter.default_assembly = broken
    try:
        assert one() == outputs
    finally:
        adapter.default_assembly = api.default_assembly
    torchtpu_cache.jax.disable()


def changed_flags():
    """Flags that changed after the compiler was set up: no program gets a key that it may not have.

    What is bypassed goes JAX's own way, here into a folder of its own.
    """
    folder = os.environ["OWN_FOLDER"]
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    torchtpu_cache.jax.enable()
    one()
    assert not os.path.isdir(folder) or not os.listdir(folder)
    os.environ["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=true"
    one()
    assert counted("bypassed") == {"environment_changed": 1}
    assert any("enable before the first computation" in said for said in SAID)
    assert any(name.startswith("jit_rolled-") for name in os.listdir(folder))
    torchtpu_cache.jax.disable()
    # Now as somebody who enables late: XLA read its flags before they were set.
    torchtpu_cache.jax.enable()
    one()
    assert counted("bypassed")["environment_changed"] == 2
    del os.environ["XLA_FLAGS"]
    torchtpu_cache.jax.disable()


def turned_off():
    """Who has turned JAX's own cache off gets ours, and JAX's stays off for what is bypassed."""
    folder = os.environ["OWN_FOLDER"] + " off"
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_enable_compilation_cache", False)
    torchtpu_cache.jax.enable()
    asked = counted("requests")
    one()
    os.environ["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=true"
    one()
    del os.environ["XLA_FLAGS"]
    assert counted("requests") == asked + 2
    torchtpu_cache.jax.disable()
    assert not jax.config.values["jax_enable_compilation_cache"]
    assert not os.path.isdir(folder) or not os.listdir(folder)


def failing():
    """What XLA refuses is counted, whether it was looked up or bypassed, and adds up."""
    torchtpu_cache.jax.enable()
    before = torchtpu_cache.jax.stats()
    for value in "1", __file__:
        try:
            jax.jit(lambda x: x - 7).lower(1.0).compile(compiler_options={"xla_made_up": value})
        except Exception as error:
            assert "xla_made_up" in str(error), error
        else:
            raise AssertionError("an option that does not exist was taken")
    after = torchtpu_cache.jax.stats()
    torchtpu_cache.jax.disable()
    counts = [after[name] - before[name] for name in ("requests", "missed", "compile_failures", "compiled")]
    bypassed = after["bypassed"].get("option_names_a_file", 0) - before["bypassed"].get("option_names_a_file", 0)
    made = counts[3]  # what the call needs besides
    assert (counts, bypassed) == ([2 + made, 1 + made, 2, made], 1), (counts, bypassed)


def client_options():
    """What JAX tells a plugin when it makes the client is part of the key."""
    if "jax_pjrt_client_create_options" not in jax.config.values:
        return
    before = counted("compiled")
    for told in "a:1", "a:2", "a:1":
        jax.config.update("jax_pjrt_client_create_options", told)
        torchtpu_cache.jax.enable()
        one()
        torchtpu_cache.jax.disable()
    jax.config.update("jax_pjrt_client_create_options", None)
    assert counted("compiled") - before == 2


def main(words):
    logger = logging.getLogger("torchtpu_cache")
    logger.addHandler(Notes(level=logging.WARNING))
    outputs = {word: globals()[word]() for word in words}
    print(json.dumps({"jax": jax.__version__, "outputs": outputs}))


if __name__ == "__main__":
    main(sys.argv[1:])
