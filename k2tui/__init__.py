"""k2tui: a terminal dashboard for speculative-decoding pipelines on SGLang."""

__version__ = "0.1.0"
