"""The service of torchtpu-cache."""
