"""Model files in, modules out: configs, architectures, checkpoints, the embedded model."""
