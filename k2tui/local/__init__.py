"""The embedded engine: a small real model server for trying the pipeline. SGLang is what users outgrow it to."""
