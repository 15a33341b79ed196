"""torchtpu-cache: every XLA program of a fleet is compiled once, anywhere, and is then ready everywhere."""
