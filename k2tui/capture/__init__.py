"""The only room that imports sglang: the hidden-state plug-in and its writer."""
