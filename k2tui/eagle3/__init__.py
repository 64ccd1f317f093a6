"""EAGLE-3 in plain torch: draft model, loss, dataset, trainer, evaluation, export. Knows no server and no screen."""
