"""torchtpu_cache_core: keys, entries, stores. What client and server share, and nothing that needs either."""

__version__ = "0.1.0"
