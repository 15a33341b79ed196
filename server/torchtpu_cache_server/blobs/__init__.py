"""Buckets: where the service keeps its objects (entries as blobs, manifests, tombstones)."""
