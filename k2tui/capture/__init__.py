"""Capture of hidden states. `plugin` is the only module of the project that imports sglang; `sink`, `request` and `control`
serve the embedded engine too; `client`, `lease` and `align` are the other end of the wire."""
