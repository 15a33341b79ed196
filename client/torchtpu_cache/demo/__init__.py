"""The demo: two machines and a service on this one, with real programs for the CPU and for a TPU that is not here."""
